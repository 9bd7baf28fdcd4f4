"""How a configuration says that a decoder is a prefix-LM."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from qkv.config.run import Config


def config(model: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"model": model, **sections})


def test_the_objective_says_it_for_the_model_and_the_model_for_the_objective() -> None:
    for tree in (config({}, objective={"kind": "prefix"}), config({"prefix": True})):
        assert tree.model.prefix
        assert tree.objective.kind == "prefix"
        assert Config.model_validate(tree.model_dump(mode="json")) == tree
    assert not config({}).model.prefix


@pytest.mark.parametrize(
    ("model", "sections", "says"),
    [
        ({"prefix": False}, {"objective": {"kind": "prefix"}}, r"with a prefix"),
        ({"prefix": True}, {"objective": {"kind": "causal"}}, r"without a prefix"),
        ({"family": "encoder"}, {"objective": {"kind": "prefix"}}, r"`prefix` and `family`"),
        ({}, {"objective": {"kind": "prefix"}, "data": {"kind": "labelled", "train": ["a.tsv"]}}, r"not learnt from"),
    ],
)
def test_what_does_not_go_together_is_refused(model: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(model, **sections)

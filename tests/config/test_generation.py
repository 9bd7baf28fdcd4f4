"""The `generation` section: where generated texts begin and end, and what is never in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.config.errors import ConfigError
from qkv.config.run import Config, GenerationConfig


def test_by_default_the_tokenizer_says_it_all() -> None:
    assert Config.load("encoder-decoder-tiny").generation == GenerationConfig(
        start_ids=None, eos_ids=None, suppress_ids=(), begin_suppress_ids=()
    )


def test_it_is_saved_with_the_configuration(tmp_path: Path) -> None:
    overrides = ("start_ids=[2,0]", "eos_ids=[2,7]", "suppress_ids=[1]", "begin_suppress_ids=[5]")
    config = Config.load("encoder-decoder-tiny", *(f"generation.{override}" for override in overrides))
    assert config.generation == GenerationConfig(
        start_ids=(2, 0), eos_ids=(2, 7), suppress_ids=(1,), begin_suppress_ids=(5,)
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert Config.load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "override",
    ["start_ids=[]", "start_ids=[-1]", "eos_ids=[true]", "suppress_ids=[0.5]", "suppress_ids=7", "stop_ids=[1]"],
)
def test_what_is_no_list_of_ids_is_refused_by_key(override: str) -> None:
    with pytest.raises(ConfigError, match=f"generation.{override.partition('=')[0]}|eos_ids"):
        Config.load("encoder-decoder-tiny", f"generation.{override}")

"""Two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qkv.config.errors import NotFoundError
from qkv.config.run import Config
from qkv.evaluate.run_differences import config_differences, diff_runs


def differences(preset: str, *overrides: str, base: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    """Key -> what is shown of both sides."""
    sides = (Config.load(preset, *changes).model_dump(mode="json") for changes in (base, overrides))
    return {found.key: (found.shown(0), found.shown(1)) for found in config_differences(*sides)}


def make_run(path: Path, config: str, losses: dict[int, float], **environment: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config, encoding="utf-8")
    lines = [{"step": step, "loss": loss, "places": ["a"]} for step, loss in losses.items()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (path / "env.json").write_text(json.dumps(environment), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("preset", "overrides", "wanted"),
    [
        ("decoder-tiny", (), {}),
        ("decoder-tiny", ("train.seed=3",), {"train.seed": ("0", "3")}),
        ("decoder-tiny", ("model.feed_forward.d_ff=64",), {"model.feed_forward.d_ff": ("384", "64")}),
        ("decoder-tiny", ("model.num_layers=6",), {"model.num_layers": ("4", "6")}),
        (
            "encoder-decoder-tiny",
            ("model.encoder.dropout=0.5",),
            {"model.encoder.dropout": ("0.0", "0.5")},
        ),
        (
            "encoder-decoder-tiny",
            ("model.attention.bias=true",),
            {"model.attention.bias": ("false", "true")},
        ),
        (
            "decoder-tiny",
            ("model.layers=[{attention: {window: 8}}, {}]",),
            {"model.layers.0.attention.window": ("null", "8"), "model.layers.2.attention.window": ("null", "8")},
        ),
    ],
)
def test_a_change_is_told_once_however_often_the_resolved_tree_repeats_it(preset, overrides, wanted) -> None:
    assert differences(preset, *overrides) == wanted


def test_what_all_layers_have_is_one_line() -> None:
    layers = "model.layers=[{attention: {window: 8}}]"
    assert differences("decoder-tiny", layers) == {"model.layers.*.attention.window": ("null", "8")}


def test_another_kind_has_keys_that_the_first_lacks() -> None:
    found = differences("decoder-tiny", "model.position.kind=learned")
    assert found["model.position.kind"] == ('"rope"', '"learned"')
    assert found["model.position.theta"] == ("10000.0", "(none)")


def test_a_new_item_of_a_list_is_told_without_its_nulls() -> None:
    ramp = "train.ramp=[{steps: 5, batch_tokens: 8}%s]"
    first = {"train.ramp.0.steps": ("(none)", "5"), "train.ramp.0.batch_tokens": ("(none)", "8")}
    second = {"train.ramp.1.steps": ("(none)", "6"), "train.ramp.1.max_seq_len": ("(none)", "64")}
    more = ramp % ", {steps: 6, max_seq_len: 64}"
    assert differences("decoder-tiny", ramp % "") == first
    assert differences("decoder-tiny", more, base=(ramp % "",)) == second
    assert differences("decoder-tiny", ramp % "", base=(more,)) == {key: two[::-1] for key, two in second.items()}
    null = differences("decoder-tiny", "train.ramp=[{steps: 5, max_seq_len: 8}]", base=(ramp % "",))
    assert null == {"train.ramp.0.max_seq_len": ("null", "8"), "train.ramp.0.batch_tokens": ("8", "null")}


def test_runs_are_compared_by_what_they_share(tmp_path) -> None:
    config = "train: {steps: 9, seed: %d}\n"
    packages = [{"torch": version} for version in ("1", "2")]
    first = make_run(tmp_path / "a", config % 0, {1: 3.0, 2: 2.0, 4: 1.0}, packages=packages[0], data_fingerprint="x")
    second = make_run(tmp_path / "b", config % 1, {1: 2.5, 4: 1.5, 8: 1.0}, packages=packages[1], cores=2)
    (second / "checkpoints/step-000004").mkdir(parents=True)
    (second / "checkpoints/step-000004/config.yaml").write_text(config % 2, encoding="utf-8")
    (second / "checkpoints/step-000004/state.json").write_text('{"data": "y"}', encoding="utf-8")
    found = diff_runs(first, second).as_dict()
    assert found["config"] == [{"key": "train.seed", "first": 0, "second": 2}]
    assert found["environment"] == [
        {"key": "packages.torch", "first": "1", "second": "2"},
        {"key": "cores", "second": 2},
    ]
    assert found["data_fingerprints"] == ["x", "y"]
    rows = [{"step": 1, "first": 3.0, "second": 2.5}, {"step": 4, "first": 1.0, "second": 1.5}]
    assert found["metrics"] == {"loss": rows}
    assert found["problems"] == []


def test_damage_is_named_and_the_rest_compared(tmp_path) -> None:
    first, second = (make_run(tmp_path / name, "train: {steps: 9}\n", {1: 3.0}) for name in "ab")
    (second / "env.json").write_text("[", encoding="utf-8")
    (second / "config.yaml").write_text("train: [\n", encoding="utf-8")
    found = diff_runs(first, second)
    assert [problem.partition(": ")[2].split()[0] for problem in found.problems] == ["config.yaml", "env.json"]
    assert all(problem.startswith(str(second)) for problem in found.problems)
    assert (found.config, found.environment) == (None, None)
    assert found.metrics == {"loss": [(1, 3.0, 3.0)]}
    with pytest.raises(NotFoundError, match="no such run"):
        diff_runs(first, tmp_path / "gone")

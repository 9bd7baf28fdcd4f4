"""What a hostile or mistyped configuration meets: one clear error, at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from qkv.config import Config, ConfigError, NotFoundError
from qkv.config.errors import QkvError

SMALL = "model: {vocab_size: 100, d_model: 64, num_layers: 2, attention: {num_heads: 4}}\n"


def error_of(tmp_path: Path, text: str, *overrides: str) -> ConfigError:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        Config.load(path, *overrides)
    assert time.monotonic() - start < 10
    assert len(str(caught.value)) < 2000
    return caught.value


@pytest.mark.parametrize(
    "value", ["!!int abc", "!!float abc", "!!bool abc", "!!timestamp abc", "!!str 3", "!own {a: 1}"]
)
def test_an_explicit_tag_is_refused_by_file_and_line(value: str, tmp_path: Path) -> None:
    error = error_of(tmp_path, f"model:\n  vocab_size: {value}\n")
    assert "tag" in error.what
    assert error.where == f"{tmp_path / 'config.yaml'}:2"


@pytest.mark.parametrize(
    "override",
    [
        "model.feed_forward.limit=1e300",
        "model.feed_forward={kind: moe, router: {correction_rate: 1e300}}",
        "train.optimizer={kind: adam, lr: 1e39}",
        "data={kind: images, std: [1e300, 1, 1]}",
    ],
)
def test_a_number_that_float32_cannot_compute_with_is_refused_by_its_key(override: str, tmp_path: Path) -> None:
    error = error_of(tmp_path, SMALL, override)
    assert "input should be" in error.what
    assert override.partition("=")[0] in str(error.where)


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000])
def test_a_number_of_thousands_of_digits_is_refused(digits: str, tmp_path: Path) -> None:
    assert "digits" in error_of(tmp_path, f"model: {{vocab_size: {digits}}}\n").what


@pytest.mark.parametrize("text", ["[" * 3000, "model: " + "{a: " * 3000, "- " * 3000])
def test_deep_nesting_is_refused(text: str, tmp_path: Path) -> None:
    assert "64 deep" in error_of(tmp_path, text).what


def test_a_deep_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64 deep"):
        Config.load("llama-tiny", "model" + ".a" * 3000 + "=1")


@pytest.mark.parametrize("text", ["model: &m {a: *m}\n", "model: &m {a: *m, b: *m, c: [*m, *m]}\n"])
def test_an_alias_within_itself_is_refused(text: str, tmp_path: Path) -> None:
    assert "deep" in error_of(tmp_path, text).what


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "too large" in error_of(tmp_path, "\n".join(lines)).what


def test_an_ordinary_alias_stands_for_its_value(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {vocab_size: &n 100, d_model: 64, max_seq_len: *n}\n", encoding="utf-8")
    assert Config.load(path).model.max_seq_len == 100


def test_a_nul_is_refused_by_line(tmp_path: Path) -> None:
    error = error_of(tmp_path, "model:\n  vocab_size: 1\0\n")
    assert "0x00" in error.what
    assert error.where == f"{tmp_path / 'config.yaml'}:2"


def test_a_long_chain_of_extends_is_refused(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="extend each other"):
        Config.load(tmp_path / "0.yaml")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"], ids=["long", "nul"])
def test_an_impossible_file_name_is_not_found(name: str) -> None:
    with pytest.raises(NotFoundError):
        Config.load(name)


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400"])
@pytest.mark.parametrize(
    "key",
    [
        "model.embedding.scale",
        "model.norm.eps",
        "model.position.theta",
        "model.init.std",
        "train.optimizer.lr",
        "train.optimizer.weight_decay",
        "train.clip",
        "data.validation",
    ],
)
def test_only_finite_numbers_pass(key: str, value: str, tmp_path: Path) -> None:
    assert key in str(error_of(tmp_path, SMALL, f"{key}={value}"))


@pytest.mark.parametrize(
    "override",
    [
        "model.vocab_size=true",
        "model.embedding.scale=true",
        "train.optimizer.lr=true",
        "train.optimizer.betas=[false, 0.9]",
        "train.seed=false",
        "train.clip=true",
    ],
)
def test_a_bool_is_no_number(override: str, tmp_path: Path) -> None:
    error = error_of(tmp_path, SMALL, override)
    assert error.what.startswith("expected a number, got ")
    assert override in str(error.where)


def test_a_whole_number_is_a_number_where_fractions_may_stand(tmp_path: Path) -> None:
    config = Config.load("llama-tiny", "train.clip=7", "model.embedding.scale=2", "model.attention.bias=true")
    assert (config.train.clip, config.model.embedding.scale) == (7.0, 2.0)


@pytest.mark.parametrize(
    "key",
    [
        "model.d_model",
        "model.feed_forward.d_ff",
        "model.attention.num_heads",
        "model.attention.num_kv_heads",
        "model.attention.head_dim",
        "model.attention.window",
        "model.vocab_size",
        "model.max_seq_len",
        "model.embedding.num_segments",
        "tokenizer.vocab_size",
        "train.steps",
        "train.batch_tokens",
        "train.seed",
    ],
)
def test_a_size_beyond_any_machine_is_refused_in_a_line(key: str, tmp_path: Path) -> None:
    error = error_of(tmp_path, SMALL, f"{key}=100000000000000000000")
    assert "less than or equal to" in error.what
    assert "\n" not in error.what
    assert key in str(error.where)


def test_a_feature_width_has_a_bound(tmp_path: Path) -> None:
    assert "1048576" in error_of(tmp_path, SMALL, "model.input={kind: features, width: 100000000}").what


def test_the_widest_model_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    config = Config.load(
        "llama-tiny",
        "model.d_model=1048576",
        "model.attention.num_heads=8192",
        "model.attention.num_kv_heads=null",
        "model.feed_forward={kind: relu, d_ff: null}",
    )
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert Config.load(path) == config


def test_a_long_wrong_value_is_cut_in_the_error(tmp_path: Path) -> None:
    assert error_of(tmp_path, SMALL, "train.steps=" + "x" * 5000).what.endswith("...")


def test_control_characters_are_escaped_in_an_error() -> None:
    text = str(QkvError("x\x1b]0;pwn\x07\r\n  also: 你好", where="\x9b\u202e", hint="a\tb"))
    assert text == "x\\x1b]0;pwn\\x07\\r\n  also: 你好\n  at \\x9b\\u202e\n  try a\tb"


def test_a_mistake_in_python_names_the_nearest_key() -> None:
    with pytest.raises(ValidationError, match="unknown key `num_lyers`, did you mean `num_layers`\\?"):
        Config(model={"num_lyers": 1})
    with pytest.raises(ValidationError, match="unknown kind `rmsnrom`, did you mean `rmsnorm`\\?"):
        Config(model={"vocab_size": 9, "norm": {"kind": "rmsnrom"}})


def test_the_suggestion_is_not_said_twice(tmp_path: Path) -> None:
    error = error_of(tmp_path, SMALL, "train.stpes=3", "train.optimizer.kind=adam_w")
    assert str(error).count("did you mean") == str(error).count("also:")
    assert error_of(tmp_path, SMALL, "model.norm.kind=[a]").what.startswith("unknown kind")

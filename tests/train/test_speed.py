"""Measuring how fast a configuration trains."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.config import Config
from qkv.config.errors import ConfigError
from qkv.inspect.summary import sized, summarise
from qkv.train import speed as speed_module
from qkv.train.loop import Trainer
from qkv.train.profile import PARTS
from qkv.train.speed import TrainingSpeed, measure_training

SMALL = ("model.d_model=32", "train.batch_tokens=256", "train.compile=off", "train.precision=fp32")
LAYERS = ("model.num_layers=1", "model.max_seq_len=32")


def measured(preset: str, *overrides: str, steps: int = 2) -> tuple[Config, TrainingSpeed]:
    config = Config.load(preset, *SMALL, *overrides)
    config = config.model_copy(update={"model": sized(config)[0]})
    return config, measure_training(config, steps)


@pytest.mark.parametrize(
    ("preset", "overrides", "tokens"),
    [
        ("decoder-tiny", LAYERS, 256),
        ("decoder-tiny", (*LAYERS, "objective.kind=prefix"), None),
        ("encoder-tiny", LAYERS, 40),  # 15 % of 32, rounded, in 8 rows
        ("encoder-decoder-tiny", LAYERS, 256),
        ("encoder-decoder-tiny", (*LAYERS, "objective.kind=span", "train.batch_tokens=64"), None),
        ("encoder-decoder-tiny", (*LAYERS, "objective.kind=denoise"), None),
        ("sentiment", LAYERS, 256),
        ("vit-tiny", ("model.num_layers=1", "train.batch_tokens=8"), 8),
        ("speech-tiny", ("model.decoder.num_layers=1", "train.batch_tokens=64"), 64),
        ("caption-tiny", ("model.encoder.num_layers=1", "train.batch_tokens=64"), 64),
    ],
)
def test_every_kind_of_training_is_measured_on_made_data(
    preset: str, overrides: tuple[str, ...], tokens: int | None
) -> None:
    _, speed = measured(preset, *overrides, steps=1)
    assert speed.made_data
    assert len(speed.seconds) == len(speed.flops) == 1
    assert tokens is None or speed.tokens == [tokens]
    assert speed.parts is not None
    assert set(speed.parts.shares) == set(PARTS)
    assert sum(speed.parts.shares.values()) == pytest.approx(1)
    parts = [part for part in PARTS if part != "norms" or preset != "sentiment"]
    assert all(speed.parts.shares[part] > 0 for part in parts), speed.parts.shares
    assert speed.ratio is not None
    assert speed.ratio > 0
    assert speed.peak_memory is None or speed.peak_memory > 1e7


@pytest.mark.parametrize("overrides", [(), ("train.micro_batch_tokens=64",)])
def test_flops_of_a_step_are_those_that_show_tells(overrides: tuple[str, ...]) -> None:
    config, speed = measured("decoder-tiny", *LAYERS, *overrides)
    told = summarise(config.model).flops_per_token_train
    assert speed.flops == [told * count for count in speed.tokens]


def test_further_tokens_are_counted_where_there_are_any() -> None:
    """`qkv show` counts them for every token; the last of each row has no second one ahead."""
    config, speed = measured("decoder-tiny", *LAYERS, "model.mtp.depth=1")
    model, told = config.model, summarise(config.model).flops_per_token_train
    assert model.vocab_size is not None
    rows = [count // model.max_seq_len for count in speed.tokens]
    spared = [3 * 2 * model.d_model * model.vocab_size * count for count in rows]
    assert speed.flops == [told * count - less for count, less in zip(speed.tokens, spared, strict=True)]


def test_parts_are_told_apart_in_the_backward_pass_too() -> None:
    _, wide = measured("decoder-tiny", *LAYERS, "model.feed_forward.d_ff=8192")
    assert wide.parts is not None
    shares = {**wide.parts.shares, "optimiser": 0.0, "clipping": 0.0}  # which have as many weights to go through
    assert max(shares, key=shares.__getitem__) == "feed-forward"


def test_blocks_that_are_computed_again_are_profiled() -> None:
    _, speed = measured("decoder-tiny", *LAYERS, "train.activation_checkpointing=true")
    assert speed.parts is not None
    assert speed.parts.shares["attention"] > 0


def test_its_own_data_are_taken_where_there_are_some(tmp_path: Any) -> None:
    (tmp_path / "text.txt").write_text("some words to learn from, " * 50, encoding="utf-8")
    _, speed = measured("decoder-tiny", *LAYERS, f"data.train=[{tmp_path / 'text.txt'}]", "train.steps=1")
    assert not speed.made_data
    assert len(speed.tokens) == 2


def test_ctrl_c_keeps_the_steps_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    take_step = Trainer.take_step

    def interrupted(trainer: Trainer) -> dict[str, Any]:
        if trainer.step == speed_module.WARM_UP + 3:
            raise KeyboardInterrupt
        return take_step(trainer)

    monkeypatch.setattr(Trainer, "take_step", interrupted)
    _, speed = measured("decoder-tiny", *LAYERS, steps=50)
    assert (speed.interrupted, len(speed.seconds)) == (True, 3)
    assert (speed.matrix_rate, speed.parts, speed.ratio) == (None, None, None)


def test_ctrl_c_before_the_first_measured_step_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(trainer: Trainer) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured("decoder-tiny", *LAYERS)


def test_a_vocabulary_without_room_for_a_letter_is_refused() -> None:
    with pytest.raises(ConfigError, match="a vocabulary of 3 has no room"):
        measured("shakespeare-char", "model.vocab_size=3")

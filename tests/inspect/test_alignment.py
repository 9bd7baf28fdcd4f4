"""Where a model looks while it writes: texts, images and sound, each as `Model` takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generate.tiny import byte_tokenizer, model
from media_files import media_config, write_images, write_sound
from torch import Tensor

from qkv import Model, Transformer
from qkv.config.errors import NotFoundError, UsageError
from qkv.config.model import ModelConfig
from qkv.data.audio import log_mel, read_audio
from qkv.data.images import read_image
from qkv.inspect.attention import alignment, read_attention


def media_model(kind: str, task: str = "translate", **changes: Any) -> Model:
    """A random model that reads grey images of 4 x 8, or 0.32 s of sound, and writes bytes or tells classes."""
    config = media_config(kind, task, "files.tsv")
    tree = config.model.with_vocab_size(260).model_dump() | {"init": {"kind": "normal", "std": 0.5}} | changes
    config = config.model_copy(update={"model": ModelConfig.model_validate(tree)})
    network = Transformer(config.model, generator=torch.Generator().manual_seed(0)).eval()
    return Model(network, byte_tokenizer(), config)


def expected(made: Model, text: str, source: Tensor) -> np.ndarray:
    """The mean over the heads of the last layer, while the text is predicted."""
    layers = read_attention(made.network, torch.tensor([[257, *text.encode()]]), source=source[None], kind="cross")
    return alignment(layers).numpy()


def test_each_token_of_a_text_looks_at_the_patches_of_an_image(tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    made, image = media_model("images"), read_image(tmp_path / "0.png", (4, 8), channels=1)
    for given in (tmp_path / "0.png", str(tmp_path / "0.png"), image):
        found = made.align(given, "ab")
        assert found.rows == ["a", "b", "<eos>"]
        assert found.columns == ["class", "patch 0, 0", "patch 0, 1"]
        assert found.grid == (1, 2)
        np.testing.assert_array_equal(found.source, image)
        np.testing.assert_allclose(found.weights, expected(made, "ab", image), atol=1e-6)
        np.testing.assert_allclose(found.weights.sum(1), 1, atol=1e-6)


def test_each_token_of_a_text_listens_to_moments_of_a_recording(tmp_path: Path) -> None:
    write_sound(tmp_path, 1)
    made, wave_N = media_model("audio"), read_audio(tmp_path / "0.wav")
    features = log_mel(wave_N, 8, seconds=0.32)
    for given in (tmp_path / "0.wav", wave_N):
        found = made.align(given, "ab")
        assert found.rows == ["a", "b", "<eos>"]
        assert found.columns == [f"{number / 50:.2f} s" for number in range(16)]
        assert found.grid is None
        np.testing.assert_array_equal(found.source, features)
        np.testing.assert_allclose(found.weights, expected(made, "ab", features), atol=1e-6)


def test_without_a_target_it_is_the_model_s_own_output(tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    write_sound(tmp_path, 1)
    captioner, listener = media_model("images"), media_model("audio")
    translator = model(family="encoder-decoder", position={"kind": "sinusoidal"})
    own: list[tuple[Model, Any, Any]] = [
        (captioner, tmp_path / "0.png", captioner.caption(tmp_path / "0.png")),
        (listener, tmp_path / "0.wav", listener.transcribe(tmp_path / "0.wav").segments[0]),
        (translator, "ab", translator.translate("ab")),
    ]
    for made, source, written in own:
        found, same = made.align(source), made.align(source, written)
        assert len(found.rows) == len(written.token_ids)
        assert found.rows == same.rows
        np.testing.assert_array_equal(found.weights, same.weights)
    assert translator.align("ab").source is None


def test_the_self_attention_of_an_encoder_of_images_is_named_by_what_it_reads() -> None:
    reads = {"kind": "patches", "image_size": [4, 8], "patch_size": 4, "channels": 1, "num_registers": 1}
    found = media_model("images", "classify", input=reads, max_seq_len=4, head={"kind": "none"}).attention(
        torch.zeros(1, 4, 8)
    )
    assert found.rows == found.columns == ["class", "register 0", "patch 0, 0", "patch 0, 1"]
    assert found.layers[0].shape == (2, 4, 4)
    made = media_model("images")
    assert made.attention(torch.zeros(1, 4, 8), stack="encoder").rows == ["class", "patch 0, 0", "patch 0, 1"]
    assert made.attention(torch.zeros(1, 4, 8), "ab").columns == ["<bos>", "a", "b"]


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lasts 1.0 s, and the model reads 0.3 s"):
        media_model("audio").align(torch.zeros(16_000))
    with pytest.raises(NotFoundError):
        media_model("images").align(tmp_path / "gone.png")
    with pytest.raises(UsageError, match="one text at a time"):
        model(family="encoder-decoder", position={"kind": "sinusoidal"}).align(["ab", "c"])
    with pytest.raises(UsageError, match="does not translate"):
        media_model("images", "classify", head={"kind": "none"}).align(torch.zeros(1, 4, 8))

"""Captions: what a model writes of images, each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import media_config, write_images

from qkv import Model, Transformer
from qkv.config.errors import UsageError
from qkv.data.images import read_image
from qkv.tokenizer import Tokenizer


def caption_model(**changes: Any) -> Model:
    """A random model that reads grey images of 4 x 8 and writes bytes."""
    tokenizer = Tokenizer.train([], kind="byte")
    config = media_config("images", "translate", "images.tsv", **changes)
    model = config.model.with_vocab_size(tokenizer.vocab_size)
    model = model.model_copy(update={"init": model.init.model_copy(update={"std": 0.3})})
    network = Transformer(model, generator=torch.Generator().manual_seed(0)).eval()
    return Model(network, tokenizer, config.model_copy(update={"model": model}))


def test_a_file_is_read_as_the_data_of_training_were(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    model = caption_model(data={"mean": 0.1, "std": 0.3})
    image = read_image(tmp_path / "1.png", (4, 8), channels=1, mean=0.1, std=0.3)
    assert model.caption(tmp_path / "1.png", max_new_tokens=6) == model.caption(image, max_new_tokens=6)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_caption_does_not_depend_on_the_other_images(beam_size: int) -> None:
    model, images = caption_model(), torch.randn(5, 1, 4, 8, generator=torch.Generator().manual_seed(1))
    together = model.caption(images, beam_size=beam_size, max_new_tokens=6, batch_size=3)
    alone = [model.caption(image, beam_size=beam_size, max_new_tokens=6) for image in images]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in alone}) > 1
    assert model.caption([]) == []


def test_greedy_captions_are_what_generate_writes_of_the_image() -> None:
    model, images = caption_model(), torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(1))
    expected = model.generate(images, temperature=0, max_new_tokens=5)
    found = model.caption(images, beam_size=1, max_new_tokens=5)
    assert [(one.text, one.token_ids) for one in found] == [(one.text, one.token_ids) for one in expected]


@pytest.mark.parametrize("image", [torch.zeros(1, 8, 8), torch.zeros(1, 4, 8, dtype=torch.int64), 3, [None]])
def test_what_is_no_image_is_refused(image: Any) -> None:
    with pytest.raises(UsageError, match=r"an image is a file or a float tensor \[1, 4, 8\]"):
        caption_model().caption(image)


def test_a_text_for_a_model_of_images_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match="reads images, not texts") as error:
        caption_model().translate("a text")
    assert "caption" in str(error.value)

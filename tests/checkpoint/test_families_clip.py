"""CLIP as published: two models from one folder, whose vectors and cosines are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import qkv
from qkv.checkpoint.families import named
from qkv.checkpoint.load import published_config
from qkv.checkpoint.published import Published
from qkv.config import NotFoundError, QkvError, UsageError

from .family_cases import VOCAB, Case, assert_close, make, random_ids, values, written
from .folders import write_folder

END = VOCAB - 1
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP: dict[str, Any] = {
    "text_config": {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 14, "eos_token_id": END},
    "vision_config": {**SIZES, "hidden_size": 24, "image_size": 12, "patch_size": 4, "hidden_act": "gelu"},
    "projection_dim": 20,
}


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    return make(Case("CLIPModel", CLIP))


@pytest.fixture(scope="module")
def folder(theirs: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("published") / "clip"
    theirs.save_pretrained(path)
    return path


def side(folder: Path, name: str) -> qkv.Model:
    return qkv.load(f"{folder}#{name}", device="cpu")


def texts() -> Tensor:
    """Two texts of 9 and 5 ids: what stands behind an end is not read."""
    ids = random_ids(2, 9).clamp(max=END - 1)
    ids[0, 8] = ids[1, 4:] = END
    return ids


def images() -> Tensor:
    return torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def test_texts_and_images_are_as_alike_as_in_transformers(theirs: PreTrainedModel, folder: Path) -> None:
    with torch.no_grad():
        cosines = theirs(input_ids=texts(), pixel_values=images()).logits_per_text / theirs.logit_scale.exp()
    ids = texts().tolist()
    of_texts = side(folder, "text").embed([ids[0], ids[1][:5]], normalise=True)
    of_images = side(folder, "image").embed(list(images()), normalise=True)
    assert_close(torch.from_numpy(of_texts @ of_images.T), cosines)


def test_the_network_itself_gives_the_vectors(theirs: PreTrainedModel, folder: Path) -> None:
    with torch.no_grad():
        found = theirs(input_ids=texts(), pixel_values=images())
        text = side(folder, "text").network(texts(), lengths=torch.tensor([9, 5]))
        image = side(folder, "image").network(images())
    assert_close(text / text.norm(dim=-1, keepdim=True), found.text_embeds)
    assert_close(image / image.norm(dim=-1, keepdim=True), found.image_embeds)


def test_a_pooling_that_is_asked_for_is_of_the_hidden_vectors(folder: Path) -> None:
    model = side(folder, "image")
    with torch.no_grad():
        hidden = model.network.encode(images())
    assert_close(torch.from_numpy(model.embed(list(images()), pooling="mean")), hidden.mean(1))
    assert model.embed(images()[0]).shape == (20,)


@pytest.mark.parametrize(("name", "given"), [("text", texts()), ("image", images())])
def test_transformers_opens_each_of_them_written_alone(name: str, given: Tensor, folder: Path, tmp_path: Path) -> None:
    model = side(folder, name)
    again = written(model, tmp_path / "written")
    lengths = {"lengths": torch.tensor([9, 5])} if name == "text" else {}
    with torch.no_grad():
        assert_close(values(again, **{again.main_input_name: given}), model.network(given, **lengths))


def test_it_is_saved_as_ours(folder: Path, tmp_path: Path) -> None:
    model = side(folder, "image")
    model.save(tmp_path / "ours")
    assert (qkv.load(tmp_path / "ours", device="cpu").embed(list(images())) == model.embed(list(images()))).all()


def test_older_files_say_their_sizes_in_another_section(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config_dict"], config["text_config"] = config["text_config"], {"hidden_size": 8}
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert side(tmp_path, "text").network.config == side(folder, "text").network.config


@pytest.mark.parametrize("behind", ["", "#audio"])
def test_which_of_the_two_is_meant_must_be_said(behind: str, folder: Path) -> None:
    with pytest.raises(UsageError, match="two models, of texts and of images") as error:
        qkv.load(f"{folder}{behind}")
    assert error.value.hint == f"{folder}#text or {folder}#image"


@pytest.mark.parametrize(("gone", "kept", "starts"), [("image", "text", "text_"), ("text", "image", "vis")])
def test_one_of_the_two_that_is_not_there_is_said_to_be_missing(
    gone: str, kept: str, starts: str, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    some = {name: tensor for name, tensor in tensors.items() if name.startswith(starts)}
    save_file(some, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotFoundError, match=f"the model of {gone}s is missing") as error:
        side(tmp_path, gone)
    assert (error.value.where, error.value.hint) == (str(tmp_path / "model.safetensors"), f"{tmp_path}#{kept}")
    with pytest.raises(UsageError, match="two models") as error:
        qkv.load(tmp_path)
    assert error.value.hint == f"{tmp_path}#{kept}"
    side(tmp_path, kept)


def test_a_folder_with_one_model_has_no_other(tmp_path: Path) -> None:
    write_folder(tmp_path / "one")
    with pytest.raises(UsageError, match="one model, and none is called `text`"):
        qkv.load(tmp_path / "one#text")


def test_a_class_that_is_not_supported_is_named(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["CLIPForImageClassification"]}))
    with pytest.raises(QkvError, match="CLIPForImageClassification"):
        published_config(Path(f"{tmp_path}#image"))


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("clip_text_model", {"hidden_act": "mish"}),
        ("clip_vision_model", {"image_size": [8, 12]}),
        ("clip_vision_model", {"patch_size": [4, 6]}),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(model_type: str, keys: dict[str, Any]) -> None:
    (key,) = keys
    with pytest.raises(QkvError, match=f"`{key}"):
        named(model_type).read(Published(keys, "config.json"), "embedding")

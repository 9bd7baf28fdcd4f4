"""What a configuration says of images and sound, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from qkv import Config

IMAGES = {"kind": "patches", "image_size": 8, "patch_size": 4, "num_registers": 2}
SOUND = {"kind": "log-mel", "num_mels": 8}


def tree(family: str, reads: dict[str, Any], **changes: Any) -> dict[str, Any]:
    own = {"encoder": {"input": reads}} if family == "encoder-decoder" else {"input": reads}
    head = {"head": {"kind": "classifier"}} if family == "encoder" else {}
    return {"model": {"family": family, **own, **head}, "data": {"train": "table.tsv"}} | changes


@pytest.mark.parametrize(("reads", "kind"), [(IMAGES, "images"), (SOUND, "audio")])
@pytest.mark.parametrize(("family", "objective"), [("encoder", "classify"), ("encoder-decoder", "translate")])
def test_the_kind_of_data_follows_from_what_the_model_reads(
    reads: dict[str, Any], kind: str, family: str, objective: str
) -> None:
    config = Config.model_validate(tree(family, reads))
    assert (config.objective.kind, config.data.kind) == (objective, kind)
    again = Config.model_validate(config.model_dump(mode="json"))
    assert again == config


def test_registers_are_vectors_of_the_sequence() -> None:
    config = Config.model_validate(tree("encoder", IMAGES))
    assert config.model.input.fixed_length == config.model.max_seq_len == 1 + 2 + 4


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (tree("encoder", IMAGES, data={"kind": "audio", "train": "a.tsv"}), "read as log-mel, not as patches"),
        (tree("encoder", IMAGES, data={"kind": "labelled", "train": "a.tsv"}), "read as tokens, not as patches"),
        (tree("encoder", {"kind": "tokens"}, data={"kind": "images", "train": "a.tsv"}), "read as patches, not as tok"),
        (tree("encoder-decoder", IMAGES, tokenizer={"source": {}, "target": {}}), "one kind of text"),
        (tree("encoder", IMAGES, data={"kind": "images", "train": {"source": "a", "target": "b"}}), "parallel data"),
        (tree("encoder", IMAGES, data={"kind": "images", "label_key": "image"}), "the same key"),
        (tree("encoder", IMAGES, data={"kind": "images", "shift": -1}), "greater than or equal to 0"),
        (
            tree("encoder", {**IMAGES, "image_size": (16, 8)}, data={"kind": "images", "shift": 9}),
            r"`data\.shift` and `model\.input\.image_size` .* 9 is more than the 8 pixels there are",
        ),
        (
            tree("encoder", SOUND, data={"kind": "audio", "mask_mels": 9}),
            r"`data\.mask_mels` and `model\.input\.num_mels` .* 9 is more than the 8 mels there are",
        ),
        (
            tree("encoder-decoder", SOUND, data={"kind": "audio", "mask_frames": 1 << 20}),
            r"`data\.mask_frames` and `model\.encoder\.max_seq_len` .* is more than the [\d,]+ frames there are",
        ),
    ],
)
def test_what_does_not_go_together_names_both_keys(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Config.model_validate(changed)


@pytest.mark.parametrize("preset", ["vit-tiny", "caption-tiny", "speech-tiny"])
def test_the_presets_are_of_one_kind_each(preset: str) -> None:
    config = Config.load(preset)
    kinds = {"vit-tiny": "images", "caption-tiny": "images", "speech-tiny": "audio"}
    assert config.data.kind == kinds[preset]


@pytest.mark.parametrize(
    ("reads", "data"),
    [
        (IMAGES, {"kind": "images", "shift": 8}),
        (SOUND, {"kind": "audio", "mask_mels": 8, "mask_frames": 2 * 16}),
    ],
)
def test_training_may_change_all_of_what_is_read(reads: dict[str, Any], data: dict[str, Any]) -> None:
    changed = tree("encoder", reads, data=data)
    if reads is SOUND:
        changed["model"]["max_seq_len"] = 16
    Config.model_validate(changed)

"""Whether two models compute the same, and where they part."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.family_cases import make
from checkpoint.test_families_decoder import CASES as DECODERS
from checkpoint.test_families_encoder import CASES as ENCODERS
from checkpoint.test_families_encoder_decoder import CASES as PAIRS
from generate.tiny import byte_tokenizer, network
from torch import Tensor

import qkv
from qkv.config.errors import QkvError, UsageError
from qkv.evaluate.parity import Layers, Ours, Transformers, compare
from qkv.evaluate.probes import Probe, probes, together
from qkv.nn import Transformer

FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"family": "encoder"},
    "encoder-decoder": {"family": "encoder-decoder"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_equal_to_itself(family: str) -> None:
    made = network(**FAMILIES[family])
    some = probes(made, byte_tokenizer())
    found = compare(made, Ours(made), some)
    assert found.ok
    assert found.first_layer is None
    assert (found.logits.absolute, found.logprobs.absolute) == (0.0, 0.0)
    assert (found.cached is None) == (family == "encoder")
    assert (found.sequences, found.tokens) == (4, sum(probe.ids.shape[1] for probe in some))
    stacks = family.split("-")
    assert [one.name for one in found.layers] == [
        f"{stack} {part}" for stack in stacks for part in ("embedding", "layer 0", "layer 1")
    ]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("decoder_embedding.input.weight", "decoder embedding"),
        ("decoder.blocks.0.feed_forward.function.down.weight", "decoder layer 0"),
        ("decoder.blocks.1.self_attention.function.query.weight", "decoder layer 1"),
        ("decoder.final_norm.weight", None),
    ],
)
def test_the_first_layer_that_differs_is_named(name: str, first: str | None) -> None:
    made = network(tie_embeddings="none")
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.get_parameter(name).mul_(1.01)
    found = compare(made, Ours(other), probes(made, byte_tokenizer()))
    assert not found.ok
    assert found.first_layer == first
    assert found.logits.absolute > found.tolerance
    names = [one.name for one in found.layers]
    before = found.layers if first is None else found.layers[: names.index(first)]
    assert all(one.absolute == 0 for one in before)


@pytest.mark.parametrize("block_size", [None, 2])
def test_a_layer_is_what_it_adds_to_attention_residuals(block_size: int | None) -> None:
    made = network(tie_embeddings="none", residual={"kind": "attention-residuals", "block_size": block_size})
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.get_parameter("decoder.blocks.1.feed_forward.function.down.weight").mul_(1.01)
    assert compare(made, Ours(other), probes(made, byte_tokenizer())).first_layer == "decoder layer 1"


class Twisted(Ours):
    """Right at once, and wrong in one way."""

    def __init__(self, made: Transformer, wrong: str) -> None:
        super().__init__(made)
        self.wrong = wrong

    def outputs(self, probe: Probe) -> tuple[Tensor, Layers]:
        found, layers = super().outputs(probe)
        return (found * math.nan if self.wrong == "nan" else found), layers

    def cached(self, probe: Probe) -> Tensor:
        return super().cached(probe) + (0.5 if self.wrong == "cache" else 0)


def test_a_cache_that_differs_and_what_is_no_number_are_differences() -> None:
    made = network()
    some = probes(made, byte_tokenizer())
    found = compare(made, Twisted(made, "cache"), some)
    assert (found.ok, found.logits.absolute, found.cached.absolute) == (False, 0.0, pytest.approx(0.5))
    assert compare(made, Twisted(made, "cache"), some, tolerance=0.6).ok
    found = compare(made, Twisted(made, "nan"), some)
    assert (found.ok, found.logits.absolute) == (False, math.inf)


def test_models_that_answer_differently_are_not_compared() -> None:
    made = network()
    with pytest.raises(UsageError, match="different shapes"):
        compare(made, Ours(network(vocab_size=261)), probes(made))
    for family in ("encoder", "encoder-decoder"):
        with pytest.raises(UsageError, match=f"different families, decoder and {family}"):
            compare(made, Ours(network(family=family)), probes(made))
    wider = compare(made, Ours(network(d_model=32, seed=3)), probes(made))
    assert (wider.layers, wider.ok) == ([], False)


def test_probes_are_the_same_ones_and_fit_the_model() -> None:
    made = network(family="encoder-decoder", max_seq_len=9)
    one, other = (probes(made, byte_tokenizer(), start_ids=[257, 3], avoid=[7]) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.source, b.source)
        assert max(a.ids.shape[1], a.source.shape[1]) <= 9
    assert sum(probe.ids[0, :2].tolist() == [257, 3] for probe in one) == 2
    assert not any((probe.ids == 7).any() or (probe.source == 7).any() for probe in one[2:])
    batch = together(one, made)
    assert batch["ids"].shape[0] == batch["source"].shape[0] == 4
    assert len(probes(made)) == 2


# --- transformers -----------------------------------------------------------------------------------------------------

CASES = {
    name: {**DECODERS, **ENCODERS, **PAIRS}[name]
    for name in ("gpt2", "bert", "roberta", "albert", "vit-classifier", "bart", "t5", "whisper")
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_model_equals_transformers_layer_by_layer(name: str, tmp_path: Path) -> None:
    make(CASES[name]).save_pretrained(tmp_path / "model")
    loaded = qkv.load(tmp_path / "model", device="cpu")
    reference = Transformers(tmp_path / "model")
    some = probes(loaded.network, start_ids=loaded.config.generation.start_ids, avoid=reference.pad_ids)
    found = compare(loaded.network, reference, some)
    assert found.ok, found
    assert found.first_layer is None
    stacks = loaded.network.config.stacks
    assert len(found.layers) == sum(stack.num_layers + 1 for stack in stacks.values())
    assert (found.cached is None) == (loaded.network.decoder is None)
    with torch.no_grad():
        for parameter in loaded.network.encoder_embedding.parameters() if len(stacks) == 2 else ():
            parameter.add_(0.1)
        for parameter in list(loaded.network.parameters())[-1:]:
            parameter.add_(0.1)
    assert not compare(loaded.network, reference, some).ok


def test_transformers_is_needed_and_its_errors_are_ours(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(QkvError, match="transformers cannot read the model") as caught:
        Transformers(tmp_path)
    assert "\n" not in caught.value.what
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        Transformers(tmp_path)
    assert caught.value.hint == "pip install transformers"

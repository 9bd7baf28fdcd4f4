"""Weights carried from an oracle into a qkv network, strictly: every tensor on either side has exactly one partner.

A translator is a function from the oracle's tensors by name to qkv's. It takes what it uses out of the mapping, so that
what is left over was forgotten. Translators only rename, transpose, split and reshape, which is linear: given the
oracle's gradients instead of its weights, they give the gradients that the qkv network must have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]
Translator = Callable[[Tensors], Tensors]

PROJECTIONS = ("query", "key", "value")


def randomise(oracle: nn.Module, std: float = 0.25) -> nn.Module:
    """Give every parameter a value that would be missed: biases off 0, norm weights off 1, padding rows filled. What is
    never trained stays: it is a table that qkv computes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.normal_(0.0, std, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.add_(1.0)
    return oracle


def copy_weights(oracle: nn.Module, network: nn.Module, translate: Translator) -> None:
    """Fill every parameter of `network`; a parameter without a partner, on either side, is an error."""
    weights = _translated({name: weight.detach() for name, weight in oracle.named_parameters()}, translate)
    own = dict(network.named_parameters())
    assert weights.keys() == own.keys(), weights.keys() ^ own.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])


def gradients(oracle: nn.Module, translate: Translator) -> Tensors:
    """The oracle's gradients under qkv's names (None counts as zero)."""
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in oracle.named_parameters()
    }
    return _translated(grads, translate)


def _translated(tensors: Tensors, translate: Translator) -> Tensors:
    result = translate(tensors)
    assert not tensors, f"parameters of the oracle that the translator ignores: {sorted(tensors)}"
    return result


def _move(tensors: Tensors, result: Tensors, theirs: str, ours: str, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        result[f"{ours}.{suffix}"] = tensors.pop(f"{theirs}.{suffix}")


def _layers(tensors: Tensors, prefix: str) -> range:
    """The indices of the layers whose tensors are called `prefix`.<index>.<...>."""
    start = len(prefix) + 1
    return range(1 + max(int(name[start:].partition(".")[0]) for name in tensors if name.startswith(f"{prefix}.")))


BOTH = ("weight", "bias")
WEIGHT = ("weight",)


def torch_transformer(norm: str) -> Translator:
    """torch.nn's encoder and decoder between embeddings. `norm`: qkv's norm_in for norm_first, else norm_stream."""

    def attention(tensors: Tensors, result: Tensors, theirs: str, ours: str) -> None:
        for suffix in BOTH:
            packed = tensors.pop(f"{theirs}.in_proj_{suffix}")
            for part, piece in zip(PROJECTIONS, packed.chunk(3), strict=True):
                result[f"{ours}.{part}.{suffix}"] = piece
        _move(tensors, result, f"{theirs}.out_proj", f"{ours}.output", BOTH)

    def translate(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for side, sublayers in (("encoder", ["self"]), ("decoder", ["self", "cross"])):
            if f"{side}_embedding" in tensors:  # absent: it is the other side's
                result[f"{side}_embedding.input.weight"] = tensors.pop(f"{side}_embedding")
            for index in _layers(tensors, f"{side}.layers"):
                theirs, ours = f"{side}.layers.{index}", f"{side}.blocks.{index}"
                for order, kind in enumerate(sublayers, 1):
                    name = {"self": "self_attn", "cross": "multihead_attn"}[kind]
                    attention(tensors, result, f"{theirs}.{name}", f"{ours}.{kind}_attention.function")
                    _move(tensors, result, f"{theirs}.norm{order}", f"{ours}.{kind}_attention.{norm}", BOTH)
                _move(tensors, result, f"{theirs}.linear1", f"{ours}.feed_forward.function.up", BOTH)
                _move(tensors, result, f"{theirs}.linear2", f"{ours}.feed_forward.function.down", BOTH)
                _move(tensors, result, f"{theirs}.norm{len(sublayers) + 1}", f"{ours}.feed_forward.{norm}", BOTH)
            if f"{side}.norm.weight" in tensors:
                _move(tensors, result, f"{side}.norm", f"{side}.final_norm", BOTH)
        if "head" in tensors:
            result["head.weight"] = tensors.pop("head")
        return result

    return translate


def gpt2(tensors: Tensors) -> Tensors:
    """GPT2LMHeadModel: Conv1D weights are [in, out], and q, k and v are one."""
    result: Tensors = {
        "decoder_embedding.input.weight": tensors.pop("transformer.wte.weight"),
        "decoder_embedding.position.weight": tensors.pop("transformer.wpe.weight"),
    }
    _move(tensors, result, "transformer.ln_f", "decoder.final_norm", BOTH)
    for index in _layers(tensors, "transformer.h"):
        theirs, ours = f"transformer.h.{index}", f"decoder.blocks.{index}"
        _move(tensors, result, f"{theirs}.ln_1", f"{ours}.self_attention.norm_in", BOTH)
        _move(tensors, result, f"{theirs}.ln_2", f"{ours}.feed_forward.norm_in", BOTH)
        for suffix in BOTH:
            packed = tensors.pop(f"{theirs}.attn.c_attn.{suffix}")
            for part, piece in zip(PROJECTIONS, packed.chunk(3, dim=-1), strict=True):
                result[f"{ours}.self_attention.function.{part}.{suffix}"] = piece.T if suffix == "weight" else piece
        for name, part in (
            ("attn.c_proj", "self_attention.function.output"),
            ("mlp.c_fc", "feed_forward.function.up"),
            ("mlp.c_proj", "feed_forward.function.down"),
        ):
            result[f"{ours}.{part}.weight"] = tensors.pop(f"{theirs}.{name}.weight").T
            result[f"{ours}.{part}.bias"] = tensors.pop(f"{theirs}.{name}.bias")
    return result


def llama(tensors: Tensors) -> Tensors:
    """LlamaForCausalLM, tied or not."""
    result: Tensors = {"decoder_embedding.input.weight": tensors.pop("model.embed_tokens.weight")}
    if "lm_head.weight" in tensors:
        result["head.weight"] = tensors.pop("lm_head.weight")
    _move(tensors, result, "model.norm", "decoder.final_norm", WEIGHT)
    for index in _layers(tensors, "model.layers"):
        theirs, ours = f"model.layers.{index}", f"decoder.blocks.{index}"
        _move(tensors, result, f"{theirs}.input_layernorm", f"{ours}.self_attention.norm_in", WEIGHT)
        _move(tensors, result, f"{theirs}.post_attention_layernorm", f"{ours}.feed_forward.norm_in", WEIGHT)
        for letter, part in zip("qkvo", (*PROJECTIONS, "output"), strict=True):
            name = f"{theirs}.self_attn.{letter}_proj"
            _move(
                tensors,
                result,
                name,
                f"{ours}.self_attention.function.{part}",
                BOTH if f"{name}.bias" in tensors else WEIGHT,
            )
        for part in ("gate", "up", "down"):
            _move(tensors, result, f"{theirs}.mlp.{part}_proj", f"{ours}.feed_forward.function.{part}", WEIGHT)
    return result


def bert(tensors: Tensors) -> Tensors:
    """BertModel, and BertForMaskedLM and BertForSequenceClassification with what stands on it."""
    prefix = "bert." if any(name.startswith("bert.") for name in tensors) else ""
    result: Tensors = {
        "encoder_embedding.input.weight": tensors.pop(f"{prefix}embeddings.word_embeddings.weight"),
        "encoder_embedding.position.weight": tensors.pop(f"{prefix}embeddings.position_embeddings.weight"),
        "encoder_embedding.segments.weight": tensors.pop(f"{prefix}embeddings.token_type_embeddings.weight"),
    }
    _move(tensors, result, f"{prefix}embeddings.LayerNorm", "encoder_embedding.norm", BOTH)
    for index in _layers(tensors, f"{prefix}encoder.layer"):
        theirs, ours = f"{prefix}encoder.layer.{index}", f"encoder.blocks.{index}"
        for part in PROJECTIONS:
            _move(tensors, result, f"{theirs}.attention.self.{part}", f"{ours}.self_attention.function.{part}", BOTH)
        for name, part in (
            ("attention.output.dense", "self_attention.function.output"),
            ("attention.output.LayerNorm", "self_attention.norm_stream"),
            ("intermediate.dense", "feed_forward.function.up"),
            ("output.dense", "feed_forward.function.down"),
            ("output.LayerNorm", "feed_forward.norm_stream"),
        ):
            _move(tensors, result, f"{theirs}.{name}", f"{ours}.{part}", BOTH)
    if f"{prefix}pooler.dense.weight" in tensors:
        _move(tensors, result, f"{prefix}pooler.dense", "head.pooler.dense", BOTH)
    if "classifier.weight" in tensors:
        _move(tensors, result, "classifier", "head.output", BOTH)
    if "cls.predictions.bias" in tensors:
        _move(tensors, result, "cls.predictions.transform.dense", "head.dense", BOTH)
        _move(tensors, result, "cls.predictions.transform.LayerNorm", "head.norm", BOTH)
        result["head.bias"] = tensors.pop("cls.predictions.bias")
    return result


def classic(tensors: Tensors) -> Tensors:
    """The tutorial GPT of the parity test."""
    result: Tensors = {
        "decoder_embedding.input.weight": tensors.pop("token.weight"),
        "decoder_embedding.position.weight": tensors.pop("position.weight"),
    }
    _move(tensors, result, "norm", "decoder.final_norm", WEIGHT)
    for index in _layers(tensors, "layers"):
        theirs, ours = f"layers.{index}", f"decoder.blocks.{index}"
        _move(tensors, result, f"{theirs}.norm1", f"{ours}.self_attention.norm_in", WEIGHT)
        _move(tensors, result, f"{theirs}.norm2", f"{ours}.feed_forward.norm_in", WEIGHT)
        for letter, part in zip("qkvo", (*PROJECTIONS, "output"), strict=True):
            _move(tensors, result, f"{theirs}.{letter}", f"{ours}.self_attention.function.{part}", BOTH)
        for part in ("gate", "up", "down"):
            _move(tensors, result, f"{theirs}.{part}", f"{ours}.feed_forward.function.{part}", WEIGHT)
    return result

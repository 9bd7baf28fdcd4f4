"""Cross-entropy over a vocabulary, a chunk of tokens at a time: the logits of all tokens are never in memory at once.

A chunk's logits become its loss and, straight away, the gradients of what they were made of. Backward multiplies these
by the gradient that comes in, and computes no logits again (Hsu et al. 2024, arXiv 2410.10989).

Shapes: N tokens, C of a chunk, R of the few whose logits are in float32 at a time; M width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn.arguments import IGNORE
from qkv.nn.kernels.math import capped

LOGITS_AT_ONCE = 1 << 21
"""In float32: what is made of them stays in the processor's cache, and in memory that is used again."""
LEAST_CHUNK = 1024
"""Tokens: with fewer, adding up the chunks' gradients of a large vocabulary would take long."""


def cross_entropy(
    h_NM: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy of the logits h E^T (+ b) with their labels, in nats, summed over labels that are not IGNORE.

    softcap: bounds the logits. label_smoothing: share of a target's probability that is spread over the vocabulary.
    Products are computed in autocast's precision, everything else in float32 at least, in which the loss comes too. Of
    tokens without a label nothing is computed.
    """
    device = h_NM.device.type
    if torch.is_autocast_enabled(device):
        h_NM = h_NM.to(torch.get_autocast_dtype(device))
    learns = torch.is_grad_enabled() and (h_NM.requires_grad or weight_VM.requires_grad)
    loss: Tensor = _cross_entropy(h_NM, weight_VM, bias_V, labels_N, softcap, label_smoothing, learns)[0]
    return loss


def tokens_of_a_chunk(vocabulary: int) -> int:
    """How many tokens' logits come from one product of matrices."""
    return max(LEAST_CHUNK, LOGITS_AT_ONCE // vocabulary)


@torch.library.custom_op("qkv::cross_entropy", mutates_args=())
def _cross_entropy(
    h_NM: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    softcap: float | None,
    label_smoothing: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients by h, weight and bias, which are empty unless the model `learns`.

    An operator of its own: to torch.compile, each number of chunks would be another graph.
    """
    wide = torch.promote_types(h_NM.dtype, torch.float32)
    matrix_VM, offset_V = weight_VM.to(h_NM.dtype), None if bias_V is None else bias_V.to(h_NM.dtype)
    loss = h_NM.new_zeros((), dtype=wide)
    d_h, d_weight, d_bias = _gradients(h_NM, weight_VM, bias_V, learns)
    few = max(1, LOGITS_AT_ONCE // len(weight_VM))
    for index_C in torch.split((labels_N != IGNORE).nonzero().squeeze(1), tokens_of_a_chunk(len(weight_VM))):
        h_CM = h_NM[index_C]
        logits_CV = F.linear(h_CM, matrix_VM, offset_V)
        parts = zip(torch.split(logits_CV, few), torch.split(labels_N[index_C, None], few), strict=True)
        for logits_RV, labels_R1 in parts:
            part, d_RV = _loss_and_slope(logits_RV.to(wide), labels_R1, softcap, label_smoothing)
            loss += part
            logits_RV.copy_(d_RV)
        if learns:
            d_CV = logits_CV  # whose place it has taken
            d_h[index_C] = d_CV @ matrix_VM
            d_weight += d_CV.t() @ h_CM
            if bias_V is not None:
                d_bias += d_CV.sum(0, dtype=wide)
    return loss, d_h, d_weight.to(weight_VM.dtype), d_bias.to(weight_VM.dtype)


def _loss_and_slope(
    logits_RV: Tensor, labels_R1: Tensor, softcap: float | None, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """The summed loss and its gradient by the logits, [R, V]: softmax(logits) less the target's probabilities."""
    bounded_RV = logits_RV if softcap is None else capped(logits_RV, softcap)
    logs_RV = bounded_RV.log_softmax(-1)
    loss = (label_smoothing - 1) * logs_RV.gather(1, labels_R1).sum()
    if label_smoothing:
        loss -= label_smoothing * logs_RV.mean(-1).sum()
    d_RV = logs_RV.exp_().scatter_(1, labels_R1, label_smoothing - 1, reduce="add")
    if label_smoothing:
        d_RV -= label_smoothing / logs_RV.shape[1]
    if softcap is not None:
        d_RV *= 1 - (bounded_RV / softcap).square()
    return loss, d_RV


def _gradients(h_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, learns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Where gradients are added up: those of parameters in float32 at least."""
    wide = torch.promote_types(weight_VM.dtype, torch.float32)
    return (
        torch.zeros_like(h_NM) if learns else h_NM.new_empty(0),
        weight_VM.new_zeros(weight_VM.shape if learns else 0, dtype=wide),
        weight_VM.new_zeros(len(weight_VM) if learns and bias_V is not None else 0, dtype=wide),
    )


@_cross_entropy.register_fake
def _shapes(
    h_NM: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    softcap: float | None,
    label_smoothing: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_h, d_weight, d_bias = _gradients(h_NM, weight_VM, bias_V, learns)
    loss = h_NM.new_empty((), dtype=torch.promote_types(h_NM.dtype, torch.float32))
    return loss, d_h, d_weight.to(weight_VM.dtype), d_bias.to(weight_VM.dtype)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.has_bias = inputs[2] is not None


def _backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    d_h, d_weight, d_bias = (d_loss * gradient for gradient in ctx.saved_tensors)
    return d_h, d_weight, d_bias if ctx.has_bias else None, None, None, None, None


_cross_entropy.register_autograd(_backward, setup_context=_keep_gradients)

"""Cross-entropy over a vocabulary, a chunk of tokens at a time: the logits of all tokens are never in memory at once.

A chunk's logits become its loss and, straight away, the gradients of what they were made of. Backward multiplies these
by the gradient that comes in, and computes no logits again (Hsu et al. 2024, arXiv 2410.10989).

Shapes: N tokens, C tokens of a chunk, M width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn.arguments import IGNORE
from qkv.nn.kernels.math import capped

LOGITS_AT_ONCE = 1 << 21
LEAST_CHUNK = 256
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
    chunk = max(LEAST_CHUNK, LOGITS_AT_ONCE // len(weight_VM))
    for index_C in torch.split((labels_N != IGNORE).nonzero().squeeze(1), chunk):
        h_CM, labels_C1 = h_NM[index_C], labels_N[index_C, None]
        logits_CV = F.linear(h_CM, matrix_VM, offset_V).to(wide)
        if softcap is not None:
            logits_CV = capped(logits_CV, softcap)
        logs_CV = logits_CV.log_softmax(-1)
        loss -= (1 - label_smoothing) * logs_CV.gather(1, labels_C1).sum()
        if label_smoothing:
            loss -= label_smoothing * logs_CV.mean(-1).sum()
        if not learns:
            continue
        d_CV = logs_CV.exp_().scatter_(1, labels_C1, label_smoothing - 1, reduce="add")
        if label_smoothing:
            d_CV -= label_smoothing / len(weight_VM)
        if softcap is not None:
            d_CV *= 1 - (logits_CV / softcap).square()
        if bias_V is not None:
            d_bias += d_CV.sum(0)
        d_CV = d_CV.to(h_NM.dtype)
        d_h[index_C] = d_CV @ matrix_VM
        d_weight += d_CV.t() @ h_CM
    return loss, d_h, d_weight.to(weight_VM.dtype), d_bias.to(weight_VM.dtype)


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

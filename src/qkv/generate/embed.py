"""A text as one vector.

Shapes: N texts of a batch, S tokens, M model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from qkv.config.errors import UsageError
from qkv.config.parts import TokenInputConfig
from qkv.data.rows import cut
from qkv.generate.decode import device_of, evaluating, pad
from qkv.generate.sampling import refuse_non_finite
from qkv.nn.head import last_real
from qkv.nn.transformer import Transformer

PoolingKind = Literal["mean", "cls", "max", "last"]


@torch.inference_mode()
def embed(
    network: Transformer,
    texts: Sequence[Sequence[int]],
    pooling: PoolingKind,
    *,
    normalise: bool = False,
    end_id: int | None = None,
    max_seq_len: int | None = None,
    batch_size: int = 32,
) -> NDArray[np.float32]:
    """A vector for each text, given as ids: [N, M], in their order.

    It is made of the encoder's hidden vectors, whatever head there is: their mean or their largest values over the
    text's tokens, or the vector of its first ("cls") or last token; `normalise` divides it by its length. Of a decoder
    the last token alone has read the whole text. A text longer than `max_seq_len` tokens (None: than the context) is
    cut, and still ends with `end_id`. Texts of like length share a batch; none depends on the others.

    Raises what `check_embeds` raises, and QkvError for vectors that are not finite.
    """
    check_embeds(network, pooling)
    stack = network.encoder if network.encoder is not None else network.decoder
    assert stack is not None
    limit = min(max_seq_len or stack.config.max_seq_len, stack.config.max_seq_len)
    rows = [cut(ids, limit, end_id) for ids in texts]
    vectors = np.empty((len(rows), stack.config.d_model), np.float32)
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    with evaluating(network.modules()):
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            ids_NS, lengths_N = pad([rows[number] for number in numbers], device_of(network))
            if network.encoder is not None:
                h_NSM = network.encode(ids_NS, lengths_N).float()
                h_NM = pool(h_NSM, None if stack.config.num_queries else lengths_N, pooling)
            else:
                h_NM = _last_hidden(network, ids_NS, lengths_N).float()
            refuse_non_finite(h_NM, numbers, 1)
            vectors[numbers] = (F.normalize(h_NM, dim=-1) if normalise else h_NM).cpu().numpy()
    return vectors


def check_embeds(network: Transformer, pooling: str) -> None:
    """Raises UsageError where such a network has no such vectors."""
    if pooling not in get_args(PoolingKind):
        raise UsageError(f"there is no pooling {pooling!r}", hint=", ".join(get_args(PoolingKind)))
    stack = network.encoder if network.encoder is not None else network.decoder
    assert stack is not None
    if not isinstance(stack.config.input, TokenInputConfig):
        raise UsageError(f"the model reads {stack.config.input.reads}, not texts: it has no vectors for them")
    if network.encoder is None and pooling != "last":
        raise UsageError(
            "a decoder reads from left to right: the last token alone has read the whole text",
            hint="pooling last, or an encoder",
        )


def pool(h_NSM: Tensor, lengths_N: Tensor | None, kind: PoolingKind) -> Tensor:
    """One vector per row, [N, M]; padding does not count. lengths [N]: real tokens (None: all are)."""
    if kind == "cls":
        return h_NSM[:, 0]
    if kind == "last":
        return last_real(h_NSM, lengths_N)[:, 0]
    if lengths_N is None:
        return h_NSM.mean(1) if kind == "mean" else h_NSM.amax(1)
    padding_NS1 = (torch.arange(h_NSM.shape[1], device=h_NSM.device) >= lengths_N[:, None])[..., None]
    if kind == "max":
        return h_NSM.masked_fill(padding_NS1, -math.inf).amax(1)
    return h_NSM.masked_fill(padding_NS1, 0.0).sum(1) / lengths_N[:, None]


def _last_hidden(network: Transformer, ids_NS: Tensor, lengths_N: Tensor | None) -> Tensor:
    """What the head of a decoder reads of each row's last token, [N, M]."""
    seen: list[Tensor] = []
    with network.head.register_forward_pre_hook(lambda head, given: seen.append(given[0])):
        network(ids_NS, lengths=lengths_N, logits="last")
    (h_NTM,) = seen
    return h_NTM[:, 0] if network.head.per_token else last_real(h_NTM, lengths_N)[:, 0]

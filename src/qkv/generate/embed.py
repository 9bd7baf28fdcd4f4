"""A text or an image as one vector.

Shapes: N texts or images of a batch, S tokens or vectors, C channels, H and W height and width, M model width (of an
embedding head: its own).
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
from qkv.config.parts import EmbeddingHeadConfig, PatchInputConfig, TokenInputConfig
from qkv.config.stack import StackConfig
from qkv.generate.decode import evaluating
from qkv.generate.inputs import Input, batches
from qkv.generate.sampling import refuse_non_finite
from qkv.nn.head import last_real
from qkv.nn.transformer import Transformer

PoolingKind = Literal["mean", "cls", "max", "last"]


@torch.inference_mode()
def embed(
    network: Transformer,
    inputs: Sequence[Input],
    pooling: PoolingKind | None,
    *,
    normalise: bool = False,
    end_id: int | None = None,
    max_seq_len: int | None = None,
    batch_size: int = 32,
) -> NDArray[np.float32]:
    """A vector for each text, given as ids, or image [C, H, W]: [N, M], in their order.

    It is made of the encoder's hidden vectors, whatever head there is: their mean or their largest values over the
    text's tokens, or the vector of its first ("cls", of a ViT the class token's) or last token; None: what an embedding
    head makes of them. `normalise` divides it by its length. Of a decoder the last token alone has read the whole text.
    A text longer than `max_seq_len` tokens (None: than the context) is cut, and still ends with `end_id`. Inputs of
    like length share a batch; none depends on the others.

    Raises what `check_embeds` raises, and QkvError for vectors that are not finite.
    """
    check_embeds(network, pooling)
    head, reader, like = network.config.head, _reader(network), next(network.parameters())
    width = head.width if pooling is None and isinstance(head, EmbeddingHeadConfig) else reader.d_model
    longest = min(max_seq_len or reader.max_seq_len, reader.max_seq_len)
    vectors = np.empty((len(inputs), width), np.float32)
    with evaluating(network.modules()):
        for numbers, read, lengths_N in batches(inputs, like, batch_size, longest=longest, end_id=end_id):
            if pooling is None:
                h_NM = network(read, lengths=lengths_N).float()
            elif network.encoder is not None:
                h_NSM = network.encode(read, lengths_N).float()
                h_NM = pool(h_NSM, None if reader.num_queries else lengths_N, pooling)
            else:
                h_NM = _last_hidden(network, read, lengths_N).float()
            refuse_non_finite(h_NM, numbers, 1)
            vectors[numbers] = (F.normalize(h_NM, dim=-1) if normalise else h_NM).cpu().numpy()
    return vectors


def _reader(network: Transformer) -> StackConfig:
    """The stack that reads what becomes a vector."""
    return next(iter(network.config.stacks.values()))


def check_embeds(network: Transformer, pooling: str | None) -> None:
    """Raises UsageError where such a network has no such vectors; `pooling` None: those of an embedding head."""
    if pooling is None and isinstance(network.config.head, EmbeddingHeadConfig):
        return
    if pooling not in get_args(PoolingKind):
        raise UsageError(f"there is no pooling {pooling!r}", hint=", ".join(get_args(PoolingKind)))
    reads = _reader(network).input
    if not isinstance(reads, TokenInputConfig | PatchInputConfig):
        raise UsageError(f"the model reads {reads.reads}, not texts or images: it has no vectors for them")
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

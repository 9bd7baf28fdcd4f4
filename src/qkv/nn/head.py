"""From hidden vectors to what the model says.

Shapes: B batch, T tokens, M model width, V vocabulary, C classes, W width of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.parts import (
    ClassifierHeadConfig,
    EmbeddingHeadConfig,
    LanguageModelHeadConfig,
    MaskedLanguageModelHeadConfig,
    NoHeadConfig,
)
from qkv.nn.arguments import IGNORE
from qkv.nn.build import Dims, apply, build, dropout_of
from qkv.nn.feed_forward import ACTIVATIONS
from qkv.nn.kernels.math import capped
from qkv.nn.loss import cross_entropy


class Head(nn.Module):
    """Base of the heads. `weight` is the vocabulary matrix [V, M] where there is one, shared when tied."""

    per_token = True
    """One answer per token; otherwise one per sequence."""

    def forward(self, h_BTM: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Hidden vectors to logits."""
        raise TypeError(f"{type(self).__name__} computes nothing")

    def loss(
        self, h_BTM: Tensor, labels: Tensor, lengths_B: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Tensor:
        """The cross-entropy of the logits with their labels, summed in float32 at least: bfloat16 would round a loss of
        36 to steps of 0.25."""
        logits: Tensor = self(h_BTM, lengths_B).flatten(0, -2)
        return F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            labels.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=label_smoothing,
        )


class VocabularyHead(Head):
    """logits = x E^T (+ b), [B, T, V], of what `vectors` makes of h; bounded by `softcap`."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    softcap: float | None = None

    def vectors(self, h_BTM: Tensor) -> Tensor:
        """What the vocabulary matrix is multiplied with, [B, T, width of the embedding]."""
        raise TypeError(f"{type(self).__name__} has no vectors")

    def forward(self, h_BTM: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        logits = F.linear(self.vectors(h_BTM), self.weight, self.bias)
        return logits if self.softcap is None else capped(logits, self.softcap)

    def loss(
        self, h_BTM: Tensor, labels: Tensor, lengths_B: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Tensor:
        """The same, without logits of all tokens in memory."""
        x_NM = self.vectors(h_BTM).flatten(0, -2)
        return cross_entropy(
            x_NM,
            self.weight,
            self.bias,
            labels.flatten(),
            softcap=self.softcap,
            label_smoothing=label_smoothing,
        )


class LanguageModelHead(VocabularyHead):
    """logits = h E^T (+ b); h times `scale` (M^-1/2 in T5's tied head)."""

    def __init__(self, config: LanguageModelHeadConfig, dims: Dims) -> None:
        super().__init__()
        assert dims.d_out is not None
        self.scale = dims.d_model**-0.5 if config.scale == "rsqrt-d-model" else config.scale
        self.softcap = config.softcap
        self.weight = nn.Parameter(torch.empty(dims.d_out, dims.d_model))
        self.bias = nn.Parameter(torch.zeros(dims.d_out)) if config.bias else None

    def vectors(self, h_BTM: Tensor) -> Tensor:
        return h_BTM if self.scale == 1.0 else h_BTM * self.scale

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"


class MaskedLanguageModelHead(VocabularyHead):
    """BERT's (Devlin et al. 2018, arXiv 1810.04805): logits = N(act(W h + c)) E^T + b. W leads to the width
    of the embedding where that is factorised."""

    def __init__(self, config: MaskedLanguageModelHeadConfig, dims: Dims) -> None:
        super().__init__()
        assert dims.d_out is not None
        self.activation = config.activation
        width = dims.d_embedding or dims.d_model
        self.dense = nn.Linear(dims.d_model, width)
        self.norm: nn.Module = build(dims.norm, dims.with_(d_model=width))
        self.weight = nn.Parameter(torch.empty(dims.d_out, width))
        self.bias = nn.Parameter(torch.zeros(dims.d_out))

    def vectors(self, h_BTM: Tensor) -> Tensor:
        x: Tensor = self.norm(ACTIVATIONS[self.activation](self.dense(h_BTM)))
        return x


class Pooler(nn.Module):
    """BERT's sentence vector: tanh(W h + b) of one hidden vector, [B, M] -> [B, M]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, h_BM: Tensor) -> Tensor:
        return torch.tanh(self.dense(h_BM))


class PoolingHead(Head):
    """Base of the heads that read one vector per sequence: its first, its last, or the mean of all."""

    per_token = False

    def __init__(self, config: ClassifierHeadConfig | EmbeddingHeadConfig) -> None:
        super().__init__()
        self.pooling = config.pooling

    def pool(self, h_BTM: Tensor, lengths_B: Tensor | None) -> Tensor:
        """One vector per sequence, [B, M]; padding does not count."""
        if self.pooling == "first":
            return h_BTM[:, 0]
        if lengths_B is None:
            return h_BTM[:, -1] if self.pooling == "last" else h_BTM.mean(1)
        if self.pooling == "last":
            return last_real(h_BTM, lengths_B).squeeze(1)
        real_BT = torch.arange(h_BTM.shape[1], device=h_BTM.device) < lengths_B[:, None]
        return h_BTM.masked_fill(~real_BT[..., None], 0.0).sum(1) / lengths_B.clamp(min=1)[:, None]


class ClassifierHead(PoolingHead):
    """One vector per sequence to class scores [B, C]."""

    def __init__(self, config: ClassifierHeadConfig, dims: Dims) -> None:
        super().__init__(config)
        self.pooler: nn.Module = Pooler(dims.d_model) if config.pooler else nn.Identity()
        self.dropout = dropout_of(config.dropout)
        assert config.num_classes is not None
        self.output = nn.Linear(dims.d_model, config.num_classes)

    def forward(self, h_BTM: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        return self.output(apply(self.dropout, self.pooler(self.pool(h_BTM, lengths_B))))  # type: ignore[no-any-return]


class EmbeddingHead(PoolingHead):
    """One vector per sequence through a matrix, [B, W]: CLIP's (Radford et al. 2021, arXiv 2103.00020)."""

    def __init__(self, config: EmbeddingHeadConfig, dims: Dims) -> None:
        super().__init__(config)
        self.output = nn.Linear(dims.d_model, config.width, bias=False)

    def forward(self, h_BTM: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        return self.output(self.pool(h_BTM, lengths_B))  # type: ignore[no-any-return]


class NoHead(Head):
    """The hidden vectors themselves; `pooler`, where there is one, is for callers who want sentence vectors."""

    def __init__(self, config: NoHeadConfig, dims: Dims) -> None:
        super().__init__()
        self.pooler = Pooler(dims.d_model) if config.pooler else None

    def forward(self, h_BTM: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        return h_BTM


def last_real(x_BTM: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Each row's last real token, [B, 1, M]."""
    if lengths_B is None:
        return x_BTM[:, -1:]
    index_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
    return x_BTM.gather(1, index_B11.expand(-1, 1, x_BTM.shape[2]))


build.register(LanguageModelHeadConfig, LanguageModelHead)
build.register(MaskedLanguageModelHeadConfig, MaskedLanguageModelHead)
build.register(ClassifierHeadConfig, ClassifierHead)
build.register(EmbeddingHeadConfig, EmbeddingHead)
build.register(NoHeadConfig, NoHead)

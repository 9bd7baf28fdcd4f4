"""Attention with two ports: queries come from X, keys and values from Y.

Self-attention is X = Y; masked self-attention adds a causal rule; cross-attention is X != Y, where Y may have another
length and another width. `num_kv_heads` makes it multi-head, grouped-query or multi-query.

Shapes: B batch, T queries, S keys, M model width, N width of Y, H query heads, G key/value heads, D head width,
W = H D, E = D (or 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from qkv.config.attention import StandardAttentionConfig
from qkv.config.parts import NoNormConfig, RMSNormConfig
from qkv.nn.build import Dims, apply, build
from qkv.nn.cache import CrossCache, LayerCache
from qkv.nn.kernels import SdpaKernel
from qkv.nn.linear import side_by_side
from qkv.nn.mask import Mask, Rule
from qkv.nn.position import NO_PHASES, Phases
from qkv.nn.score import AdditiveWeight, Scoring, Sinks, UnitLength
from qkv.nn.value_residual import FirstValues, GiveValues, LearnedMixValues, MixValues


class Attention(nn.Module):
    """softmax(q k^T / sqrt(D)) v in H heads ("Attention Is All You Need", 3.2); G < H is grouped-query attention
    (Ainslie et al. 2023, arXiv 2305.13245), G = 1 multi-query (Shazeer 2019, arXiv 1911.02150). `scale` stands for
    1 / sqrt(D) where it is given (T5: 1), and `softcap` bounds the scores (Gemma 2). `score` may be another than
    q k / sqrt(D): q k ("dot"), their cosine, or w tanh(q + k) ("additive"). With `sinks`, each head may attend to
    nothing (gpt-oss).

    With `qk_norm`, queries and keys are normalised before positions turn them (Henry et al. 2020; Dehghani et al.
    2023): per head over D with one weight for all heads, or over the full projection. With `gate`, what the heads have
    found is multiplied by sigmoid(x W_g), a number for each channel or for each head (Qiu et al. 2025, arXiv
    2505.06708; Qwen3-Next).
    """

    def __init__(self, config: StandardAttentionConfig, dims: Dims) -> None:
        super().__init__()
        config = config.complete(dims.d_model)
        assert config.head_dim is not None
        assert config.num_kv_heads is not None
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = 1.0
        if config.score == "scaled-dot":
            self.scale = self.head_dim**-0.5 if config.scale is None else config.scale
        self.softcap = config.softcap
        self.dropout = config.dropout
        d_source = dims.d_source or dims.d_model
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.query = nn.Linear(dims.d_model, width, bias=bool(config.bias))
        self.key = nn.Linear(d_source, kv_width, bias=config.bias in (True, "qkv"))
        self.value = nn.Linear(d_source, kv_width, bias=bool(config.bias))
        self.gate: nn.Module | None = None
        if config.gate != "none":
            gates = width if config.gate == "elementwise" else self.num_heads
            self.gate = nn.Linear(dims.d_model, gates, bias=bool(config.bias))
        self.output = nn.Linear(width, dims.d_model, bias=config.bias in (True, "qvo"))
        norm = RMSNormConfig() if isinstance(dims.norm, NoNormConfig) else dims.norm
        self.norm_per_head = config.qk_norm == "per-head"
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_norm != "none":
            self.query_norm = build(norm, dims.with_(d_model=self.head_dim if self.norm_per_head else width))
            self.key_norm = build(norm, dims.with_(d_model=self.head_dim if self.norm_per_head else kv_width))
        self.query_unit: nn.Module | None = None
        self.key_unit: nn.Module | None = None
        if config.score == "cosine":
            self.query_unit, self.key_unit = UnitLength(self.head_dim, self.num_heads), UnitLength(self.head_dim)
        self.additive = AdditiveWeight(self.head_dim, self.num_heads) if config.score == "additive" else None
        self.sinks = Sinks(self.num_heads) if config.sinks else None
        self.value_residual: nn.Module | None = None
        if config.value_residual != "none":
            mix = MixValues if config.value_residual == "fixed" else LearnedMixValues
            self.value_residual = GiveValues() if dims.layer == 0 else mix()
        self.kernel: nn.Module = SdpaKernel()

    def forward(
        self,
        x_BTM: Tensor,
        y_BSN: Tensor | None = None,
        *,
        mask: Mask | Rule | None = None,
        phases: Phases = NO_PHASES,
        cache: LayerCache | CrossCache | None = None,
        end: int = 0,
        first_values: FirstValues | None = None,
    ) -> Tensor:
        """[B, T, M] -> [B, T, M]. `y_BSN` None: keys and values come from x too.

        mask: who may attend to whom; a bare rule speaks of slots 0 .. T-1 and 0 .. S-1. phases: what the tokens'
        positions do to queries, keys and scores (`Position.phases`). cache: a LayerCache takes up the new keys and
        values (`end`: one past the last slot written); a CrossCache is filled by the first call and then replaces y.
        first_values: what the first layer's values are left in and later layers' are mixed with.
        """
        if isinstance(cache, CrossCache):
            q_BTW = self.query(x_BTM)
            if cache.k_BGSD is None or cache.v_BGSD is None:
                assert y_BSN is not None
                cache.k_BGSD, cache.v_BGSD = self._keys_values(side_by_side(y_BSN, self.key, self.value), NO_PHASES)
            k_BGSD, v_BGSD = cache.k_BGSD, cache.v_BGSD
        elif y_BSN is None:
            q_BTW, *both = side_by_side(x_BTM, self.query, self.key, self.value)
            k_BGSD, v_BGSD = self._keys_values(both, phases)
        else:
            q_BTW = self.query(x_BTM)
            k_BGSD, v_BGSD = self._keys_values(side_by_side(y_BSN, self.key, self.value), phases)
        q_BHTD = phases.rotate(apply(self.query_unit, self._heads(q_BTW, self.query_norm, self.num_heads)))
        if self.value_residual is not None:
            v_BGSD = self.value_residual(v_BGSD, first_values or FirstValues())
        if not isinstance(mask, Mask):
            mask = call_mask(mask, x_BTM, k_BGSD.shape[2])
        if isinstance(cache, LayerCache):
            k_BGSD, v_BGSD = cache.append(k_BGSD, v_BGSD, mask.q_slots, end)
        scoring = Scoring(
            self.scale,
            self.softcap,
            phases.bias,
            additive_HD=None if self.additive is None else self.additive(),
            sinks_H=None if self.sinks is None else self.sinks(),
        )
        out_BTW = self.attend(q_BHTD, k_BGSD, v_BGSD, mask, scoring).transpose(1, 2).flatten(2)
        if self.gate is not None:
            gate_BTHE = self.gate(x_BTM).view(*x_BTM.shape[:2], self.num_heads, -1)
            out_BTW = (self._split(out_BTW, self.num_heads) * gate_BTHE.sigmoid()).flatten(2)
        out: Tensor = self.output(out_BTW)
        return out

    def attend(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
        """What the heads find, [B, H, T, D]."""
        out: Tensor = self.kernel(q_BHTD, k_BGSD, v_BGSD, mask, scoring, self.dropout if self.training else 0.0)
        return out

    def _keys_values(self, projected: Sequence[Tensor], phases: Phases) -> tuple[Tensor, Tensor]:
        """The two projections [B, S, W] split into heads, and the keys with their positions."""
        k_BSW, v_BSW = projected
        k_BGSD = apply(self.key_unit, self._heads(k_BSW, self.key_norm, self.num_kv_heads))
        return phases.rotate(k_BGSD), self._split(v_BSW, self.num_kv_heads).transpose(1, 2)

    def _heads(self, x_BTW: Tensor, norm: nn.Module | None, heads: int) -> Tensor:
        """A projection normalised and split into heads, [B, heads, T, D]."""
        if self.norm_per_head:
            return apply(norm, self._split(x_BTW, heads)).transpose(1, 2)
        return self._split(apply(norm, x_BTW), heads).transpose(1, 2)

    def _split(self, x_BTW: Tensor, heads: int) -> Tensor:
        return x_BTW.view(*x_BTW.shape[:2], heads, self.head_dim)

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads, {self.num_kv_heads} key/value heads, head_dim={self.head_dim}"


def call_mask(rule: Rule | None, x_BTM: Tensor, num_keys: int) -> Mask:
    """The rule of one call on its own: of x's tokens [B, T, M], to keys at slots 0 .. num_keys - 1."""
    square = Mask.square(rule, x_BTM.shape[1], x_BTM.device)
    return Mask(rule, square.q_slots, num_keys, aligned=num_keys == x_BTM.shape[1])


build.register(StandardAttentionConfig, Attention)

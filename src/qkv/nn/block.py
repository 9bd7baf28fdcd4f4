"""Sublayers, blocks and stacks: how the parts are stacked up.

Shapes: B batch, T tokens, S source tokens, M model width, N source width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qkv.config.block import BlockConfig
from qkv.config.parts import NormConfig
from qkv.config.positions import NoPositionConfig
from qkv.config.stack import StackConfig
from qkv.nn.build import Dims, apply, build, dropout_of
from qkv.nn.cache import Cache, CrossCache, LayerCache
from qkv.nn.gate import Gate
from qkv.nn.mask import Causal, Mask, Prefix, Rule, Window
from qkv.nn.position import NO_PHASES, Phases, Position, total_lengths
from qkv.nn.residual import ResidualStream, Site
from qkv.nn.value_residual import FirstValues


@dataclass
class BlockInputs:
    """What a block needs besides the stream: the same objects for all layers of a kind, made once per forward."""

    mask: Mask | Rule | None = None
    phases: Phases = NO_PHASES
    memory_BSN: Tensor | None = None
    memory_mask: Mask | Rule | None = None
    cache: LayerCache | None = None
    cross_cache: CrossCache | None = None
    end: int = 0
    rows_per_source: int = 1
    first_values: FirstValues = field(default_factory=FirstValues)


class Sublayer(nn.Module):
    """read -> norm_in -> function -> norm_out -> gate -> dropout -> write -> norm_stream.

    Of the three norms a placement uses norm_in (pre), norm_out (output), both (sandwich) or norm_stream (post).
    functions: by name; `call` knows them. Cross-attention may have a gate.
    """

    function: nn.Module

    def __init__(self, norm: NormConfig, dims: Dims, site: Site, dropout: float, **functions: nn.Module) -> None:
        super().__init__()
        self.site = site
        where = norm.placement
        self.norm_in: nn.Module | None = build(norm, dims) if where in ("pre", "sandwich") else None
        for name, function in functions.items():
            self.add_module(name, function)
        self.norm_out: nn.Module | None = build(norm, dims) if where in ("output", "sandwich") else None
        self.gate: nn.Module | None = None
        self.dropout = dropout_of(dropout)
        self.norm_stream: nn.Module | None = build(norm, dims) if where == "post" else None

    def forward(self, state: Any, inputs: BlockInputs) -> Any:
        """The state of the residual stream, one sublayer later."""
        site = self.site
        x_BTM, context = (state, None) if site.read is None else site.read(state)
        y_BTM = apply(self.dropout, apply(self.gate, apply(self.norm_out, self.call(x_BTM, inputs))))
        return apply(self.norm_stream, site.write(state, y_BTM, context))

    def call(self, x_BTM: Tensor, inputs: BlockInputs) -> Tensor:
        """The function of what norm_in makes of x, given what it needs of `inputs`."""
        out: Tensor = self.function(apply(self.norm_in, x_BTM))
        return out


class SelfAttentionSublayer(Sublayer):
    """Queries, keys and values from the stream."""

    def call(self, x_BTM: Tensor, inputs: BlockInputs) -> Tensor:
        return _attend(self.function, apply(self.norm_in, x_BTM), inputs)


class ParallelSublayer(Sublayer):
    """Attention and feed-forward side by side: x + Attention(N x) + FeedForward(N x) (GPT-J: Wang and Komatsuzaki
    2021), or with a norm of its own, norm_feed_forward, for the latter (GPT-NeoX: Black et al. 2022, arXiv 2204.06745).
    """

    attention: nn.Module
    feed_forward: nn.Module

    def __init__(
        self,
        norm: NormConfig,
        dims: Dims,
        site: Site,
        dropout: float,
        *,
        attention: nn.Module,
        feed_forward: nn.Module,
        two_norms: bool,
    ) -> None:
        super().__init__(norm, dims, site, dropout, attention=attention, feed_forward=feed_forward)
        self.norm_feed_forward = build(norm, dims) if two_norms else None

    def call(self, x_BTM: Tensor, inputs: BlockInputs) -> Tensor:
        normed_BTM = apply(self.norm_in, x_BTM)
        attended_BTM = _attend(self.attention, normed_BTM, inputs)
        if self.norm_feed_forward is not None:
            normed_BTM = self.norm_feed_forward(x_BTM)
        out: Tensor = attended_BTM + self.feed_forward(normed_BTM)
        return out


def _attend(attention: nn.Module, x_BTM: Tensor, inputs: BlockInputs) -> Tensor:
    """Self-attention."""
    out: Tensor = attention(
        x_BTM,
        mask=inputs.mask,
        phases=inputs.phases,
        cache=inputs.cache,
        end=inputs.end,
        first_values=inputs.first_values,
    )
    return out


class CrossAttentionSublayer(Sublayer):
    """Queries from the stream, keys and values from the source's memory.

    Rows that share a source are queries of one row: the order of queries means nothing to a source.
    """

    def call(self, x_BTM: Tensor, inputs: BlockInputs) -> Tensor:
        q_BTM = apply(self.norm_in, x_BTM).reshape(x_BTM.shape[0] // inputs.rows_per_source, -1, x_BTM.shape[2])
        out: Tensor = self.function(q_BTM, inputs.memory_BSN, mask=inputs.memory_mask, cache=inputs.cross_cache)
        return out.reshape(x_BTM.shape)


class Block(nn.Module):
    """One layer: self-attention, cross-attention where there is a source, feed-forward; or the first and the last in
    parallel.

    On its own: `Block(config, Dims(d_model))(x, BlockInputs(mask=Causal()))`. A stack gives all its blocks one stream;
    `first_site` is the number of sublayers before this block.
    """

    self_attention_class: ClassVar[type[SelfAttentionSublayer]] = SelfAttentionSublayer

    def __init__(
        self, config: BlockConfig, dims: Dims, stream: ResidualStream | None = None, first_site: int = 0
    ) -> None:
        super().__init__()
        if stream is None:
            stream = build(config.residual, dims)
        norm, dropout, dims = config.norm, config.dropout, dims.with_(norm=config.norm)
        attention = build(config.attention, dims.with_(d_source=None))
        feed_forward = build(config.feed_forward, dims)
        if config.parallel != "none":
            site, two = stream.new_site(first_site, dims.layer), config.parallel == "two-norms"
            self.parallel = ParallelSublayer(
                norm, dims, site, dropout, attention=attention, feed_forward=feed_forward, two_norms=two
            )
            return
        self.self_attention = self.self_attention_class(
            norm, dims, stream.new_site(first_site, dims.layer), dropout, function=attention
        )
        if config.cross_attention is not None:
            cross = build(config.cross_attention, dims)
            self.cross_attention = CrossAttentionSublayer(
                norm, dims, stream.new_site(first_site + 1, dims.layer), dropout, function=cross
            )
            if config.cross_gate:
                self.cross_attention.gate = Gate()
        self.feed_forward = Sublayer(
            norm, dims, stream.new_site(first_site + len(self), dims.layer), dropout, function=feed_forward
        )

    def __len__(self) -> int:
        """The number of sublayers."""
        return len(self._modules)

    def attention(self, kind: Literal["self", "cross"]) -> nn.Module | None:
        """Its attention to its own stream or to the source; None where there is none."""
        for name, sublayer in self.named_children():
            if kind == "self" and isinstance(sublayer, ParallelSublayer):
                return sublayer.attention
            if name == f"{kind}_attention" and isinstance(sublayer, Sublayer):
                return sublayer.function
        return None

    def forward(self, state: Any, inputs: BlockInputs | None = None) -> Any:
        """The state of the residual stream (plain: hidden vectors [B, T, M]), one layer later."""
        inputs = inputs or BlockInputs()
        for sublayer in self.children():
            state = sublayer(state, inputs)
        return state


class Stack(nn.Module):
    """A tower: blocks on a residual stream, and the final norm where the placement needs one. There is one block for
    each layer, or one for all where layers share their parameters (ALBERT: Lan et al. 2019, arXiv 1909.11942).

    d_source: width of the memory that cross-attention reads; None: there is none. prefix: of a causal stack, whether
    the tokens of a row's prefix see each other. recomputes: in training, keep of each block no more than its input, and
    compute the rest again for the backward pass (Chen et al. 2016, arXiv 1604.06174).
    """

    block_class: ClassVar[type[Block]] = Block

    def __init__(self, config: StackConfig, *, causal: bool, d_source: int | None = None, prefix: bool = False) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        self.recomputes = False
        dims = Dims(
            config.d_model,
            d_source,
            max_seq_len=config.max_seq_len,
            num_layers=config.num_layers,
            causal=causal and not prefix,
        )
        self.residual: ResidualStream = build(config.residual, dims)
        # one position module per distinct kind: its phases are computed once per forward, not once per layer
        self.positions = nn.ModuleList()
        known: dict[Any, int] = {}
        self.position_of_layer: list[int] = []
        self.window_of_layer: list[int | None] = []
        blocks: list[Block] = []
        sites = 0
        for number, layer in enumerate(config.layers):
            kind = NoPositionConfig() if layer.position.absolute else layer.position
            head_dim, heads = layer.attention.rotary_dim or config.d_model, layer.attention.num_heads
            if (kind, head_dim, heads) not in known:
                known[kind, head_dim, heads] = len(self.positions)
                self.positions.append(build(kind, dims.with_(d_model=head_dim, num_heads=heads)))
            self.position_of_layer.append(known[kind, head_dim, heads])
            self.window_of_layer.append(getattr(layer.attention, "window", None))
            if not blocks or not config.share_layers:
                blocks.append(self.block_class(layer, dims.with_(layer=number), self.residual, sites))
                sites += len(blocks[-1])
        self.blocks = nn.ModuleList(blocks)
        self.final_norm: nn.Module = build(config.norm, dims) if config.final_norm else nn.Identity()

    @property
    def layers(self) -> list[Block]:
        """The block of each layer."""
        blocks: list[Any] = list(self.blocks)
        return blocks * len(self.position_of_layer) if self.config.share_layers else blocks

    def forward(
        self,
        x_BTM: Tensor,
        positions_BT: Tensor | None = None,
        *,
        lengths_B: Tensor | None = None,
        documents_BT: Tensor | None = None,
        rule: Rule | None = None,
        memory_BSN: Tensor | None = None,
        memory_rule: Rule | None = None,
        prefix_B: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Embeddings [B, T, M] to hidden vectors [B, T, M].

        positions_BT: [B or 1, T], by default 0 .. T-1. lengths_B, documents_BT: which tokens are one sequence, for
        positions that depend on its length. rule: what else hides keys, besides a causal stack's own rule and each
        layer's window. memory_BSN: the source; memory_rule: what hides it. prefix_B: how many tokens at the beginning
        of each row see each other. cache: takes up the new tokens' keys and values; the caller advances it.
        """
        length = x_BTM.shape[1]
        if positions_BT is None:
            positions_BT = torch.arange(length, device=x_BTM.device)[None]
        end = cache.room_for(length) if cache is not None else length
        slots = torch.arange(length, device=x_BTM.device) if cache is None else cache.slots(length)
        held = end if cache is None or cache.capacity is None else cache.capacity
        dtype = x_BTM.dtype if x_BTM.dtype == torch.float64 else torch.float32
        phases = []
        for position in self.positions:
            assert isinstance(position, Position)
            total_BT = total_lengths(positions_BT, lengths_B, documents_BT) if position.needs_length else None
            if cache is not None and total_BT is not None:
                position.check_growth(cache.lengths_B, total_BT)
            phases.append(position.phases(positions_BT, dtype, total_BT))
        masks: dict[int | None, Mask] = {}
        memory_mask = None
        sharing = cache.rows_per_source if cache is not None else 1
        if memory_BSN is not None or (cache is not None and cache.has_source):
            queries = torch.arange(length * sharing, device=x_BTM.device)
            memory_mask = Mask(memory_rule, queries, _memory_length(memory_BSN, cache), aligned=False)
        state, first_values = self.residual.enter(x_BTM), FirstValues()
        for layer, block in enumerate(self.layers):
            window = self.window_of_layer[layer]
            if window not in masks:
                whole = self._rule(window, rule, prefix_B)
                keys = None if cache is None else cache.key_slots(layer, length)
                masks[window] = Mask(whole, slots, held, aligned=slots.dim() == 1, k_slots=keys)
            inputs = BlockInputs(
                masks[window],
                phases[self.position_of_layer[layer]],
                memory_BSN,
                memory_mask,
                cache.layers[layer] if cache is not None else None,
                cache.cross[layer] if cache is not None else None,
                end,
                sharing,
                first_values,
            )
            state = _recomputed(block, state, inputs) if self.recomputes and self.training else block(state, inputs)
        hidden: Tensor = self.final_norm(self.residual.exit(state))
        return hidden

    def _rule(self, window: int | None, rule: Rule | None, prefix_B: Tensor | None) -> Rule | None:
        """A layer's whole rule: causal or not, its window, and what hides keys in this call."""
        whole: Rule | None = Causal() if self.causal else None
        if whole is not None and prefix_B is not None:
            whole = whole | Prefix(prefix_B)
        for part in (Window(window) if window else None, rule):
            if part is not None:
                whole = part if whole is None else whole & part
        return whole


def _recomputed(block: Block, state: Any, inputs: BlockInputs) -> Any:
    """What the block makes of the state, without what the backward pass needs: that is computed again."""
    bias = inputs.phases.bias
    if bias is not None and bias.learning:
        assert isinstance(inputs.mask, Mask)
        bias.tensor(inputs.mask)  # all blocks share it: none may be the one that makes it
    return checkpoint(block, state, inputs, use_reentrant=False)


def _memory_length(memory_BSN: Tensor | None, cache: Cache | None) -> int:
    if memory_BSN is not None:
        return memory_BSN.shape[1]
    assert cache is not None
    return next(cross.k_BGSD.shape[2] for cross in cache.cross if cross is not None and cross.k_BGSD is not None)

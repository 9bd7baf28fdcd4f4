"""The block diagram as text: both towers side by side, data walking downwards, with shapes and parameters."""

from __future__ import annotations

from itertools import zip_longest
from textwrap import wrap

from torch import nn

from qkv.config.attention import (
    AttentionConfig,
    DifferentialAttentionConfig,
    LatentAttentionConfig,
    StandardAttentionConfig,
)
from qkv.config.block import BlockConfig
from qkv.config.feed_forward import DenseFeedForwardConfig, MixtureOfExpertsConfig
from qkv.config.model import ModelConfig
from qkv.config.parts import LogMelInputConfig, NormConfig, PatchInputConfig
from qkv.config.positions import PositionConfig, RopeConfig
from qkv.config.residuals import (
    AttentionResidualsConfig,
    DeepNormConfig,
    HyperConnectionsConfig,
    LayerScaleConfig,
    MhcConfig,
    NoResidualConfig,
    PlainResidualConfig,
    ResidualConfig,
    ReZeroConfig,
)
from qkv.config.stack import StackConfig
from qkv.inspect.summary import count
from qkv.nn.transformer import Transformer

WIDTH = 56


def draw(config: ModelConfig, network: Transformer | None = None) -> str:
    """The diagram of a model; `network` saves building it again."""
    network = network or Transformer(config, device="meta")
    columns = []
    counted: set[int] = set()
    for name in config.stacks:
        columns.append(_tower(config, network, name, counted))
    left = columns[0]
    if len(columns) == 1:
        return "\n".join(left)
    right = columns[1]
    rows = zip_longest(left, right, fillvalue="")
    return "\n".join(f"{a:<{WIDTH + 4}}{b}".rstrip() for a, b in rows)


def _tower(config: ModelConfig, network: Transformer, name: str, counted: set[int]) -> list[str]:
    stack = config.stacks[name]  # type: ignore[index]
    both = len(config.stacks) == 2
    letter = "S" if both and name == "encoder" else "T"
    length = stack.input.fixed_length or letter
    embedding: nn.Module = getattr(network, f"{name}_embedding")
    tower: nn.Module = getattr(network, name)
    side = "source " if letter == "S" else "target " if both else ""
    reads = stack.input.expects.replace("T", letter)
    lines = [f"{side}{reads}" if stack.input.reads_ids else reads, "  │"]
    lines += _box(_embedding_lines(stack), _fresh(embedding, counted))
    prefix = ", its prefix in both directions" if config.prefix else ""
    lines.append(f"  │ [B, {length}, {stack.d_model}]{prefix}")
    if stack.num_queries:
        length = stack.num_queries
        queries: nn.Module = tower.queries  # type: ignore[assignment]
        lines += _box([f"{length} learned queries in its place, which read it"], _fresh(queries, counted))
        lines.append(f"  │ [B, {length}, {stack.d_model}]")
    biases = {_position(layer.position) for layer in stack.layers if layer.position.by_slots}
    if biases:
        tables = _fresh(tower.positions, counted)  # type: ignore[arg-type]
        lines += [*_box([f"{', '.join(sorted(biases))}, in the scores"], tables), "  │"]
    enter, leave = _around(stack.residual)
    if enter:
        lines += [f"  │ {enter}"]
    blocks: list[nn.Module] = tower.layers  # type: ignore[assignment]
    alike: dict[BlockConfig, list[int]] = {}
    for number, layer in enumerate(stack.layers):
        alike.setdefault(layer, []).append(number)
    for layer, numbers in alike.items():
        params = sum(_fresh(blocks[number], counted) for number in numbers)
        what = "the same block" if stack.share_layers else "block"
        title = f"{len(numbers)} x {what}" if len(numbers) > 1 else "block"
        if len(runs := _runs(numbers)) > 1:
            title += f" in layers {', '.join(runs if len(runs) < 5 else [*runs[:2], '...', runs[-1]])}"
        typical = blocks[numbers[-1]]  # a stack's first layer may have nothing to mix
        lines += _box([title, *_block_lines(layer, typical, reading=bool(stack.num_queries))], params)
        lines.append("  │")
    if leave:
        lines += [*_box([leave], _fresh(tower.residual, counted)), "  │"]  # type: ignore[arg-type]
    if stack.final_norm and stack.norm.kind != "none":
        lines += _box([f"final {_norm(stack.norm)}"], _fresh(tower.final_norm, counted))  # type: ignore[arg-type]
        lines.append("  │")
    if both and name == "encoder":
        return [*lines, f"memory [B, {length}, {stack.d_model}] ──▶ cross-attention"]
    assert config.head is not None
    head = f"head: {config.head.kind}" + (" with pooler" if getattr(config.head, "pooler", False) else "")
    if config.tie_embeddings in ("head", "all"):
        head += ", tied to the embedding"
    lines += _box([head], _fresh(network.head, counted))
    if network.mtp is not None:
        further = f"in training, {_several(config.mtp.depth, 'further token')}: a block each, and the same head"
        lines += ["  │", *_box([further], _fresh(network.mtp, counted))]
    shape = {
        "language-model": f"logits [B, {length}, {stack.vocab_size}]",
        "masked-language-model": f"logits [B, {length}, {stack.vocab_size}]",
        "classifier": f"scores [B, {getattr(config.head, 'num_classes', None) or 'C'}]",
        "embedding": f"vectors [B, {getattr(config.head, 'width', None)}]",
    }.get(config.head.kind, f"hidden vectors [B, {length}, {stack.d_model}]")
    return [*lines, "  │", shape]


def _runs(numbers: list[int]) -> list[str]:
    """Rising numbers with neighbours joined: 0-4, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _fresh(module: nn.Module, counted: set[int]) -> int:
    """Parameters not counted before: a tied matrix is counted where it first appears."""
    new = [parameter for parameter in module.parameters() if id(parameter) not in counted]
    counted.update(id(parameter) for parameter in new)
    return count(new)


def _box(content: list[str], params: int) -> list[str]:
    """Lines in a frame, the number of parameters in its lower edge."""
    label = f" {params:,} parameter{'' if params == 1 else 's'} " if params else ""
    edge = "─" * (WIDTH - 3 - len(label)) + label + "─"
    lines = [part for line in content for part in _wrapped(line)]
    body = [f"│ {line:<{WIDTH - 4}} │" for line in lines]
    return ["┌─┴" + "─" * (WIDTH - 4) + "┐", *body, f"└{edge}┘"]


def _wrapped(line: str) -> list[str]:
    """A line in parts that fit the frame, broken at spaces; what follows stands under the line's own beginning."""
    if len(line) <= WIDTH - 4:
        return [line]
    lead = "│    " if line[0] in "│├" else "  "
    return wrap(line, WIDTH - 4, subsequent_indent=lead, drop_whitespace=False, replace_whitespace=False)


def _embedding_lines(stack: StackConfig) -> list[str]:
    options = stack.embedding
    first = _input(stack)
    lines = [first if options.scale == 1.0 else f"{first}, x {options.scale}"]
    if stack.position.absolute:
        lines.append(f"+ {_position(stack.position)}")
    if options.num_segments:
        lines.append(f"+ segments ({options.num_segments})")
    if options.norm:
        lines.append(_norm(stack.norm))
    dropout = stack.dropout if options.dropout is None else options.dropout
    if dropout:
        lines.append(f"dropout {dropout:g}")
    return [*lines, f"projection {options.width} -> {stack.d_model}"] if options.width else lines


def _input(stack: StackConfig) -> str:
    part = stack.input
    if part.reads_ids:
        return f"token embedding {stack.vocab_size or 0:,} x {stack.embedding.width or stack.d_model}"
    if isinstance(part, PatchInputConfig):
        patches = f"patches of {part.patch_size} x {part.patch_size}"
        registers = f"{part.num_registers} registers, " if part.num_registers else ""
        return f"{'class token, ' if part.class_token else ''}{registers}{patches}"
    if isinstance(part, LogMelInputConfig):
        return "two convolutions over 3 frames, the second halves them"
    return "projection"


def _block_lines(layer: BlockConfig, block: nn.Module, *, reading: bool = False) -> list[str]:
    """What a layer does, sublayer by sublayer; `reading`: to learned queries, which read the input."""
    attention, feed_forward = _attention(layer.attention, layer.position), _feed_forward(layer)
    if layer.parallel == "none":
        parts = [("attention to the input" if reading else "self-attention", [attention])]
        if layer.cross_attention is not None:
            gate = ["times tanh of a learned number"] if layer.cross_gate else []
            parts.append(("cross-attention", [_attention(layer.cross_attention, None), *gate]))
        parts.append(("feed-forward", [feed_forward]))
    else:
        norms = "" if layer.parallel == "one-norm" else f"{_norm(layer.norm)} of its own, then "
        parts = [("attention + feed-forward", [attention, f"{norms}{feed_forward}"])]
    placement, norm = layer.norm.placement, _norm(layer.norm)
    pre = f"{norm}, then " if placement in ("pre", "sandwich") and layer.norm.kind != "none" else ""
    after = ["dropout"] if layer.dropout else []
    if placement in ("output", "sandwich") and layer.norm.kind != "none":
        after.insert(0, norm)
    read, write = _residual(layer.residual)
    after.append(write)
    if placement == "post" and layer.norm.kind != "none":
        after.append(norm)
    lines = []
    for (name, what), sublayer in zip(parts, block.children(), strict=True):
        lines.append(_with_number(f"├─ {pre}{name}", f"{count(sublayer.parameters()):,}"))
        own = count(sublayer.site.parameters())  # type: ignore[union-attr]
        if own:
            lines.append(_with_number("│  of these, the residual's own", f"{own:,}"))
        if read:
            lines.append(f"│  reads {read}")
        lines += [*(f"│    {line}" for line in what), f"│  {', '.join(after)}"]
    return lines


def _with_number(line: str, number: str) -> str:
    """A line with a number at its right edge."""
    return line + " " * max(WIDTH - 4 - len(line) - len(number), 1) + number


def _residual(part: ResidualConfig) -> tuple[str, str]:
    """What a sublayer reads where it is not the stream itself, and what becomes of its result."""
    match part:
        case PlainResidualConfig():
            return "", "add"
        case NoResidualConfig():
            return "", "replace the stream"
        case ReZeroConfig():
            return "", "times a learned number, add"
        case LayerScaleConfig():
            return "", "times a learned number per channel, add"
        case DeepNormConfig():
            return "", f"add to {part.alpha:.3g} x the stream"
        case HyperConnectionsConfig():
            how = "by token" if part.dynamic else "static"
            return f"a mixture of {_streams(part)}, {how}", "add to each of them, mixed"
        case MhcConfig():
            steps = _several(part.iterations, "step")
            return f"a mixture of {_streams(part)}, by sigmoids", f"add to each, mixed doubly stochastic ({steps})"
        case AttentionResidualsConfig():
            write = "one more to mix" if part.block_size is None else f"add to the sum of its {_block(part)}"
            return f"a mixture of {_sources(part)}", write
    return "", part.kind


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _streams(part: HyperConnectionsConfig | MhcConfig) -> str:
    streams = _several(part.streams, "stream")
    if isinstance(part, MhcConfig) or part.fractions == 1:
        return streams
    return f"{streams} in {part.fractions} parts"


def _sources(part: AttentionResidualsConfig) -> str:
    results = "all results" if part.block_size is None else f"the sum of each {_block(part)}"
    return f"embedding and {results}, by softmax"


def _block(part: AttentionResidualsConfig) -> str:
    return part.unit if part.block_size == 1 else f"{part.block_size} {part.unit}s"


def _around(part: ResidualConfig) -> tuple[str, str]:
    """What the embedding becomes before the first sublayer, and what the last one's state becomes."""
    match part:
        case HyperConnectionsConfig():
            return f"as {_streams(part)}", "sum of the streams"
        case MhcConfig():
            exits = {"mean": "mean", "sum": "sum", "learned": "learned weighted sum"}
            return f"as {_streams(part)}", f"{exits[part.exit]} of the streams"
        case AttentionResidualsConfig():
            return "", f"mixture of {_sources(part)}"
    return "", ""


def _attention(attention: AttentionConfig, position: PositionConfig | None) -> str:
    text = f"{attention.num_heads} heads"
    if isinstance(attention, StandardAttentionConfig):
        text = (
            f"q [{attention.num_heads} x {attention.head_dim}], k v [{attention.num_kv_heads} x {attention.head_dim}]"
        )
        if attention.qk_norm != "none":
            text += f", qk-norm {attention.qk_norm}"
        if attention.score != "scaled-dot":
            text += f", {attention.score} scores"
        if attention.scale is not None:
            text += f", scale {attention.scale:g}"
        if attention.softcap is not None:
            text += f", softcap {attention.softcap:g}"
        if attention.window:
            text += f", window {attention.window}"
        if attention.sinks:
            text += ", sinks"
        if attention.gate != "none":
            text += f", gate {attention.gate}"
        if isinstance(attention, DifferentialAttentionConfig):
            text += ", differential"
        if attention.value_residual != "none":
            text += f", values mixed with the first layer's ({attention.value_residual})"
    if isinstance(attention, LatentAttentionConfig):
        queries = "" if attention.q_rank is None else f" of rank {attention.q_rank}"
        text = (
            f"q [{attention.num_heads} x ({attention.nope_dim} + {attention.rope_dim})]{queries}, "
            f"k v [{attention.num_heads} x {attention.nope_dim}, {attention.num_heads} x {attention.value_dim}] "
            f"of rank {attention.kv_rank}, k [{attention.rope_dim}] for all heads"
        )
        if attention.window:
            text += f", window {attention.window}"
    if position is not None and not position.absolute and position.kind != "none":
        text += f", {_position(position)}"
    return text


def _position(position: PositionConfig) -> str:
    if isinstance(position, RopeConfig):
        part = "" if position.fraction == 1 else f" on {position.fraction:g}"
        scaling = "" if position.scaling is None else f", {position.scaling.kind.rpartition(':')[2]} scaling"
        return f"rope {position.theta:g}{part}{scaling}"
    return f"{position.kind} positions"


def _feed_forward(layer: BlockConfig) -> str:
    part = layer.feed_forward
    if isinstance(part, MixtureOfExpertsConfig):
        shared = " and a shared one" if part.shared else ""
        router = part.router
        groups = f" in {router.top_groups} of {router.num_groups} groups" if router.num_groups > 1 else ""
        chosen = f"{part.top_k} of {part.num_experts} experts{groups} by {router.score}"
        return f"{chosen}{shared}, {part.expert.kind}, {part.d_ff} wide"
    return f"{part.kind}, {part.d_ff} wide" if isinstance(part, DenseFeedForwardConfig) else part.kind


def _norm(norm: NormConfig) -> str:
    return {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(norm.kind, norm.kind.rpartition(":")[2])

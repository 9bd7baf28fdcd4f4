"""Whether this machine's attention kernels compute what they should, and which of them a network uses.

Each kernel is compared with attention in float64, written down independently of them, on the CPU: outputs and
gradients (where it has them here), for the masks and memory layouts that models use. Some accelerators return wrong
values for permuted inputs, and report no error.

Shapes: B batch, T queries, S keys, M model width, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkv.config.block import BlockConfig
from qkv.config.stack import StackConfig
from qkv.nn.block import Stack
from qkv.nn.kernels import KERNELS, Kernel, kernels_of, new_kernel
from qkv.nn.mask import Causal, Documents, Mask, Padding, Prefix, Rule, Window
from qkv.nn.position import Position, total_lengths
from qkv.nn.score import Scoring
from qkv.nn.transformer import Transformer
from qkv.nn.value_residual import FirstValues

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""The largest error allowed, as a share of the largest value (or of 1 where that is smaller)."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LAYOUTS = ("contiguous", "permuted", "strided")
_BATCH, _HEADS, _WIDTH = 2, 4, 16
_SCALE = _WIDTH**-0.5
_LENGTH = 270  # more than one tile of the tiled kernel


@dataclass(frozen=True)
class KernelCheck:
    """The largest error of one kernel in one dtype over all cases, and the `case` it was in. None: not finite.

    gradients: whether they were compared too; a kernel that has none here is for inference.
    """

    kernel: str
    device: str
    dtype: str
    error: float | None
    tolerance: float
    case: str
    gradients: bool = True

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


@dataclass(frozen=True)
class _Case:
    name: str
    rule: Rule | None
    queries: int = _LENGTH  # the last so many slots, as in a cache
    kv_heads: int = _HEADS
    lengths: Tensor | None = None  # NaN stands in keys and values beyond


def _cases(device: torch.device) -> Iterator[_Case]:
    half = torch.tensor([_LENGTH, _LENGTH // 2], device=device)
    none = torch.tensor([_LENGTH, 0], device=device)
    documents = (torch.arange(_LENGTH, device=device) // 100).expand(_BATCH, -1)
    yield _Case("everything", None)
    yield _Case("causal", Causal())
    yield _Case("causal, behind a cache", Causal(), queries=5)
    yield _Case("one query", Causal(), queries=1)
    yield _Case("window", Causal() & Window(7))
    yield _Case("prefix", Causal() | Prefix(half))
    yield _Case("documents", Causal() & Documents(documents, documents))
    yield _Case("padding", Padding(half), lengths=half)
    yield _Case("empty rows", Causal() & Padding(none), lengths=none)
    yield _Case("grouped queries", Causal(), kv_heads=2)
    yield _Case("one key/value head", Causal() & Padding(half), kv_heads=1, lengths=half)


def _lay_out(x_BHTD: Tensor, layout: str) -> Tensor:
    """The same values in another order in memory: as a model's projections give them, or with gaps."""
    if layout == "permuted":
        return x_BHTD.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack((x_BHTD, torch.full_like(x_BHTD, 1e4)), dim=-1)[..., 0]
    return x_BHTD.contiguous()


def check_kernels(
    device: torch.device | str = "cpu",
    *,
    kernels: Mapping[str, Kernel] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> list[KernelCheck]:
    """The largest error of every kernel (None: all there are) in every dtype on `device`; takes seconds.

    Whatever a kernel raises counts as an error that is not finite.
    """
    device = torch.device(device)
    kernels = kernels or {name: new_kernel(name) for name in KERNELS}
    learning = {name: kernel for name, kernel in kernels.items() if _learns(kernel, device)}
    worst: dict[tuple[str, torch.dtype], tuple[float, str]] = {}
    for dtype in dtypes:
        for number, (case, on_cpu) in enumerate(zip(_cases(device), _cases(torch.device("cpu")), strict=True)):
            inputs = _inputs(case, dtype)
            wanted = _reference(on_cpu, inputs)
            for name, kernel in kernels.items():
                # without gradients it is flex on a CPU, which is traced anew by each call, for half a second
                layouts = LAYOUTS if name in learning else (LAYOUTS[number % len(LAYOUTS)],)
                for layout in layouts:
                    error = _error(kernel, case, inputs, layout, device, wanted if name in learning else wanted[:1])
                    if error > worst.get((name, dtype), (-1.0, ""))[0]:
                        worst[name, dtype] = error, f"{case.name}, {layout}"
    return [
        KernelCheck(
            kernel=name,
            device=str(device),
            dtype=NAMES[dtype],
            error=error if math.isfinite(error) else None,
            tolerance=TOLERANCE[dtype],
            case=case_name,
            gradients=name in learning,
        )
        for (name, dtype), (error, case_name) in worst.items()
    ]


def _learns(kernel: Kernel, device: torch.device) -> bool:
    """Whether the kernel has gradients on this device."""
    case = next(_cases(device))
    q, k, v = (tensor.to(device).requires_grad_() for tensor in _inputs(case, torch.float32)[:3])
    return not kernel.lacking(q, k, v, _mask(case, device), Scoring(_SCALE))


def _inputs(case: _Case, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, on the CPU, drawn from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    q_shape = (_BATCH, _HEADS, case.queries, _WIDTH)
    k_shape = (_BATCH, case.kv_heads, _LENGTH, _WIDTH)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (q_shape, k_shape, k_shape, q_shape)]


def _mask(case: _Case, device: torch.device) -> Mask:
    slots = torch.arange(_LENGTH - case.queries, _LENGTH, device=device)
    return Mask(case.rule, slots, _LENGTH, aligned=True)


def _reference(case: _Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of q, k and v in float64: softmax by its definition, over the allowed keys alone."""
    q, k, v = (tensor.double().requires_grad_() for tensor in inputs[:3])
    repeats = _HEADS // case.kv_heads
    keys, values = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = torch.einsum("bhtd,bhsd->bhts", q, keys) * _SCALE
    powers = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * _mask(case, q.device).tensor()
    total = powers.sum(-1, keepdim=True)
    weights = powers / torch.where(total > 0, total, 1.0)
    out = torch.einsum("bhts,bhsd->bhtd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())]


def _error(
    kernel: Kernel, case: _Case, inputs: Sequence[Tensor], layout: str, device: torch.device, wanted: Sequence[Tensor]
) -> float:
    """The largest difference from `wanted`, the output and perhaps the gradients, as a share of its largest value or of
    1; infinite where not finite."""
    q, k, v, gradient = (tensor.to(device, copy=True) for tensor in inputs)
    if case.lengths is not None:
        beyond_BS = torch.arange(_LENGTH, device=device) >= case.lengths[:, None]
        k, v = (x_BGSD.masked_fill(beyond_BS[:, None, :, None], math.nan) for x_BGSD in (k, v))
    learns = len(wanted) > 1
    leaves = [tensor.requires_grad_(learns) for tensor in (q, k, v)]
    try:
        out = kernel(*(_lay_out(leaf, layout) for leaf in leaves), _mask(case, device), Scoring(_SCALE))
        found = [out.detach()]
        if learns:
            found += torch.autograd.grad(out, leaves, _lay_out(gradient, layout))
    except RuntimeError:
        return math.inf
    shares = []
    for got, want in zip(found, wanted, strict=True):
        difference = float((got.cpu().double() - want).abs().max())
        shares.append(difference / max(1.0, float(want.abs().max())) if math.isfinite(difference) else math.inf)
    return max(shares)


# --- which kernel computes what ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelUse:
    """What computes so many `attentions` of a network: `kernel`; and where it stands in for `chosen`, what that one
    cannot do ("" where it does all of it)."""

    chosen: str
    kernel: str
    lacking: str
    attentions: int


class _Asking(Kernel):
    """Asks a kernel about a call, and computes nothing."""

    def __init__(self, asked: Kernel, answers: list[str]) -> None:
        super().__init__()
        self.asked, self.answers = asked, answers

    def forward(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> Tensor:
        self.answers.append(self.asked.lacking(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout))
        return q_BHTD.new_zeros(*q_BHTD.shape[:3], v_BGSE.shape[3])


def kernels_used(network: Transformer, *, training: bool = False) -> list[KernelUse]:
    """What computes the attention of a network, in inference or in `training`, the most used first.

    Each attention is asked about two tokens, without computing them; the network may be on the meta device.
    """
    found: Counter[tuple[str, str]] = Counter()
    with torch.set_grad_enabled(training):
        for stack in (network.encoder, network.decoder):
            if stack is not None:
                found.update(_uses(stack, network.config.encoder, training))
    return [
        KernelUse(chosen, "math" if lacking else chosen, lacking, count)
        for (chosen, lacking), count in found.most_common()
    ]


def _uses(stack: Stack, source: StackConfig | None, training: bool) -> Iterator[tuple[str, str]]:
    """(the kernel of an attention, what it cannot do) for every attention of a stack, which may read a source."""
    parameter = next(stack.parameters())
    x_1TM = parameter.new_zeros(1, 2, stack.config.d_model)
    y_1TN = parameter.new_zeros(1, 2, source.d_model) if source else None
    positions_1T = torch.arange(2, device=parameter.device)[None]
    first_values = FirstValues()
    phases = []
    for position in stack.positions:
        assert isinstance(position, Position)
        phases.append(position.phases(positions_1T, torch.float32, total_lengths(positions_1T)))
    known: dict[BlockConfig, list[tuple[str, str]]] = {}  # layers that are alike are asked once
    for layer, (config, block) in enumerate(zip(stack.config.layers, stack.layers, strict=True)):
        if config not in known:
            own = {"phases": phases[stack.position_of_layer[layer]], "first_values": first_values}
            known[config] = [
                *_use(block.attention("self"), training, x_1TM, mask=Causal(), **own),
                *_use(block.attention("cross"), training, x_1TM, y_1TN),
            ]
        yield from known[config]


def _use(attention: nn.Module | None, training: bool, *given: Any, **options: Any) -> Iterator[tuple[str, str]]:
    """What a call of this attention shows; nothing of one without a kernel of ours."""
    kernel = getattr(attention, "kernel", None)
    if attention is None or not isinstance(kernel, Kernel):
        return
    answers: list[str] = []
    mode = attention.training
    attention.kernel, attention.training = _Asking(kernel, answers), training
    try:
        attention(*given, **options)
    finally:
        attention.kernel, attention.training = kernel, mode
    (chosen,) = kernels_of(kernel)
    yield from ((chosen, lacking) for lacking in answers)

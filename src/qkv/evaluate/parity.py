"""Whether two implementations of a model, or two models, compute the same, and from which layer on they do not.

Shapes: T tokens, V vocabulary (or classes, or model width where there is no head), M model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qkv.config.errors import QkvError, UsageError
from qkv.evaluate.probes import Probe, tolerance_for
from qkv.generate.decode import evaluating
from qkv.nn.attention_residuals import Sources
from qkv.nn.block import Block
from qkv.nn.transformer import Transformer

LAYER_TOLERANCE = 1e-4
"""A layer differs where its vectors do by more than this share of their largest value."""

Layers = list[tuple[str, Tensor]]
"""The vectors that enter each stack and leave each of its layers, by name, [T, M]."""


@dataclass(frozen=True)
class Difference:
    """How far two tensors are apart: the largest difference, and that as a share of the largest value."""

    name: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class Parity:
    """Differences over all inputs: of logits, of log-probabilities (None: the model predicts no tokens or classes), of
    logits with a cache, token by token (None: it has none), and of the vectors after each layer, in order.

    tolerance: of the first three, in absolute terms.
    """

    logits: Difference
    logprobs: Difference | None
    cached: Difference | None
    layers: list[Difference]
    tolerance: float
    sequences: int
    tokens: int

    @property
    def ok(self) -> bool:
        """All are within the tolerance."""
        told = (self.logits, self.logprobs, self.cached)
        return all(one.absolute <= self.tolerance for one in told if one is not None)

    @property
    def first_layer(self) -> str | None:
        """The first layer whose vectors differ."""
        return next((one.name for one in self.layers if not one.relative <= LAYER_TOLERANCE), None)


class Implementation(Protocol):
    """A model that can be compared: its outputs [T, V], without and with a cache, and the layers' vectors."""

    def outputs(self, probe: Probe) -> tuple[Tensor, Layers]:
        """Of one forward pass."""

    def cached(self, probe: Probe) -> Tensor:
        """The same outputs: half of the tokens at once, then one at a time."""


def compare(
    network: Transformer, reference: Implementation, some: Sequence[Probe], *, tolerance: float | None = None
) -> Parity:
    """The network against a reference on given inputs. tolerance None: that of `tolerance_for`.

    Raises UsageError for models of different families, and where their outputs have different shapes.
    """
    family = network.config.family
    if isinstance(reference, Ours) and (other := reference.network.config.family) != family:
        raise UsageError(f"the models are of different families, {family} and {other}")
    ours, largest = Ours(network), 0.0
    predicts = network.config.head is not None and network.config.head.kind != "none"
    logits, logprobs, cached = _Largest(), _Largest(), _Largest()
    layers: dict[str, _Largest] = {}
    for probe in some:
        (found_TV, here), (wanted_TV, there) = ours.outputs(probe), reference.outputs(probe)
        if found_TV.shape != wanted_TV.shape:
            raise UsageError(
                f"the models answer in different shapes, {list(found_TV.shape)} and {list(wanted_TV.shape)}"
            )
        largest = max(largest, float(wanted_TV.abs().max()))
        logits.add(found_TV, wanted_TV)
        if predicts:
            logprobs.add(found_TV.log_softmax(-1), wanted_TV.log_softmax(-1))
        if ours.caches:
            cached.add(ours.cached(probe), reference.cached(probe))
        for (name, x_TM), (_, y_TM) in zip(here, there, strict=False):
            if x_TM.shape != y_TM.shape:  # of other widths: from here on there is nothing to compare
                break
            layers.setdefault(name, _Largest()).add(x_TM, y_TM)
    if tolerance is None:
        tolerance = tolerance_for(network, largest) or 1e-3
    return Parity(
        logits.told("logits" if predicts else "hidden vectors"),
        logprobs.told("log-probabilities") if logprobs.seen else None,
        cached.told("with a cache") if cached.seen else None,
        [one.told(name) for name, one in layers.items()],
        tolerance,
        sequences=len(some),
        tokens=sum(probe.ids.shape[1] for probe in some),
    )


class _Largest:
    """The largest difference so far."""

    def __init__(self) -> None:
        self.seen, self.difference, self.value = False, 0.0, 0.0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        difference = float((found.double() - wanted.double()).abs().max())
        self.seen = True
        self.difference = max(self.difference, difference if difference == difference else float("inf"))
        self.value = max(self.value, float(wanted.abs().max()))

    def told(self, name: str) -> Difference:
        return Difference(name, self.difference, self.difference / max(self.value, 1e-30))


class Ours:
    """A network of qkv."""

    def __init__(self, network: Transformer) -> None:
        self.network = network

    @torch.inference_mode()
    def outputs(self, probe: Probe) -> tuple[Tensor, Layers]:
        stacks = [(name, getattr(self.network, name)) for name in self.network.config.stacks]
        blocks = [(module, name) for name, stack in stacks for module in stack.modules() if isinstance(module, Block)]
        firsts = [(stack, name) for name, stack in stacks]
        with evaluating(self.network.modules()), _vectors(blocks, firsts) as layers:
            found = self.network(**probe.arguments(self.network))
        return found[0].float().cpu(), layers

    @property
    def caches(self) -> bool:
        """There is a cache, and an answer for every token."""
        return self.network.decoder is not None and self.network.head.per_token

    @torch.inference_mode()
    def cached(self, probe: Probe) -> Tensor:
        given = probe.arguments(self.network)
        ids_1T, cache = given.pop("ids"), self.network.new_cache(1)
        parts = []
        with evaluating(self.network.modules()):
            for first, last in steps(ids_1T.shape[1]):
                parts.append(self.network(ids_1T[:, first:last], cache=cache, **given))
                given = {}
        return torch.cat(parts, 1)[0].float().cpu()


def steps(length: int) -> Iterator[tuple[int, int]]:
    """From and to: half of a sequence, then one token at a time."""
    half = max(length // 2, 1)
    yield 0, half
    yield from ((place, place + 1) for place in range(half, length))


@contextmanager
def _vectors(blocks: Sequence[tuple[nn.Module, str]], firsts: Sequence[tuple[nn.Module, str]]) -> Iterator[Layers]:
    """What enters each of `firsts` when it is called first, and what leaves `blocks`, in the order of the calls."""
    layers: Layers = []
    count: dict[str, int] = {}

    def entering(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in count:
                count[name] = 0
                layers.append((f"{name} embedding", _first(args or tuple(kwargs.values()))))

        return hook

    def leaving(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            layers.append((f"{name} layer {count[name]}", _first((output,))))
            count[name] += 1

        return hook

    with ExitStack() as hooks:
        for module, name in firsts:
            hooks.enter_context(module.register_forward_pre_hook(entering(name), with_kwargs=True))
        for module, name in dict(blocks).items():
            hooks.enter_context(module.register_forward_hook(leaving(name)))
        yield layers


def _first(values: Any) -> Tensor:
    """The first tensor of what goes into a module or comes out of it, without the batch, on the CPU. Of the sources of
    attention residuals, the first is the embedding whatever the layer: the last is what the layer has added."""
    while not isinstance(values, Tensor):
        values = values.values[-1] if isinstance(values, Sources) else values[0]
    return values[0].float().cpu()


class Transformers:
    """A Hugging Face folder as the library `transformers` computes it: eager attention, float32, on the CPU.

    Raises UsageError where the library is not installed, QkvError where it cannot read the folder.
    """

    def __init__(self, folder: Path) -> None:
        try:
            library = importlib.import_module("transformers")
        except ImportError:
            raise UsageError("the library transformers is not installed", hint="pip install transformers") from None
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        try:
            config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            made = getattr(library, config.architectures[0])
            self.model: Any = made.from_pretrained(
                folder, config=config, attn_implementation="eager", dtype=torch.float32, local_files_only=True
            ).eval()
        except Exception as error:  # whatever the library raises
            what = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise QkvError(f"transformers cannot read the model: {what}", where=str(folder)) from None
        pad = getattr(config, "pad_token_id", None)
        self.pad_ids: list[int] = [] if pad is None else [pad]
        """RoBERTa gives them no position of their own."""

    @torch.inference_mode()
    def outputs(self, probe: Probe) -> tuple[Tensor, Layers]:
        lists = {name: one for name, one in self.model.named_modules() if isinstance(one, nn.ModuleList)}
        towers = {name: one for name, one in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
        blocks = [(block, name) for name, tower in towers.items() for block in tower]
        firsts = [(tower[0], name) for name, tower in towers.items()]
        with _vectors(blocks, firsts) as layers:
            found = self.model(**self._arguments(probe))
        return _logits(found)[0].float(), layers

    @torch.inference_mode()
    def cached(self, probe: Probe) -> Tensor:
        given = self._arguments(probe)
        name = "decoder_input_ids" if self._pairs else "input_ids"
        ids_1T = given.pop(name)
        if self._pairs:
            given["encoder_outputs"] = self.model.get_encoder()(**given)
            del given[self._reads]
        cache = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"
        parts = []
        for first, last in steps(ids_1T.shape[1]):
            found = self.model(**{name: ids_1T[:, first:last]}, **given, use_cache=True)
            given[cache] = getattr(found, cache)
            parts.append(_logits(found))
        return torch.cat(parts, 1)[0].float()

    @property
    def _pairs(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def _reads(self) -> str:
        return str(self.model.main_input_name)

    def _arguments(self, probe: Probe) -> dict[str, Tensor]:
        reads = probe.ids if probe.source is None else probe.source
        if self._reads == "input_features":  # [B, mels, frames] there
            reads = reads.transpose(1, 2)
        given = {self._reads: reads}
        return given if probe.source is None else {**given, "decoder_input_ids": probe.ids}


def _logits(found: Any) -> Tensor:
    """Logits, or the hidden vectors of a model without a head."""
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        value = getattr(found, name, None)
        if isinstance(value, Tensor):
            return value
    raise QkvError(f"transformers gives a {type(found).__name__}, in which there are no logits")

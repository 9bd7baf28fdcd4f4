"""Whether a model answers the same however it is run: alone or in a batch, cached or not, streamed, compiled, and by
whatever kernel.

Shapes: R sequences, T tokens, V vocabulary (or classes, or model width where there is no head).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv.config.errors import QkvError
from qkv.evaluate.machine import compiler
from qkv.evaluate.probes import Probe, probes, together, tolerance_for
from qkv.generate.decode import Decoding, evaluating
from qkv.generate.sampling import Sampling
from qkv.generate.text import TextStream, Writing
from qkv.nn.block import Block
from qkv.nn.kernels import KERNELS, Kernel, KernelName, use_kernel
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

CHUNKS = (1, 5, 3)
"""How many tokens the cache takes up at a time, over and over."""
NEW_TOKENS = 12


@dataclass(frozen=True)
class Check:
    """One way of running the model against the plain one, each sequence alone and without a cache.

    difference: the largest of any logit, or the number of tokens that differ (`unit`); None where it was not measured,
    which `note` explains. tolerance None: reported, and nothing promised.
    """

    name: str
    unit: str
    difference: float | None
    tolerance: float | None
    note: str = ""
    failed: bool = False
    """The model raised something there."""

    @property
    def ok(self) -> bool:
        if self.difference is None or self.tolerance is None:
            return not self.failed
        return self.difference <= self.tolerance


def selfcheck(
    network: Transformer,
    tokenizer: Tokenizer | None = None,
    source_tokenizer: Tokenizer | None = None,
    *,
    start_ids: Sequence[int] | None = None,
    eos_ids: Sequence[int] = (),
    compiled: bool = True,
) -> Iterator[Check]:
    """The checks one by one, those that such a model can have. compiled: False leaves out the one that takes longest.

    The other arguments are those of `probes`. The network is left as it was.
    """
    return _Selfcheck(network, tokenizer, source_tokenizer, start_ids, eos_ids).checks(compiled)


class _Selfcheck:
    def __init__(
        self,
        network: Transformer,
        tokenizer: Tokenizer | None,
        source_tokenizer: Tokenizer | None,
        start_ids: Sequence[int] | None,
        eos_ids: Sequence[int],
    ) -> None:
        self.network, self.tokenizer, self.eos_ids = network, tokenizer, eos_ids
        self.probes = probes(network, tokenizer, source_tokenizer, start_ids=start_ids)
        self.alone = [self._alone(probe) for probe in self.probes]
        largest = max(float(one_TV.abs().max()) for one_TV in self.alone)
        self.tolerance = tolerance_for(network, largest)
        self.reordered = tolerance_for(network, largest, reordered=True)

    def checks(self, compiled: bool) -> Iterator[Check]:
        yield self._logits("in a batch", self._batched)
        if self.network.decoder is not None and self.network.head.per_token:
            yield self._logits("cached, token by token", partial(self._in_chunks, (1,)))
            yield self._logits(
                f"prefilled in chunks of {', '.join(map(str, CHUNKS))}", partial(self._in_chunks, CHUNKS)
            )
            yield self._logits("cached, in a batch", self._cached_together)
            assert self.network.config.head is not None
            if self.network.config.head.predicts_tokens:
                yield self._tokens("generated with a cache, in a batch", self._written)
                yield self._tokens("streamed", self._streamed)
        for name in KERNELS:
            yield self._logits(f"kernel {name}", partial(self._by_kernel, name), reordered=True)
        if not compiled:
            yield Check("compiled", "logit", None, None, "left out")
        elif next(self.network.parameters()).device.type == "cpu" and compiler() is None:
            yield Check("compiled", "logit", None, None, "left out: there is no C++ compiler")
        else:
            yield self._logits("compiled", self._compiled, reordered=True)

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def _logits(self, name: str, run: Callable[[], list[Tensor]], *, reordered: bool = False) -> Check:
        """The largest difference of what `run` gives for each sequence [T, V] from what it gives alone."""

        def difference() -> float:
            pairs = zip(run(), self.alone, strict=True)
            # torch's max, for which a NaN is the largest, wherever it stands
            return torch.stack([(found_TV - alone_TV).abs().max() for found_TV, alone_TV in pairs]).max().item()

        return self._check(name, "logit", difference, self.reordered if reordered else self.tolerance)

    def _tokens(self, name: str, run: Callable[[], int]) -> Check:
        return self._check(name, "tokens", run, None if self.tolerance is None else 0.0)

    def _check(self, name: str, unit: str, run: Callable[[], float], tolerance: float | None) -> Check:
        try:
            with evaluating(self.network.modules()), torch.inference_mode():
                found = run()
        except QkvError as error:  # what a model refuses, by name
            return Check(name, unit, None, tolerance, f"refused: {error.what}")
        except Exception as error:  # a compiler may raise anything
            what = (str(error).strip().splitlines() or [""])[0]
            return Check(name, unit, None, tolerance, f"{type(error).__name__}: {what}", failed=True)
        if math.isnan(found):
            return Check(name, unit, None, tolerance, "not finite", failed=True)
        return Check(name, unit, found, tolerance)

    # --- ways of running --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _alone(self, probe: Probe) -> Tensor:
        with evaluating(self.network.modules()):
            found: Tensor = self.network(**probe.arguments(self.network))
        return found[0].float().cpu()

    def _batched(self) -> list[Tensor]:
        return self._cut(self.network(**together(self.probes, self.network)))

    def _in_chunks(self, sizes: Sequence[int]) -> list[Tensor]:
        found = []
        for probe in self.probes:
            given, cache = probe.arguments(self.network), self.network.new_cache(1)
            ids_1T, place = given.pop("ids"), 0
            parts: list[Tensor] = []
            while place < ids_1T.shape[1]:
                size = sizes[len(parts) % len(sizes)]
                if not parts:
                    size = max(size, probe.prefix)  # which sees itself, and so is read at once
                parts.append(self.network(ids_1T[:, place : place + size], cache=cache, **given))
                given, place = {}, place + size
            found.append(torch.cat(parts, 1)[0].float().cpu())
        return found

    def _cached_together(self) -> list[Tensor]:
        """All but the last token of each at once, padded, then the last ones together."""
        last = torch.cat([probe.ids[:, -1:] for probe in self.probes])
        some = [replace(probe, ids=probe.ids[:, :-1]) for probe in self.probes]
        cache = self.network.new_cache(len(some))
        before = self._cut(self.network(**together(some, self.network), cache=cache), shorter=1)
        device = next(self.network.parameters()).device
        after_R1V = self.network(last.to(device), cache=cache).float().cpu()
        return [torch.cat(pair) for pair in zip(before, after_R1V, strict=True)]

    def _cut(self, found: Tensor, shorter: int = 0) -> list[Tensor]:
        """The rows of a batch, each as long as it is alone (less `shorter`)."""
        rows = found.float().cpu()
        if rows.dim() == 2:
            return list(rows)
        return [row_TV[: len(alone_TV) - shorter] for row_TV, alone_TV in zip(rows, self.alone, strict=True)]

    def _by_kernel(self, name: KernelName) -> list[Tensor]:
        holders = [module for module in self.network.modules() if isinstance(getattr(module, "kernel", None), Kernel)]
        before = [module.kernel for module in holders]
        try:
            use_kernel(self.network, name)
            return self._batched()
        finally:
            for module, kernel in zip(holders, before, strict=True):
                module.kernel = kernel

    def _compiled(self) -> list[Tensor]:
        with _compiled_blocks(self.network):
            return self._batched()

    # --- texts ------------------------------------------------------------------------------------------------------

    def _decoding(self, some: Sequence[Probe], *, use_cache: bool) -> Decoding:
        given = together(some, self.network)
        return Decoding(
            self.network,
            [probe.ids[0].tolist() for probe in some],
            sampling=Sampling(temperature=0),
            seeds=[0] * len(some),
            max_new_tokens=NEW_TOKENS,
            eos_ids=self.eos_ids,
            use_cache=use_cache,
            source=given.get("source"),
            source_lengths=given.get("source_lengths"),
            vocab_size=None if self.tokenizer is None else self.tokenizer.vocab_size,
        )

    def _plainly(self) -> list[list[int]]:
        """The likeliest continuation of each sequence, alone and without a cache."""
        found = []
        for probe in self.probes:
            decoding = self._decoding([probe], use_cache=False)
            for _ in decoding:
                pass
            found += decoding.generated
        return found

    def _written(self) -> int:
        decoding = self._decoding(self.probes, use_cache=True)
        for _ in decoding:
            pass
        return sum(_distance(one, other) for one, other in zip(decoding.generated, self._plainly(), strict=True))

    def _streamed(self) -> int:
        """Tokens that differ; and a text that differs from that of its tokens counts as one."""
        differing = 0
        for probe, plain in zip(self.probes, self._plainly(), strict=True):
            decoding = self._decoding([probe], use_cache=True)
            stream = TextStream(Writing(decoding, self.tokenizer, (), [probe.ids.shape[1]]))
            text = "".join(stream)
            differing += _distance(decoding.generated[0], plain)
            if self.tokenizer is not None:
                shown = plain[:-1] if plain and plain[-1] in decoding.eos_ids else plain
                differing += text != self.tokenizer.decode(shown)
        return differing


def _distance(one: Sequence[int], other: Sequence[int]) -> int:
    """The tokens from the first that differs on."""
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return max(len(one), len(other)) - same


@contextmanager
def _compiled_blocks(network: Transformer) -> Iterator[None]:
    """Every layer compiled, for all lengths at once; afterwards none is."""
    blocks: list[Any] = [module for module in network.modules() if isinstance(module, Block)]
    try:
        for block in blocks:
            block.compile(dynamic=True)
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None

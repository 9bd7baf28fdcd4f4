"""How fast a model reads a prompt (prefill) and writes on (decode), beside what the machine itself reaches: plain
products of the same matrices, and reading as many bytes.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.config.stack import StackConfig
from qkv.evaluate.limits import count_products, count_reads, matrix_rate, memory_rate, peak_memory, seconds_of
from qkv.evaluate.probes import placed
from qkv.generate.arguments import check_count
from qkv.generate.decode import Decoding, device_of, evaluating, prefix_of
from qkv.generate.sampling import Sampling
from qkv.nn.cache import Cache
from qkv.nn.device import describe_device
from qkv.nn.kernels import kernels_of
from qkv.nn.quantized import QuantizedLinear
from qkv.nn.transformer import Transformer

PROMPT_TOKENS, NEW_TOKENS, TURNS = 512, 32, 5
"""What is measured where nothing else is asked for, or as much of it as the context allows."""

Tell = Callable[[str], None]


@dataclass
class Speed:
    """What was measured, turn by turn; None and empty where Ctrl-C came before.

    compute: how, and by which rules. batch_size: rows at once. prompt_tokens: of each row; of an encoder-decoder those
    of the source. seconds: of each turn. peak_memory: bytes that the process, or PyTorch on a GPU, held at most.
    """

    compute: tuple[str, ...]
    batch_size: int
    prompt_tokens: int
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    interrupted: bool = False


@dataclass
class PrefillSpeed(Speed):
    """Of reading prompts, up to the logits of what follows. flops: of a turn, what it multiplies, as `qkv show` counts.
    matrix_rate: FLOP/s of plain products of the same shapes, in the same precision."""

    flops: int | None = None
    matrix_rate: float | None = None

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each turn, all rows together."""
        return [self.batch_size * self.prompt_tokens / seconds for seconds in self.seconds]

    @property
    def flops_per_second(self) -> float | None:
        """The median of the turns."""
        return None if self.flops is None else self.flops / statistics.median(self.seconds)

    @property
    def ratio(self) -> float | None:
        """The share of the matrix rate that is reached."""
        if self.flops_per_second is None or self.matrix_rate is None:
            return None
        return self.flops_per_second / self.matrix_rate


@dataclass
class DecodeSpeed(Speed):
    """Of writing `new_tokens` in each row after the prompt, the likeliest ones.

    weight_bytes, cache_bytes: what the step in the middle of a turn reads of each. memory_rate: bytes/s at which this
    machine only reads as many bytes, again and again.
    """

    new_tokens: int = 0
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    memory_rate: float | None = None

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each turn, all rows together."""
        return [self.batch_size * self.new_tokens / seconds for seconds in self.seconds]

    @property
    def milliseconds_per_token(self) -> list[float]:
        """Of each turn: how long a row waits for its next token."""
        return [1e3 * seconds / self.new_tokens for seconds in self.seconds]

    @property
    def bytes_per_second(self) -> float | None:
        """The median of the turns."""
        if self.weight_bytes is None or self.cache_bytes is None:
            return None
        return 1e3 * (self.weight_bytes + self.cache_bytes) / statistics.median(self.milliseconds_per_token)

    @property
    def ratio(self) -> float | None:
        """The share of the memory rate that is reached."""
        if self.bytes_per_second is None or self.memory_rate is None:
            return None
        return self.bytes_per_second / self.memory_rate


def measure_prefill(
    network: Transformer,
    *,
    prompt_tokens: int | None = None,
    batch_size: int = 1,
    turns: int = TURNS,
    tell: Tell | None = None,
) -> PrefillSpeed:
    """Read random prompts, `turns` times after a first time that is not counted, and measure it.

    prompt_tokens None: PROMPT_TOKENS, or the whole context of a model with a shorter one. An encoder reads them whole;
    an encoder-decoder reads them as its source, and one token in its decoder. tell: hears how far it is. Ctrl-C ends
    the measuring, but not before a turn was measured.

    Raises UsageError for a prompt that does not fit.
    """
    tell = tell or (lambda text: None)
    check_count("batch_size", batch_size, 1)
    check_count("turns", turns, 1)
    stack = next(iter(network.config.stacks.values()))
    prompt = _Prompt(network, batch_size, _prompt_tokens(stack, prompt_tokens, stack.max_seq_len))
    device = device_of(network)
    speed = PrefillSpeed(_facts(network), batch_size, prompt.tokens)
    tell("; ".join(speed.compute))
    with _until_ctrl_c(speed), evaluating(network.modules()):
        with torch.inference_mode():
            prompt.read()
            for turn in range(turns):
                speed.seconds.append(seconds_of(prompt.read, device))
                speed.peak_memory = peak_memory(device)
                tell(f"turn {turn + 1:>3} of {turns}  {speed.tokens_per_second[-1]:,.0f} tokens/s")
        tell("counting and measuring products of matrices")
        counted = count_products(prompt.read)
        speed.flops = counted.flops
        speed.matrix_rate = matrix_rate(counted.products, next(network.parameters()).dtype, device)
    return speed


def measure_decode(
    network: Transformer,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    batch_size: int = 1,
    turns: int = TURNS,
    tell: Tell | None = None,
) -> DecodeSpeed:
    """Write on after random prompts as `qkv generate` does, `turns` times after a first time that is not counted, and
    measure it without the reading of the prompt.

    prompt_tokens, new_tokens None: PROMPT_TOKENS and NEW_TOKENS, or less where the context is shorter. The source of an
    encoder-decoder is its prompt. tell: hears how far it is. Ctrl-C ends the measuring, but not before a turn was
    measured.

    Raises UsageError for a model that does not write, and for lengths that do not fit.
    """
    tell = tell or (lambda text: None)
    check_count("batch_size", batch_size, 1)
    check_count("turns", turns, 1)
    head = network.config.head
    if network.decoder is None or head is None or not head.predicts_tokens:
        raise UsageError(
            f"a model of family {network.config.family} with a head of kind {head.kind if head else 'none'} does not "
            "decode",
            hint="prefill, which every model does",
        )
    context, stack = network.decoder.config.max_seq_len, next(iter(network.config.stacks.values()))
    new_tokens = _new_tokens(context, new_tokens)
    # the last new token of a turn is not read, and the first one is the prefill's
    room = stack.max_seq_len if network.encoder is not None else context - new_tokens - 1
    prompt = _Prompt(network, batch_size, _prompt_tokens(stack, prompt_tokens, room))
    device = device_of(network)
    speed = DecodeSpeed(_facts(network), batch_size, prompt.tokens, new_tokens=new_tokens)
    tell("; ".join(speed.compute))
    with _until_ctrl_c(speed):
        for turn in range(turns + 1):
            steps = prompt.steps(new_tokens)
            next(steps)
            seconds = seconds_of(lambda steps=steps: deque(steps, maxlen=0), device)  # type: ignore[misc]
            if turn:
                speed.seconds.append(seconds)
                speed.peak_memory = peak_memory(device)
                tell(f"turn {turn:>3} of {turns}  {speed.tokens_per_second[-1]:,.1f} tokens/s")
        tell("counting bytes and measuring how fast they are only read")
        with evaluating(network.modules()):
            speed.weight_bytes, speed.cache_bytes = prompt.bytes_of_step(new_tokens // 2)
        speed.memory_rate = memory_rate(speed.weight_bytes + speed.cache_bytes, device)
    return speed


@contextmanager
def _until_ctrl_c(speed: Speed) -> Iterator[None]:
    """What was measured until Ctrl-C is kept, where there is something."""
    try:
        yield
    except KeyboardInterrupt:
        if not speed.seconds:
            raise
        speed.interrupted = True


def _facts(network: Transformer) -> tuple[str, ...]:
    """Where and how it computes."""
    parameter = next(network.parameters())
    kinds = sorted({module.kind for module in network.modules() if isinstance(module, QuantizedLinear)})
    facts = [describe_device(parameter.device), str(parameter.dtype).removeprefix("torch.")]
    if kinds:
        facts[-1] += f" and blocks of {', '.join(kinds)}"
    if kernels := kernels_of(network):
        facts.append(f"attention by {', '.join(kernels)}")
    return tuple(facts)


# --- prompts ----------------------------------------------------------------------------------------------------------


def _prompt_tokens(stack: StackConfig, asked: int | None, room: int) -> int:
    """How many tokens are read. Raises UsageError where there is no room for what is asked for."""
    fixed = stack.input.fixed_length
    if asked is None:
        return fixed or min(PROMPT_TOKENS, room)
    check_count("prompt_tokens", asked, 1)
    if fixed is not None and asked != fixed:
        raise UsageError(f"{stack.input.reads} are read whole, as {fixed} tokens, not {asked}")
    if asked > room:
        less = "" if room == stack.max_seq_len else f", which leaves room for {room} beside the new ones"
        raise UsageError(
            f"prompts of {asked} tokens do not fit the model's context of {stack.max_seq_len}{less}",
            hint="fewer tokens",
        )
    return asked


def _new_tokens(context: int, asked: int | None) -> int:
    """How many tokens are written, with room for a prompt of one and for the token that the prefill gives."""
    if context < 3:
        raise UsageError(f"a context of {context} has no room for a prompt and two new tokens")
    if asked is None:
        return min(NEW_TOKENS, max(1, context // 2 - 1))
    check_count("new_tokens", asked, 1)
    if asked > context - 2:
        raise UsageError(
            f"{asked} new tokens do not fit the model's context of {context} behind a prompt", hint="fewer tokens"
        )
    return asked


class _Prompt:
    """Random prompts, all of `tokens` tokens, and a network that reads them; with an encoder they are its input, and
    what a decoder starts from is one token."""

    def __init__(self, network: Transformer, rows: int, tokens: int) -> None:
        self.network, self.tokens = network, tokens
        generator = torch.Generator().manual_seed(0)
        stacks = network.config.stacks
        self.inputs = placed(_random_inputs(next(iter(stacks.values())), rows, tokens, generator), network)
        self.source = self.inputs if len(stacks) == 2 else None
        self.ids_BT = self.inputs
        if self.source is not None:
            self.ids_BT = placed(_random_inputs(stacks["decoder"], rows, 1, generator), network)

    def read(self) -> Cache | None:
        """One pass over the prompts, up to the last logits; into a new cache, where the model has one."""
        return self._read(self.ids_BT)

    def _read(self, ids_BT: Tensor) -> Cache | None:
        cache = None if self.network.decoder is None else self.network.new_cache(len(ids_BT))
        given: dict[str, Any] = {} if self.source is None else {"source": self.source}
        if self.network.config.prefix:
            given |= prefix_of(self.network, self.ids_BT.tolist())
        self.network(ids_BT, cache=cache, logits="last", **given)
        return cache

    def steps(self, new_tokens: int) -> Iterator[None]:
        """The prefill, which gives each row a token, and then `new_tokens` times the next token of each."""
        rows = len(self.ids_BT)
        tokens = iter(
            Decoding(
                self.network,
                self.ids_BT.tolist(),
                sampling=Sampling(temperature=0),
                seeds=[0] * rows,
                max_new_tokens=new_tokens + 1,
                source=self.source,
            )
        )
        for _ in range(new_tokens + 1):
            deque(itertools.islice(tokens, rows), maxlen=0)
            yield

    @torch.no_grad()
    def bytes_of_step(self, behind: int) -> tuple[int, int]:
        """The bytes of weights and of the cache that a step reads, `behind` steps after the prompt."""
        last_B1 = self.ids_BT[:, -1:]
        cache = self._read(torch.cat((self.ids_BT, last_B1.expand(-1, behind)), 1))
        assert cache is not None
        self.network(last_B1, cache=cache, logits="last")  # memory that is full grows here
        weights, held = count_reads(
            lambda: self.network(last_B1, cache=cache, logits="last"),
            lambda: ([*self.network.parameters(), *self.network.buffers()], _held(cache)),
        )
        return weights, held


def _held(cache: Cache) -> Iterator[Tensor]:
    """The tensors of a cache."""
    for layer in (*cache.layers, *cache.cross):
        for held in () if layer is None else (layer.k_BGSD, layer.v_BGSD):
            if held is not None:
                yield held


def _random_inputs(stack: StackConfig, rows: int, tokens: int, generator: torch.Generator) -> Tensor:
    """What a stack reads: ids, or other inputs that become so many tokens."""
    reads = stack.input
    if reads.reads_ids:
        return torch.randint(stack.vocab_size or 1, (rows, tokens), generator=generator)
    size = next(size for size in itertools.count(1) if reads.length(size) == tokens)
    _, *axes = reads.axes
    return torch.randn(rows, *(size if isinstance(axis, str) else axis for axis in axes), generator=generator)

"""One text for each prompt: drawn token by token, or the likeliest that beams find."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Unpack

from torch import Tensor

from qkv.config.errors import UsageError
from qkv.generate.arguments import check_flag
from qkv.generate.beam import Beams, beam_search, check_beside_beams
from qkv.generate.decode import Decoding
from qkv.generate.options import Options
from qkv.generate.prompts import Prompt
from qkv.generate.reader import Reader
from qkv.generate.sampling import MAX_SEED, Sampling
from qkv.generate.scoring import prompt_logprobs
from qkv.generate.stopping import StopStrings
from qkv.generate.text import Generation, Writing, text_of


def write(
    reader: Reader,
    prompts: Sequence[Prompt] | Tensor,
    num_samples: int = 1,
    *,
    ends: Sequence[int] = (),
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] | None = None,
    use_cache: bool = True,
    logprobs: int = 0,
    parse_special: bool = False,
    **sampling: Any,
) -> tuple[Writing, list[list[int]]]:
    """What is about to be written, and the ids that each row starts from. ends: ids that end it beside EOS. The others:
    `qkv.generate.options.Options`."""
    chosen = Sampling(**sampling)
    check_flag("use_cache", use_cache)
    check_flag("parse_special", parse_special)
    StopStrings(stop)
    if stop and reader.tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot look for stop strings")
    seeds = [(first + n) & MAX_SEED for first in _seeds(seed, len(prompts)) for n in range(num_samples)]
    rows, source, lengths_B, prompt_tokens = reader.prompts(prompts, parse_special=parse_special)
    if source is not None:
        source = source.repeat_interleave(num_samples, 0)
        lengths_B = None if lengths_B is None else lengths_B.repeat_interleave(num_samples, 0)
    rows = [row for row in rows for _ in range(num_samples)]
    decoding = Decoding(
        reader.network,
        rows,
        sampling=chosen,
        seeds=seeds,
        max_new_tokens=max_new_tokens,
        eos_ids=[*reader.eos_ids, *ends],
        use_cache=use_cache,
        logprobs=logprobs,
        source=source,
        source_lengths=lengths_B,
        vocab_size=reader.vocab_size,
        suppress=reader.suppression,
    )
    counts = [count for count in prompt_tokens for _ in range(num_samples)]
    return Writing(decoding, reader.tokenizer, stop, counts), rows


def generations(
    reader: Reader, prompts: Sequence[Prompt] | Tensor, num_samples: int = 1, **options: Unpack[Options]
) -> list[Any]:
    """What is written of each prompt, a `Generation`; of more than one sample a list of so many."""
    writing, rows = write(reader, prompts, num_samples, **options)
    for _ in writing:
        pass
    found = writing.generations
    count = options.get("logprobs", 0)
    if count and options.get("max_new_tokens") == 0 and reader.network.encoder is None:
        found = [
            replace(one, prompt_logprobs=prompt_logprobs(reader.network, reader.tokenizer, ids, count))
            for one, ids in zip(found, rows, strict=True)
        ]
    if num_samples == 1:
        return found
    return [found[first : first + num_samples] for first in range(0, len(found), num_samples)]


def search(
    reader: Reader,
    prompts: Sequence[Prompt] | Tensor,
    beams: Beams,
    *,
    max_new_tokens: int = 128,
    seed: int | Sequence[int] | None = None,
    use_cache: bool = True,
    parse_special: bool = False,
    **others: Any,
) -> list[Generation]:
    """The best hypothesis for each prompt. Raises UsageError for options that are said of single tokens."""
    started = time.perf_counter()
    check_beside_beams(others)
    check_flag("use_cache", use_cache)
    check_flag("parse_special", parse_special)
    _seeds(seed, len(prompts))  # of no use here, but what is no seed is refused
    rows, source, lengths_B, prompt_tokens = reader.prompts(prompts, parse_special=parse_special)
    found = beam_search(
        reader.network,
        rows,
        beams,
        max_new_tokens=max_new_tokens,
        eos_ids=reader.eos_ids,
        use_cache=use_cache,
        source=source,
        source_lengths=lengths_B,
        vocab_size=reader.vocab_size,
        suppress=reader.suppression,
    )
    seconds = time.perf_counter() - started
    generations = []
    for (best, *_), count in zip(found, prompt_tokens, strict=True):
        ids, length = best.token_ids, len(best.token_ids)
        text = text_of(ids, reader.tokenizer, reader.eos_ids)
        generations.append(Generation(text, ids, count, length, best.finish_reason, seconds, length / seconds))
    return generations


def _seeds(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One seed per prompt."""
    if seed is None:
        return [secrets.randbits(64) for _ in range(count)]
    seeds = list(seed) if isinstance(seed, Sequence) and not isinstance(seed, str | bytes) else [seed] * count
    if len(seeds) != count:
        raise UsageError(f"there are {len(seeds)} seeds for {count} prompts", hint="one seed, or one per prompt")
    for number in seeds:
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= int(number) <= MAX_SEED:
            raise UsageError(f"a seed is a whole number from 0 to 2^64 - 1, not {number!r}")
    return [int(number) for number in seeds]

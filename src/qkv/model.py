"""`Model` and `load`: what people hold."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from qkv.checkpoint.store import load_checkpoint, save_checkpoint
from qkv.config.errors import UsageError
from qkv.config.parts import FeatureInputConfig, TokenInputConfig
from qkv.config.run import Config
from qkv.generate.arguments import check_count, check_flag, check_names
from qkv.generate.decode import Decoding, check_ids, check_prompts, pad
from qkv.generate.masked import Candidate, fill_mask
from qkv.generate.prompts import Prompt, begin_of, end_of, is_one, listed, prompt_ids, whole_ids
from qkv.generate.sampling import MAX_SEED, Sampling
from qkv.generate.scoring import Score, prompt_logprobs, score
from qkv.generate.stopping import StopStrings
from qkv.generate.text import TextStream, Writing
from qkv.nn.device import choose_device, choose_dtype
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer


class Options(TypedDict, total=False):
    """How to generate; what is left out has the default given here.

    max_new_tokens: at most so many (128); the context ends a text earlier. temperature (1.0), top_k (0), top_p (1.0),
    min_p (0.0), repetition_penalty (1.0), frequency_penalty (0.0), presence_penalty (0.0): see
    `qkv.generate.Sampling`. stop: a string or several, before which the text ends. seed: one, or one per prompt; by
    default fresh. use_cache (True): False reads the whole text again for every token, with the same result.
    logprobs (0): so many alternatives per token, with log-probabilities. parse_special (False): special tokens spelled
    in the prompt are meant.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str]
    seed: int | Sequence[int] | None
    use_cache: bool
    logprobs: int
    parse_special: bool


class Model:
    """A network with its tokenizer (None: it has none, and speaks in ids) and configuration. Made by `load`."""

    def __init__(self, network: Transformer, tokenizer: Tokenizer | None, config: Config) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.config = config

    def __repr__(self) -> str:
        parameter = next(self.network.parameters())
        count = sum(p.numel() for p in self.network.parameters())
        where = f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
        return f"Model({self.network.config.family}, {count:,} parameters, {where}, {self.tokenizer!r})"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint that `load` reads. Raises ConflictError where `folder` exists."""
        config = self.config.model_copy(update={"model": self.network.config})
        save_checkpoint(Path(folder), self.network, config, self.tokenizer)

    # --- generating ---------------------------------------------------------------------------------------------------

    def generate(self, prompt: Any, *, num_samples: int = 1, **options: Unpack[Options]) -> Any:
        """Continue `prompt`, or decode from it as the source of an encoder-decoder: a `Generation`.

        prompt: a text or a list of ids; a list of these gives a list; features [B, S, W] of an encoder-decoder give a
        list, and an empty list an empty one. Texts of a decoder start with exactly one BOS, where the tokenizer has
        one. num_samples above 1 gives a list of so many in place of each one; sample i is what seed + i gives alone.
        The options: `Options`.

        The result of a prompt does not depend on the other prompts. Raises UsageError for what cannot be meant or does
        not fit the context; the overflow rule: a text ends ("length") when prompt and new tokens fill `max_seq_len`.
        """
        check_names(options, [*Options.__annotations__, "num_samples"])
        num_samples = check_count("num_samples", num_samples, least=1)
        features = isinstance(prompt, Tensor) and prompt.is_floating_point()
        if not features:
            prompt = listed(prompt)
        single = not features and is_one(prompt)
        prompts = [prompt] if single else prompt
        writing, rows = self._write(prompts, num_samples, **options)
        for _ in writing:
            pass
        results: list[Any] = writing.generations
        count = options.get("logprobs", 0)
        if count and options.get("max_new_tokens") == 0 and self.network.encoder is None:
            results = [
                replace(result, prompt_logprobs=prompt_logprobs(self.network, self.tokenizer, ids, count))
                for result, ids in zip(results, rows, strict=True)
            ]
        if num_samples > 1:
            results = [results[first : first + num_samples] for first in range(0, len(results), num_samples)]
        return results[0] if single else results

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> TextStream:
        """Pieces of text as they become certain; joined, they are the text of `generate` with the same `Options`."""
        check_names(options, Options.__annotations__)
        prompt = listed(prompt)
        if not is_one(prompt):
            raise UsageError("one prompt is streamed at a time", hint="generate, or one stream per prompt")
        return TextStream(self._write([prompt], 1, **options)[0])

    def _write(
        self,
        prompts: Sequence[Prompt] | Tensor,
        num_samples: int,
        *,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] = (),
        seed: int | Sequence[int] | None = None,
        use_cache: bool = True,
        logprobs: int = 0,
        parse_special: bool = False,
        **sampling: Any,
    ) -> tuple[Writing, list[list[int]]]:
        """What is about to be written, and the ids that each row starts from."""
        check_prompts(self.network, [])
        chosen = Sampling(**sampling)
        check_flag("use_cache", use_cache)
        check_flag("parse_special", parse_special)
        StopStrings(stop)
        if stop and self.tokenizer is None:
            raise UsageError("the model has no tokenizer, so it cannot look for stop strings")
        seeds = [(first + n) & MAX_SEED for first in _seeds(seed, len(prompts)) for n in range(num_samples)]
        source = lengths_B = None
        if self.network.encoder is None:
            if isinstance(prompts, Tensor):
                raise UsageError(
                    f"a tensor of {prompts.dtype} is no prompt: ids are whole numbers, and features are for an "
                    "encoder-decoder"
                )
            rows = [
                prompt_ids(self.tokenizer, prompt, parse_special=parse_special, where=f"prompt {number}")
                for number, prompt in enumerate(prompts)
            ]
            prompt_tokens = [len(row) for row in rows]
        else:
            source, lengths_B, prompt_tokens = self._read_sources(prompts, parse_special)
            rows = [self._start()] * len(prompt_tokens)
            source = source.repeat_interleave(num_samples, 0)
            lengths_B = None if lengths_B is None else lengths_B.repeat_interleave(num_samples, 0)
        rows = [row for row in rows for _ in range(num_samples)]
        decoding = Decoding(
            self.network,
            rows,
            sampling=chosen,
            seeds=seeds,
            max_new_tokens=max_new_tokens,
            eos_ids=end_of(self.tokenizer),
            use_cache=use_cache,
            logprobs=logprobs,
            source=source,
            source_lengths=lengths_B,
            vocab_size=None if self.tokenizer is None else self.tokenizer.vocab_size,
        )
        counts = [count for count in prompt_tokens for _ in range(num_samples)]
        return Writing(decoding, self.tokenizer, stop, counts), rows

    def _start(self) -> list[int]:
        """What the decoder of an encoder-decoder starts from."""
        start = begin_of(self.tokenizer)
        if not start:
            raise UsageError(
                "the decoder starts from BOS, and the model's tokenizer has none",
                hint="qkv.generate.Decoding with prompts=[[start_id]]",
            )
        return start

    def _read_sources(
        self, sources: Sequence[Prompt] | Tensor, parse_special: bool = False
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """What the encoder reads, [B, S] ids or [B, S, W] features, lengths [B] (None: all whole), and the counts."""
        parameter = next(self.network.parameters())
        assert self.network.encoder is not None
        reads = self.network.encoder.config.input
        if isinstance(sources, Tensor):
            if isinstance(reads, TokenInputConfig) or sources.dim() != 3:
                wanted = "ids" if isinstance(reads, TokenInputConfig) else "features [B, S, W]"
                raise UsageError(f"the encoder reads {wanted}, not a tensor {list(sources.shape)} of {sources.dtype}")
            return sources.to(parameter.device, parameter.dtype), None, [sources.shape[1]] * len(sources)
        if isinstance(reads, FeatureInputConfig) and len(sources):
            raise UsageError("the encoder reads features, not texts or ids", hint="a float tensor [B, S, W]")
        rows = [
            whole_ids(self.tokenizer, source, parse_special=parse_special, where=f"source {number}")
            for number, source in enumerate(sources)
        ]
        for number, row in enumerate(rows):
            if not row:
                raise UsageError(f"source {number} is empty: there is nothing to read")
            check_ids(row, self.network.encoder.config.vocab_size, f"source {number}")
        ids_BS, lengths_B = pad(rows, parameter.device)
        return ids_BS, lengths_B, [len(row) for row in rows]

    # --- judging ------------------------------------------------------------------------------------------------------

    def score(self, prompt: str, continuation: str) -> Score:
        """log p(continuation | prompt) in nats: a float with `token_ids` and `logprobs`; see `qkv.generate.score`.

        Of an encoder-decoder, `prompt` is the source.
        """
        if self.network.encoder is None or self.network.decoder is None:
            return score(self.network, self.tokenizer, prompt, continuation)
        source, _, _ = self._read_sources([prompt])
        return score(self.network, self.tokenizer, "", continuation, source=source)

    def fill_mask(self, text: str | Sequence[str], *, top: int = 5) -> Any:
        """The `top` most likely tokens for a masked place, `[MASK]` or `<mask>`: a list of `Candidate`, best first.

        A text with several masks gives one such list for each; a list of texts gives a list. Raises UsageError for a
        text without a mask and for models that fill none.
        """
        check_count("top", top)
        if not isinstance(text, str):
            if not isinstance(text, Sequence) or not all(isinstance(one, str) for one in text):
                raise UsageError(f"fill_mask reads a text or a list of texts, not {text!r}")
            return [self.fill_mask(one, top=top) for one in text]
        found: list[list[Candidate]] = fill_mask(self.network, self.tokenizer, text, top)
        return found[0] if len(found) == 1 else found


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    allow: Sequence[str] = (),
) -> Model:
    """The model in a checkpoint folder, or the best one of a run folder, ready to use.

    device: auto, cpu, cuda, mps (see `qkv.nn.device`). dtype: fp32, bf16, or auto: float32, but bfloat16 on a GPU that
    multiplies it. allow: packages whose code the configuration may use; by default a model folder runs none.

    Raises NotFoundError, UsageError for what is not supported, and QkvError for what is damaged. Nothing is downloaded.
    """
    path = Path(path)
    supported = "a checkpoint folder or run folder of qkv"
    if quantize is not None:
        raise UsageError(f"quantize={quantize} is not supported yet", hint="dtype=bf16, which halves the memory")
    if path.is_file():
        kind = "GGUF files are" if path.suffix == ".gguf" else "a single file is"
        raise UsageError(f"{kind} not supported yet as a model", where=str(path), hint=supported)
    if (path / "config.json").is_file() and not (path / "state.json").is_file():
        raise UsageError("Hugging Face folders are not supported yet", where=str(path), hint=supported)
    chosen = choose_device(device)
    precision = torch.float32 if dtype == "auto" and chosen.type != "cuda" else choose_dtype(dtype, chosen)
    loaded = load_checkpoint(path, allow=(allow,) if isinstance(allow, str) else tuple(allow))
    return Model(loaded.network.to(chosen, precision).eval(), loaded.tokenizer, loaded.config)


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

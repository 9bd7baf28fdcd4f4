"""`Model` and `load`: what people hold."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import tee
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.checkpoint.load import load_model
from qkv.checkpoint.save_hf import save_hf
from qkv.checkpoint.store import Pooling, save_checkpoint
from qkv.config.errors import QkvError, UsageError
from qkv.config.run import Config
from qkv.data.audio import SAMPLE_RATE
from qkv.generate.arguments import check_count, check_flag, check_names
from qkv.generate.beam import Beams, beam_search, check_beside_beams
from qkv.generate.caption import Caption, check_captions
from qkv.generate.chat import MAX_NEW_TOKENS, chat_ids
from qkv.generate.classify import class_labels, classify, classify_features
from qkv.generate.decode import Decoding, check_ids, check_prompts, pad
from qkv.generate.embed import PoolingKind, check_embeds, embed
from qkv.generate.masked import Candidate, fill_mask
from qkv.generate.media import features_of, is_one_file
from qkv.generate.prompts import Prompt, begin_of, end_of, is_one, listed, prompt_ids, whole_ids
from qkv.generate.sampling import MAX_SEED, Sampling
from qkv.generate.scoring import Score, prompt_logprobs, score
from qkv.generate.stopping import StopStrings
from qkv.generate.suppression import Suppression
from qkv.generate.text import Generation, TextStream, Writing, text_of
from qkv.generate.transcribe import (
    Segment,
    Transcription,
    TranscriptPrompt,
    check_transcribes,
    samples_of,
    transcribe,
    transcript_prompt,
)
from qkv.generate.translate import Translation, check_translates, translate, written
from qkv.inspect.attention import Alignment, alignment, attention_of_text
from qkv.nn.device import choose_device, choose_dtype
from qkv.nn.quantized import QuantizedLinear
from qkv.nn.resize import for_image_size
from qkv.nn.transformer import Transformer
from qkv.tokenizer.chat import ChatTemplate, Message
from qkv.tokenizer.tokenizer import Tokenizer

_WRITES = {"log-mel": "transcribe", "patches": "caption"}
"""What writes down what the encoder reads, where that is a file of another kind."""


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


class ChatOptions(Options, total=False):
    """How to answer: `Options`, but for `parse_special`; max_new_tokens is 512 where it is left out.

    template: a `ChatTemplate` in place of the tokenizer's own. variables: what it reads beside the messages, such as
    {"tools": [...]} or {"enable_thinking": False}.
    """

    template: ChatTemplate | None
    variables: Mapping[str, Any] | None


class TranslationOptions(TypedDict, total=False):
    """How to translate; what is left out has the default given here.

    beam_size (4), n_best (1), length_penalty (0.6), length_penalty_kind ("gnmt"): see `qkv.generate.Beams`. batch_size
    (32): so many sources are decoded at once. max_new_tokens: by default twice the source's tokens and 16 more; the
    context may end a text earlier.
    """

    beam_size: int
    n_best: int
    length_penalty: float
    length_penalty_kind: Literal["gnmt", "power"]
    batch_size: int
    max_new_tokens: int | None


class SpeechOptions(TypedDict, total=False):
    """How to transcribe; what is left out has the default given here.

    language: its code, such as "en" (None: the likeliest for the first window), and task: "transcribe", or "translate"
    into English, for models that know several. beam_size: 1. batch_size (4): so many windows are decoded at once.
    max_new_tokens: of a window (None: half of what the decoder can hold).
    """

    language: str | None
    task: Literal["transcribe", "translate"]
    beam_size: int
    batch_size: int
    max_new_tokens: int | None


class Model:
    """A network with its tokenizer (None: it has none, and speaks in ids) and configuration. Made by `load`.

    source_tokenizer: of what an encoder-decoder reads, where that is not `tokenizer` too. pooling: how `embed` makes a
    text's vector, where the model was made with such a rule.
    """

    def __init__(
        self,
        network: Transformer,
        tokenizer: Tokenizer | None,
        config: Config,
        source_tokenizer: Tokenizer | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.config = config
        self.pooling = pooling
        self.source_tokenizer = source_tokenizer or tokenizer

    def __repr__(self) -> str:
        parameter = next(self.network.parameters())
        blocks = [module for module in self.network.modules() if isinstance(module, QuantizedLinear)]
        count = sum(p.numel() for p in self.network.parameters())
        where = f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
        if blocks:
            held = sum(p.nbytes for p in [*self.network.parameters(), *self.network.buffers()])
            count += sum(module.in_features * module.out_features for module in blocks)
            where = f"{where} and {blocks[0].kind} blocks, {held / 1e6:,.0f} MB"
        return f"Model({self.network.config.family}, {count:,} parameters, {where}, {self.tokenizer!r})"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint that `load` reads. Raises ConflictError where `folder` exists."""
        save_checkpoint(
            Path(folder),
            self.network,
            self._own_config,
            self.tokenizer,
            source_tokenizer=self._own_source_tokenizer,
            pooling=self.pooling,
        )

    def save_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that `transformers` (and `load`) reads, where a published architecture is this very model.

        Raises ConflictError where `folder` exists, and UsageError that names the first key in which the model differs
        from the nearest architecture.
        """
        save_hf(
            Path(folder),
            self.network,
            self._own_config,
            self.tokenizer,
            source_tokenizer=self._own_source_tokenizer,
            pooling=self.pooling,
        )

    @property
    def _own_config(self) -> Config:
        return self.config.model_copy(update={"model": self.network.config})

    @property
    def _own_source_tokenizer(self) -> Tokenizer | None:
        """That of the sources, where it is another one."""
        return None if self.source_tokenizer is self.tokenizer else self.source_tokenizer

    # --- generating ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        *,
        num_samples: int = 1,
        beam_size: int = 1,
        length_penalty: float = 0.6,
        length_penalty_kind: Literal["gnmt", "power"] = "gnmt",
        **options: Unpack[Options],
    ) -> Any:
        """Continue `prompt`, or decode from it as the source of an encoder-decoder: a `Generation`.

        prompt: a text or a list of ids; a list of these gives a list; features [B, S, W] of an encoder-decoder give a
        list, and an empty list an empty one. Texts of a decoder start with exactly one BOS, where the tokenizer has
        one. num_samples above 1 gives a list of so many in place of each one; sample i is what seed + i gives alone.
        The options: `Options`. beam_size above 1 searches for the likeliest text instead (see `qkv.generate.Beams`):
        nothing is drawn, and options that change or look at single tokens are refused.

        The result of a prompt does not depend on the other prompts. Raises UsageError for what cannot be meant or does
        not fit the context; the overflow rule: a text ends ("length") when prompt and new tokens fill `max_seq_len`.
        """
        others = ("num_samples", "beam_size", "length_penalty", "length_penalty_kind")
        check_names(options, [*Options.__annotations__, *others])
        num_samples = check_count("num_samples", num_samples, least=1)
        beams = Beams(beam_size, 1, length_penalty, length_penalty_kind)
        features = isinstance(prompt, Tensor) and prompt.is_floating_point()
        if not features:
            prompt = listed(prompt)
        single = not features and is_one(prompt)
        prompts = [prompt] if single else prompt
        if beams.beam_size > 1:
            found = self._search(prompts, beams, num_samples=num_samples, **options)
            return found[0] if single else found
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

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Generation:
        """The answer to a conversation, [{"role": "user", "content": "..."}, ...]: a `Generation`.

        The messages become text by the chat template; special tokens that they spell are ordinary text. The answer ends
        with the template's end of a turn, or where any text ends. The options: `ChatOptions`. Raises UsageError for
        what cannot be meant, a model without a template, and a conversation longer than the context.
        """
        stream = self.chat_stream(messages, **options)
        for _ in stream:
            pass
        assert stream.generation is not None
        return stream.generation

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> TextStream:
        """Pieces of the answer as they become certain; joined, they are the text of `chat` with the same options."""
        check_names(options, [name for name in ChatOptions.__annotations__ if name != "parse_special"])
        template = options.pop("template", None)
        ids = chat_ids(self.tokenizer, messages, template, options.pop("variables", None))
        assert self.tokenizer is not None
        end = self.tokenizer.end_of_turn(template)
        given: Any = {"max_new_tokens": MAX_NEW_TOKENS, **options}
        return TextStream(self._write([ids], 1, ends=[] if end is None else [end], **given)[0])

    def _write(
        self,
        prompts: Sequence[Prompt] | Tensor,
        num_samples: int,
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
        """What is about to be written, and the ids that each row starts from."""
        chosen = Sampling(**sampling)
        check_flag("use_cache", use_cache)
        StopStrings(stop)
        if stop and self.tokenizer is None:
            raise UsageError("the model has no tokenizer, so it cannot look for stop strings")
        seeds = [(first + n) & MAX_SEED for first in _seeds(seed, len(prompts)) for n in range(num_samples)]
        rows, source, lengths_B, prompt_tokens = self._read_prompts(prompts, parse_special)
        if source is not None:
            source = source.repeat_interleave(num_samples, 0)
            lengths_B = None if lengths_B is None else lengths_B.repeat_interleave(num_samples, 0)
        rows = [row for row in rows for _ in range(num_samples)]
        decoding = Decoding(
            self.network,
            rows,
            sampling=chosen,
            seeds=seeds,
            max_new_tokens=max_new_tokens,
            eos_ids=[*self.eos_ids, *ends],
            use_cache=use_cache,
            logprobs=logprobs,
            source=source,
            source_lengths=lengths_B,
            vocab_size=self._vocab_size,
            suppress=self._suppression,
        )
        counts = [count for count in prompt_tokens for _ in range(num_samples)]
        return Writing(decoding, self.tokenizer, stop, counts), rows

    def _search(
        self,
        prompts: Sequence[Prompt] | Tensor,
        beams: Beams,
        *,
        max_new_tokens: int = 128,
        seed: int | Sequence[int] | None = None,
        use_cache: bool = True,
        parse_special: bool = False,
        **others: Any,
    ) -> list[Generation]:
        """The best hypothesis for each prompt."""
        started = time.perf_counter()
        check_beside_beams(others)
        check_flag("use_cache", use_cache)
        _seeds(seed, len(prompts))  # of no use here, but what is no seed is refused
        rows, source, lengths_B, prompt_tokens = self._read_prompts(prompts, parse_special)
        found = beam_search(
            self.network,
            rows,
            beams,
            max_new_tokens=max_new_tokens,
            eos_ids=self.eos_ids,
            use_cache=use_cache,
            source=source,
            source_lengths=lengths_B,
            vocab_size=self._vocab_size,
            suppress=self._suppression,
        )
        seconds = time.perf_counter() - started
        generations = []
        for (best, *_), count in zip(found, prompt_tokens, strict=True):
            ids, length = best.token_ids, len(best.token_ids)
            text = text_of(ids, self.tokenizer, self.eos_ids)
            generations.append(Generation(text, ids, count, length, best.finish_reason, seconds, length / seconds))
        return generations

    def translate(self, text: Any, **options: Unpack[TranslationOptions]) -> Any:
        """What an encoder-decoder makes of the source `text`: a `Translation`.

        text: a text or a list of ids; a list of these gives a list, and so do features [B, S, W]. A blank text gives an
        empty translation, for which the model does not run. The options: `TranslationOptions`.

        A translation does not depend on the other texts. Raises UsageError, before the model runs, for what cannot be
        meant and for a text longer than the encoder's context.
        """
        check_translates(self.network)
        if isinstance(text, Tensor) and text.is_floating_point():
            return list(self._translate(self._read_sources(text)[0], options))
        text = listed(text)
        texts = [text] if is_one(text) else text
        sources = [self._source_line(one, f"source {number}") for number, one in enumerate(texts)]
        found = list(self._translate(sources, options))
        return found[0] if is_one(text) else found

    def translate_stream(self, lines: Iterable[str], **options: Unpack[TranslationOptions]) -> Iterator[Translation]:
        """As `translate`, for any number of lines, in order: a few batches are read ahead, with batch_size=1 nothing.

        What is wrong with a line is a QkvError with its number, from 1, after the translations of the lines before it.
        """
        check_translates(self.network)
        if isinstance(lines, str):
            raise UsageError("one text is no stream of lines", hint="translate, or a list of texts")
        wrong: list[QkvError] = []

        def sources() -> Iterator[list[int]]:
            try:
                for number, line in enumerate(lines, 1):
                    yield self._source_line(line, f"line {number}")
            except QkvError as error:
                wrong.append(QkvError(error.what, where=error.where, hint=error.hint))

        def translations(found: Iterator[Translation]) -> Iterator[Translation]:
            yield from found
            if wrong:
                raise wrong[0]

        return translations(self._translate(sources(), options))

    def caption(self, image: Any, **options: Unpack[TranslationOptions]) -> Any:
        """What is written of an image: a `Caption`.

        image: a file, or a float tensor [C, H, W] as the encoder reads it; a list of these, or a tensor [B, C, H, W],
        gives a list. The options: `TranslationOptions`. A caption does not depend on the other images. Raises
        UsageError for models that caption no images.
        """
        check_captions(self.network)
        assert self.network.encoder is not None
        single = is_one_file(image, self.network.encoder.config)
        images = features_of([image] if single else image, self.network.encoder.config, self.config)
        captions = [Caption(**vars(found.hypotheses[0])) for found in self._translate(images, options)]
        return captions[0] if single else captions

    def transcribe(self, audio: Any, *, rate: int = SAMPLE_RATE, **options: Unpack[SpeechOptions]) -> Transcription:
        """What is said in a recording: a WAV file, or an array of floats (1.0: full scale) of `rate` samples a second.

        The options: `SpeechOptions`. A recording longer than the model reads at once (Whisper: 30 s) is cut into
        windows, one after the other without overlap, each at the quietest moment of the last sixth of what fits. A
        window's text does not depend on the other windows. Raises UsageError for models that are not for speech.
        """
        wave_N = samples_of(audio, rate)
        prompt = self._transcript_prompt(wave_N, options)
        segments = list(self._transcribe(wave_N, prompt, options))
        text = "".join(segment.text for segment in segments).strip()
        return Transcription(text, prompt.language, len(wave_N) / SAMPLE_RATE, segments)

    def transcribe_stream(
        self, audio: Any, *, rate: int = SAMPLE_RATE, **options: Unpack[SpeechOptions]
    ) -> Iterator[Segment]:
        """As `transcribe`, window by window as they are done; with batch_size=1 each as soon as can be."""
        wave_N = samples_of(audio, rate)
        return self._transcribe(wave_N, self._transcript_prompt(wave_N, options), options)

    def _transcript_prompt(self, wave_N: Tensor, options: SpeechOptions) -> TranscriptPrompt:
        check_names(options, SpeechOptions.__annotations__)
        check_transcribes(self.network)
        given: dict[str, Any] = {name: value for name, value in options.items() if name in ("language", "task")}
        return transcript_prompt(
            self.network, self.tokenizer, self._start(), wave_N, suppress=self._suppression, **given
        )

    def _transcribe(self, wave_N: Tensor, prompt: TranscriptPrompt, options: SpeechOptions) -> Iterator[Segment]:
        given: dict[str, Any] = {name: value for name, value in options.items() if name not in ("language", "task")}
        return transcribe(self.network, self.tokenizer, wave_N, prompt, eos_ids=self.eos_ids, **given)

    def align(
        self,
        text: str,
        translation: Translation | str | None = None,
        *,
        layer: int | Literal["last", "mean"] = "last",
        head: int | None = None,
    ) -> Alignment:
        """Where in the source `text` the model looked for each token of a translation (None: its own best one).

        layer: counted from 0, the "last", or the "mean" of all; head None is the mean over the heads. Attention weights
        are not causes. Raises UsageError for what is not there, and for a model that does not translate.
        """
        check_translates(self.network)
        if translation is None:
            translation = self.translate(text)
        target = translation.token_ids if isinstance(translation, Translation) else translation
        source_tokenizer = self.source_tokenizer
        found = attention_of_text(
            self.network,
            self.tokenizer,
            text,
            target=target,
            source_tokenizer=source_tokenizer,
            start_ids=self._start(),
            kind="cross",
        )
        return Alignment(found.rows, found.columns, alignment(found.layers, layer=layer, head=head).numpy())

    def _translate(self, sources: Iterable[Any], options: TranslationOptions) -> Iterator[Translation]:
        check_names(options, TranslationOptions.__annotations__)
        kept, read = tee(sources)
        found = translate(
            self.network,
            read,
            start_ids=self._start(),
            eos_ids=self.eos_ids,
            vocab_size=self._vocab_size,
            suppress=self._suppression,
            **options,
        )
        return (
            written(best, self.tokenizer, len(source), self.eos_ids) for source, best in zip(kept, found, strict=True)
        )

    @property
    def _vocab_size(self) -> int | None:
        """Ids from there on only pad the embedding."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def eos_ids(self) -> list[int]:
        """Any of them ends a text."""
        eos_ids = self.config.generation.eos_ids
        return end_of(self.tokenizer) if eos_ids is None else list(eos_ids)

    @property
    def _suppression(self) -> Suppression:
        generation = self.config.generation
        return Suppression(generation.suppress_ids, generation.begin_suppress_ids)

    def _read_prompts(
        self, prompts: Sequence[Prompt] | Tensor, parse_special: bool
    ) -> tuple[list[list[int]], Tensor | None, Tensor | None, list[int]]:
        """What the decoder starts from, the source and its lengths (`_read_sources`), and the counts to be told."""
        check_prompts(self.network, [])
        check_flag("parse_special", parse_special)
        if self.network.encoder is not None:
            source, lengths_B, counts = self._read_sources(prompts, parse_special)
            return [self._start()] * len(counts), source, lengths_B, counts
        if isinstance(prompts, Tensor):
            raise UsageError(
                f"a tensor of {prompts.dtype} is no prompt: ids are whole numbers, and features are for an "
                "encoder-decoder"
            )
        rows = [
            prompt_ids(self.tokenizer, prompt, parse_special=parse_special, where=f"prompt {number}")
            for number, prompt in enumerate(prompts)
        ]
        return rows, None, None, [len(row) for row in rows]

    def _start(self) -> list[int]:
        """What the decoder of an encoder-decoder starts from."""
        if self.config.generation.start_ids is not None:
            return list(self.config.generation.start_ids)
        start = begin_of(self.tokenizer)
        if not start:
            raise UsageError(
                "the decoder starts from BOS, and the model's tokenizer has none",
                hint="generation.start_ids in the model's configuration",
            )
        return start

    def _read_sources(
        self, sources: Sequence[Prompt] | Tensor, parse_special: bool = False
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """What the encoder reads, lengths [B] (None: all whole), and how many vectors become of each."""
        parameter = next(self.network.parameters())
        assert self.network.encoder is not None
        reads = self.network.encoder.config.input
        if isinstance(sources, Tensor):
            if reads.reads_ids or sources.dim() != len(reads.axes):
                wanted = "ids" if reads.reads_ids else reads.expects
                raise UsageError(f"the encoder reads {wanted}, not a tensor {list(sources.shape)} of {sources.dtype}")
            counts = [reads.length(sources.shape[1])] * len(sources)
            return sources.to(parameter.device, parameter.dtype), None, counts
        rows = [
            self._source_ids(source, f"source {number}", parse_special=parse_special)
            for number, source in enumerate(sources)
        ]
        for number, row in enumerate(rows):
            if not row:
                raise UsageError(f"source {number} is empty: there is nothing to read")
        ids_BS, lengths_B = pad(rows, parameter.device)
        return ids_BS, lengths_B, [len(row) for row in rows]

    def _source_line(self, text: Prompt, where: str) -> list[int]:
        """The ids of a source to be translated, none of a blank text."""
        return [] if isinstance(text, str) and not text.strip() else self._source_ids(text, where)

    def _source_ids(self, source: Prompt, where: str, *, parse_special: bool = False) -> list[int]:
        """The ids of a source that the encoder can read; `where` names it in errors."""
        assert self.network.encoder is not None
        config = self.network.encoder.config
        if not config.input.reads_ids:
            features = f"a float tensor: {config.input.expects}"
            raise UsageError(
                f"the encoder reads {config.input.reads}, not texts or ids",
                hint=f"{_WRITES[config.input.kind]}, or {features}" if config.input.kind in _WRITES else features,
            )
        ids = whole_ids(self.source_tokenizer, source, parse_special=parse_special, where=where)
        if len(ids) > config.max_seq_len:
            raise UsageError(
                f"{where} has {len(ids)} tokens, which do not fit the encoder's context of {config.max_seq_len}",
                hint="a shorter text, or a model with a larger max_seq_len",
            )
        check_ids(ids, config.vocab_size, where)
        return ids

    # --- judging ------------------------------------------------------------------------------------------------------

    def score(self, prompt: str, continuation: str) -> Score:
        """log p(continuation | prompt) in nats: a float with `token_ids` and `logprobs`; see `qkv.generate.score`.

        Of an encoder-decoder, `prompt` is the source.
        """
        if self.network.encoder is None or self.network.decoder is None:
            return score(self.network, self.tokenizer, prompt, continuation, suppress=self._suppression)
        source, _, _ = self._read_sources([prompt])
        start_ids, suppress = self._start(), self._suppression
        return score(
            self.network, self.tokenizer, "", continuation, source=source, start_ids=start_ids, suppress=suppress
        )

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

    def classify(self, text: Any, *, top: int | None = None, batch_size: int = 32) -> Any:
        """Which class `text` belongs to: a `Classification`.

        text: a text or a list of ids, or of models that read images or sound a file, or what the encoder reads as a
        float tensor; a list of these gives a list, computed `batch_size` at a time. A text longer than the context is
        cut, as in training. top: the probabilities of so many classes, the likeliest (None: of all).

        The result of a text does not depend on the other texts. Raises UsageError for models that do not classify.
        """
        labels = class_labels(self.config)
        if top is not None:
            check_count("top", top, least=1)
        batch_size = check_count("batch_size", batch_size, least=1)
        first = next(iter(self.network.config.stacks.values()))
        if first.input.kind in _WRITES:
            single = is_one_file(text, first)
            features = features_of([text] if single else text, first, self.config)
            ranked = classify_features(self.network, features, labels, top=top, batch_size=batch_size)
            return ranked[0] if single else ranked
        text = listed(text)
        rows = self._whole_rows([text] if is_one(text) else text, self.tokenizer)
        end_id = next(iter(end_of(self.tokenizer)), None)
        found = classify(self.network, rows, labels, end_id=end_id, top=top, batch_size=batch_size)
        return found[0] if is_one(text) else found

    def embed(
        self,
        text: Any,
        *,
        pooling: PoolingKind | None = None,
        normalise: bool | None = None,
        batch_size: int = 32,
    ) -> NDArray[np.float32]:
        """The vector of `text`, [d_model]: made of the encoder's hidden vectors, whatever head there is.

        text: a text or a list of ids; a list of these gives vectors [N, d_model], computed `batch_size` at a time.
        pooling: the "mean" or "max" of the tokens, the first ("cls") or the "last" one; None: what the model was made
        with (sentence-transformers folders say), else the mean. normalise: to length 1; None: likewise, else not. A
        text longer than the context, or than such a folder says, is cut. Of a decoder only the last token has read the
        whole text, so there pooling="last" must be asked for.

        The vector of a text does not depend on the other texts. Raises UsageError for models that read no texts.
        """
        made_with = self.pooling or Pooling("mean", normalise=False)
        pooling = made_with.kind if pooling is None else pooling
        normalise = made_with.normalise if normalise is None else normalise
        check_flag("normalise", normalise)
        check_embeds(self.network, pooling)
        batch_size = check_count("batch_size", batch_size, least=1)
        text = listed(text)
        rows = self._whole_rows([text] if is_one(text) else text, self.source_tokenizer)
        end_id = next(iter(end_of(self.source_tokenizer)), None)
        found = embed(
            self.network,
            rows,
            pooling,
            normalise=normalise,
            end_id=end_id,
            max_seq_len=made_with.max_seq_len,
            batch_size=batch_size,
        )
        return found[0] if is_one(text) else found

    def _whole_rows(self, texts: Sequence[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
        """The ids of texts that are read to their end; a blank text is as an empty one."""
        stack = self.network.encoder if self.network.encoder is not None else self.network.decoder
        assert stack is not None
        rows = []
        for number, text in enumerate(texts):
            blank = isinstance(text, str) and not text.strip()
            rows.append(whole_ids(tokenizer, "" if blank else text, where=f"text {number}"))
            if not rows[-1]:
                raise UsageError(f"text {number} is empty: there is nothing to read")
            check_ids(rows[-1], stack.config.vocab_size, f"text {number}")
        return rows


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    allow: Sequence[str] = (),
    torch_bin: bool = False,
    image_size: int | tuple[int, int] | None = None,
) -> Model:
    """The model in a checkpoint folder, the best one of a run folder, or one of Hugging Face's formats, ready to use.

    device: auto, cpu, cuda, mps (see `qkv.nn.device`). dtype: fp32, bf16, stored (as in the file), or auto: float32,
    but bfloat16 on a GPU that multiplies it. quantize: "keep" leaves the matrices of a GGUF file quantised, at the cost
    of speed. allow: packages whose code the configuration may use; by default a model folder runs none. torch_bin: read
    weights that are a pickle, by torch's loader that builds tensors only. image_size: of a model that reads images,
    another height and width (one number: both); learned positions are interpolated.

    Raises NotFoundError, UsageError for what is not supported, and QkvError for what is damaged. Nothing is downloaded.
    """
    chosen = choose_device(device)
    usual = torch.float32 if dtype == "auto" and chosen.type != "cuda" else None
    precision = usual if usual or dtype == "stored" else choose_dtype(dtype, chosen)
    packages = (allow,) if isinstance(allow, str) else tuple(allow)
    loaded = load_model(Path(path), dtype=precision, quantize=quantize, allow=packages, torch_bin=torch_bin)
    network, config = loaded.network.to(chosen).eval(), loaded.config
    if image_size is not None:
        network = for_image_size(network, image_size)
        config = config.model_copy(update={"model": network.config})
    return Model(network, loaded.tokenizer, config, loaded.source_tokenizer, loaded.pooling)


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

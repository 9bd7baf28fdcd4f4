"""`Model` and `load`: what people hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qkv.checkpoint.load import load_model
from qkv.checkpoint.save_hf import save_hf
from qkv.checkpoint.store import Pooling, save_checkpoint
from qkv.config.errors import UsageError
from qkv.config.parts import EmbeddingHeadConfig
from qkv.config.run import Config
from qkv.data.audio import SAMPLE_RATE
from qkv.generate.arguments import check_count, check_flag, check_names
from qkv.generate.beam import Beams
from qkv.generate.caption import Caption, check_captions
from qkv.generate.chat import MAX_NEW_TOKENS, chat_ids
from qkv.generate.classify import class_labels, classify
from qkv.generate.embed import PoolingKind, check_embeds, embed
from qkv.generate.inputs import Input
from qkv.generate.masked import Candidate, fill_mask
from qkv.generate.media import features_of, is_one_file
from qkv.generate.options import ChatOptions, Options, SpeechOptions, TranslationOptions
from qkv.generate.prompts import Prompt, end_of, is_one, listed
from qkv.generate.reader import WRITERS, Reader
from qkv.generate.scoring import Score, score
from qkv.generate.text import Generation, TextStream
from qkv.generate.transcribe import Segment, Transcription, samples_of, transcripts
from qkv.generate.translate import Translation, check_translates, line_translations, translations
from qkv.generate.write import generations, search, write
from qkv.inspect.answers import attention_of_answer
from qkv.inspect.attention import Alignment, Kind, StackAttention, StackName, alignment
from qkv.nn.device import choose_device, choose_weight_dtype
from qkv.nn.quantized import QuantizedLinear
from qkv.nn.resize import for_image_size
from qkv.nn.transformer import Transformer
from qkv.tokenizer.chat import Message
from qkv.tokenizer.tokenizer import Tokenizer


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
        self._save(save_checkpoint, folder)

    def save_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that `transformers` (and `load`) reads, where a published architecture is this very model.

        Raises ConflictError where `folder` exists, and UsageError that names the first key in which the model differs
        from the nearest architecture.
        """
        self._save(save_hf, folder)

    def _save(self, writer: Callable[..., object], folder: str | os.PathLike[str]) -> None:
        config = self.config.model_copy(update={"model": self.network.config})
        source_tokenizer = None if self.source_tokenizer is self.tokenizer else self.source_tokenizer
        parts = self.network, config, self.tokenizer
        writer(Path(folder), *parts, source_tokenizer=source_tokenizer, pooling=self.pooling)

    @property
    def reader(self) -> Reader:
        """What turns what people give into what the network reads."""
        return Reader(self.network, self.tokenizer, self.source_tokenizer, self.config.generation)

    @property
    def eos_ids(self) -> list[int]:
        """Any of them ends a text."""
        return self.reader.eos_ids

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
            found = search(self.reader, prompts, beams, num_samples=num_samples, **options)
            return found[0] if single else found
        results = generations(self.reader, prompts, num_samples, **options)
        return results[0] if single else results

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> TextStream:
        """Pieces of text as they become certain; joined, they are the text of `generate` with the same `Options`."""
        check_names(options, Options.__annotations__)
        prompt = listed(prompt)
        if not is_one(prompt):
            raise UsageError("one prompt is streamed at a time", hint="generate, or one stream per prompt")
        return TextStream(write(self.reader, [prompt], **options)[0])

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
        return TextStream(write(self.reader, [ids], ends=[] if end is None else [end], **given)[0])

    def translate(self, text: Any, **options: Unpack[TranslationOptions]) -> Any:
        """What an encoder-decoder makes of the source `text`: a `Translation`.

        text: a text or a list of ids; a list of these gives a list, and so do features [B, S, W]. A blank text gives an
        empty translation, for which the model does not run. The options: `TranslationOptions`.

        A translation does not depend on the other texts. Raises UsageError, before the model runs, for what cannot be
        meant and for a text longer than the encoder's context.
        """
        check_translates(self.network)
        if isinstance(text, Tensor) and text.is_floating_point():
            return list(translations(self.reader, self.reader.sources(text)[0], options))
        text = listed(text)
        texts = [text] if is_one(text) else text
        reader = self.reader
        sources = [reader.source_line(one, f"source {number}") for number, one in enumerate(texts)]
        found = list(translations(reader, sources, options))
        return found[0] if is_one(text) else found

    def translate_stream(self, lines: Iterable[str], **options: Unpack[TranslationOptions]) -> Iterator[Translation]:
        """As `translate`, for any number of lines, in order: a few batches are read ahead, with batch_size=1 nothing.

        What is wrong with a line is a QkvError with its number, from 1, after the translations of the lines before it.
        """
        check_translates(self.network)
        if isinstance(lines, str):
            raise UsageError("one text is no stream of lines", hint="translate, or a list of texts")
        return line_translations(self.reader, lines, options)

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
        captions = [Caption(**vars(found.hypotheses[0])) for found in translations(self.reader, images, options)]
        return captions[0] if single else captions

    def transcribe(self, audio: Any, *, rate: int = SAMPLE_RATE, **options: Unpack[SpeechOptions]) -> Transcription:
        """What is said in a recording: a WAV file, or an array of floats (1.0: full scale) of `rate` samples a second.

        The options: `SpeechOptions`. A recording longer than the model reads at once (Whisper: 30 s) is cut into
        windows, one after the other without overlap, each at the quietest moment of the last sixth of what fits. A
        window's text does not depend on the other windows. Raises UsageError for models that are not for speech.
        """
        wave_N = samples_of(audio, rate)
        prompt, found = transcripts(self.reader, wave_N, options)
        segments = list(found)
        text = "".join(segment.text for segment in segments).strip()
        return Transcription(text, prompt.language, len(wave_N) / SAMPLE_RATE, segments)

    def transcribe_stream(
        self, audio: Any, *, rate: int = SAMPLE_RATE, **options: Unpack[SpeechOptions]
    ) -> Iterator[Segment]:
        """As `transcribe`, window by window as they are done; with batch_size=1 each as soon as can be."""
        return transcripts(self.reader, samples_of(audio, rate), options)[1]

    # --- judging ------------------------------------------------------------------------------------------------------

    def score(self, prompt: str, continuation: str) -> Score:
        """log p(continuation | prompt) in nats: a float with `token_ids` and `logprobs`; see `qkv.generate.score`.

        Of an encoder-decoder, `prompt` is the source.
        """
        reader = self.reader
        if self.network.encoder is None or self.network.decoder is None:
            return score(self.network, self.tokenizer, prompt, continuation, suppress=reader.suppression)
        given: dict[str, Any] = {"source": reader.sources([prompt])[0], "start_ids": reader.start_ids}
        return score(self.network, self.tokenizer, "", continuation, suppress=reader.suppression, **given)

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
        inputs, single = self._whole(text, self.tokenizer)
        end_id = next(iter(end_of(self.tokenizer)), None)
        found = classify(self.network, inputs, labels, end_id=end_id, top=top, batch_size=batch_size)
        return found[0] if single else found

    def embed(
        self, text: Any, *, pooling: PoolingKind | None = None, normalise: bool | None = None, batch_size: int = 32
    ) -> NDArray[np.float32]:
        """The vector of `text`, [d_model]: made of the encoder's hidden vectors, whatever head there is.

        text: a text or a list of ids, or of models that read images a file, or a float tensor [C, H, W]; a list of
        these gives vectors [N, d_model], computed `batch_size` at a time. pooling: the "mean" or "max" of the tokens,
        the first ("cls") or the "last" one; None: what the model was made with (sentence-transformers folders say, and
        an embedding head gives vectors of its own width), else the mean. normalise: to length 1; None: likewise, else
        not. A text longer than the context, or than such a folder says, is cut. Of a decoder only the last token has
        read the whole text, so there pooling="last" must be asked for.

        The vector of a text does not depend on the other texts. Raises UsageError for models that read neither.
        """
        made_with = self.pooling or Pooling("mean", normalise=False)
        if pooling is None and not isinstance(self.network.config.head, EmbeddingHeadConfig):
            pooling = made_with.kind
        normalise = made_with.normalise if normalise is None else normalise
        check_flag("normalise", normalise)
        check_embeds(self.network, pooling)
        batch_size = check_count("batch_size", batch_size, least=1)
        inputs, single = self._whole(text, self.source_tokenizer)
        found = embed(
            self.network,
            inputs,
            pooling,
            normalise=normalise,
            end_id=next(iter(end_of(self.source_tokenizer)), None),
            max_seq_len=made_with.max_seq_len,
            batch_size=batch_size,
        )
        return found[0] if single else found

    def _whole(self, given: Any, tokenizer: Tokenizer | None) -> tuple[Sequence[Input], bool]:
        """Texts, ids, files or features as the network reads them, to their end; whether `given` is but one of them."""
        first = next(iter(self.network.config.stacks.values()))
        if first.input.kind in WRITERS:
            single = is_one_file(given, first)
            return features_of([given] if single else given, first, self.config), single
        given = listed(given)
        single = is_one(given)
        return self.reader.whole_rows([given] if single else given, tokenizer), single

    # --- looking inside -----------------------------------------------------------------------------------------------

    def align(
        self,
        text: Any,
        translation: Any = None,
        *,
        layer: int | Literal["last", "mean"] = "last",
        head: int | None = None,
    ) -> Alignment:
        """Where in the source `text` the model looked for each token of a translation (None: its own best one).

        text, translation: as in `attention`. layer: counted from 0, the "last", or the "mean" of all; head None is the
        mean over the heads. Attention weights are not causes. Raises UsageError for what is not there, and for a model
        that does not translate.
        """
        check_translates(self.network)
        found = self.attention(text, translation, kind="cross")
        weights_TS = alignment(found.layers, layer=layer, head=head)
        source = None if found.source is None else found.source.float().cpu().numpy()
        return Alignment(found.rows, found.columns, weights_TS.numpy(), source, found.grid)

    def attention(
        self, text: Any, target: Any = None, *, stack: StackName | None = None, kind: Kind = "self"
    ) -> StackAttention:
        """The attention of one stack while the model reads `text`; see `qkv.inspect.answers`.

        text: a text or ids; an image as `caption` takes it; a recording as `transcribe` does, which fits one window.
        target: what an encoder-decoder writes of it, a text, ids, or what `translate`, `caption` or `generate` gave
        (None: its own best). Raises UsageError for what the model does not read or have.
        """
        return attention_of_answer(self.reader, self.config, text, target, stack=stack, kind=kind)


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
    precision = choose_weight_dtype(dtype, chosen)
    packages = (allow,) if isinstance(allow, str) else tuple(allow)
    loaded = load_model(Path(path), dtype=precision, quantize=quantize, allow=packages, torch_bin=torch_bin)
    network, config = loaded.network.to(chosen).eval(), loaded.config
    if image_size is not None:
        network = for_image_size(network, image_size)
        config = config.model_copy(update={"model": network.config})
    return Model(network, loaded.tokenizer, config, loaded.source_tokenizer, loaded.pooling)

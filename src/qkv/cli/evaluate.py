"""`qkv eval`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import json_option, model_options, print_json
from qkv.config.errors import QkvError, UsageError, nearest, printable

if TYPE_CHECKING:
    from qkv.config.data import MediaDataConfig
    from qkv.config.model import ModelConfig
    from qkv.evaluate.examples import Examples
    from qkv.model import Model

TASKS = (
    "auto",
    "language-model",
    "prefix",
    "masked",
    "translation",
    "pronunciation",
    "captioning",
    "transcription",
    "classification",
)
_PAIRS = ("translation", "pronunciation")
_WRITING = (*_PAIRS, "captioning", "transcription")
_ONLY_FOR = {
    "window": ("language-model", "prefix", "masked"),
    "stride": ("language-model",),
    "max_windows": ("language-model",),
    "source": _PAIRS,
    "target": _PAIRS,
    "beam_size": _WRITING,
    "length_penalty": (*_PAIRS, "captioning"),
    "output": _WRITING,
    "tokenize": ("translation", "captioning"),
    "lowercase": ("translation", "captioning"),
}
"""Option -> the tasks that know it."""
_TEXT = "plain text, or JSONL with a text on each line"
_TABLES = {
    "patches": "a table (TSV, CSV or JSONL) that names the images, or a folder of them for each text or label",
    "log-mel": "a table (TSV, CSV or JSONL) that names the recordings, or a folder of them for each text or label",
}
_TAKES = {
    "language-model": _TEXT,
    "prefix": _TEXT,
    "masked": _TEXT,
    "translation": "pairs in TSV or JSONL",
    "pronunciation": "words and their pronunciations in TSV or JSONL",
    "classification": "texts with a label in TSV, CSV or JSONL",
}
"""Task -> the data that a model which reads texts is scored on; `_TABLES`: by input, of one that reads files."""
_UNITS = {"patches": "images", "log-mel": "recordings"}
_FILES_READ = 512
"""At a time: what becomes of them is held in memory."""


@click.command(name="eval")
@click.argument("model")
@click.option("--task", default="auto", show_default=True, help=f"{', '.join(TASKS)}.")
@click.option("--data", type=click.Path(path_type=Path), help="What to score (default: what the run held out).")
@click.option("--source", type=click.Path(path_type=Path), help="Sources to translate, line by line; with --target.")
@click.option("--target", type=click.Path(path_type=Path), help="Their translations by people.")
@click.option("--bad-bytes", type=click.Choice(["error", "replace", "drop"]), help="For bytes that are not UTF-8.")
@click.option("--batch-size", type=int, help="Windows, texts or images at once; has no effect on the figures.")
@click.option("--window", type=int, help="Tokens the model reads at once (default: its whole context).")
@click.option("--stride", type=int, help="Tokens from one window to the next (default: the window).")
@click.option("--max-windows", type=int, help="Score only so many windows, from the front.")
@click.option("--beam-size", type=int, help="Texts in progress at a time; 1: greedy (default: 4, of speech 1).")
@click.option("--length-penalty", type=float, help="Above 0 favours longer texts (default: 0.6).")
@click.option("--tokenize", help="How BLEU finds words: 13a, zh, intl, char, ... (default: zh for Chinese, else 13a).")
@click.option("--lowercase", is_flag=True, help="BLEU and chrF without regard to case.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Keep what is written in a file, line by line.")
@model_options
@json_option
def evaluate(model: str, task: str, loading: dict[str, Any], as_json: bool, **options: Any) -> None:
    """How good MODEL (a run, a checkpoint, a published model) is at its task, in float32 unless --dtype says otherwise.

    \b
    auto            what such a model is for; an encoder-decoder of texts translates
    language-model  loss, perplexity and bits per byte of a text
    prefix          loss and accuracy of a prefix-LM on what follows a prefix
    masked          loss and accuracy of an encoder on masked tokens of a text
    translation     BLEU, chrF, exact matches and error rates of translated sources
    pronunciation   wrong words and phonemes; the lines of a word are its variants
    captioning      the same as of translations, of what is written of images
    transcription   error rates and exact matches of what is written of speech
    classification  accuracy, macro F1, and what is taken for what

    Every token of a text is scored once, given at most a window of tokens before it; a beginning-of-text token is
    context only. A stride below the window gives tokens more context and takes longer; one of window + 1 makes each
    window a text of its own, whose first token is not scored: what others call windows of 512 tokens are --window 511
    --stride 512. Pairs are TSV or JSONL, or two files with --source and --target; labelled texts are TSV, CSV or JSONL,
    and so are tables of images and recordings, or folders of them, as in training. A source that the context does not
    hold counts as untranslated, a text to classify is cut.
    """
    if task not in TASKS:
        raise UsageError(f"the task `{task}` cannot be evaluated", hint=nearest(task, TASKS) or ", ".join(TASKS))
    from qkv.checkpoint.store import told_choice
    from qkv.model import load

    loaded = load(model, **{**loading, "dtype": "fp32" if loading["dtype"] == "auto" else loading["dtype"]})
    if choice := told_choice(Path(model)):
        click.echo(f"reading {choice}", err=True)
    task = _task_for(loaded.config.model, task)
    for name, value in options.items():
        tasks = _ONLY_FOR.get(name, TASKS)
        if value not in (None, False) and task not in tasks:
            *others, last = tasks
            known = f"{', '.join(others)} and {last}" if others else last
            raise UsageError(f"--{name.replace('_', '-')} is for {known}, and the task is {task}")
    if loaded.tokenizer is None and not (task == "classification" and _reads_files(loaded.config.model)):
        raise UsageError("the model has no tokenizer, and without one no text can be scored", where=model)
    with _own_hints(_TABLES.get(_first_input(loaded.config.model)) or _TAKES[task]):
        figures, lines = _SCORE[task](loaded, {**options, "as_json": as_json})
    if as_json:
        print_json({name: None if value == math.inf else value for name, value in figures.items()})
    else:
        click.echo("\n".join(lines))


def _task_for(config: ModelConfig, task: str) -> str:
    """`task`, or for `auto` what such a model is for. Raises UsageError for one that does something else, or nothing
    that is judged here."""
    kind = config.head.kind if config.head else "none"
    usual = {"decoder": "language-model", "encoder": "masked", "encoder-decoder": "translation"}[config.family]
    if kind == "classifier":
        usual = "classification"
    elif config.head is None or not config.head.predicts_tokens:
        raise UsageError(
            f"a model with a head of kind {kind} predicts neither tokens nor classes, so no task here judges it",
            hint="qkv embed, which writes its vectors",
        )
    elif config.family == "encoder-decoder":
        usual = {"patches": "captioning", "log-mel": "transcription"}.get(_first_input(config), usual)
    elif config.prefix:
        usual = "prefix"
    if task == "auto":
        return usual
    if task != usual and not {task, usual} <= set(_PAIRS):
        raise UsageError(
            f"the task {task} is not for a model of family {config.family} with a head of kind {kind}",
            hint=f"--task {usual}",
        )
    return task


def _first_input(config: ModelConfig) -> str:
    """The kind of what the model reads."""
    return next(iter(config.stacks.values())).input.kind


def _reads_files(config: ModelConfig) -> bool:
    return _first_input(config) in ("patches", "log-mel")


@contextmanager
def _own_hints(taken: str) -> Iterator[None]:
    """Hints in the words of this command, which takes no keys of a configuration. taken: the data that it scores."""
    from qkv.tokenizer.text import NotTextError

    try:
        yield
    except NotTextError as error:
        error.hint = taken
        raise
    except QkvError as error:
        hint = (error.hint or "").replace("data.bad_bytes=", "--bad-bytes ")
        error.hint = None if hint.startswith("data.") else hint or None
        raise


# --- each task: figures for machines, and lines for people ------------------------------------------------------------

Options = Mapping[str, Any]
Scored = tuple[dict[str, Any], list[str]]


def _text(model: Model, options: Options) -> Scored:
    from qkv.config.paths import cache_folder
    from qkv.evaluate.corpora import text_corpus, validation_corpus
    from qkv.evaluate.perplexity import masked_scores, perplexity, prefix_scores
    from qkv.evaluate.score import check_predicts_tokens

    network, tokenizer, config = model.network, model.tokenizer, model.config
    assert tokenizer is not None
    check_predicts_tokens(network)
    masked, prefix = config.model.family == "encoder", config.model.prefix
    if options["data"] is None:
        corpus = validation_corpus(config, tokenizer, cache_folder() / "data")
    else:
        corpus = text_corpus(options["data"], tokenizer, _with_bad_bytes(config.data, options), ends=masked or prefix)
    sizes = {name: options[name] for name in ("window", "batch_size")}
    if masked:
        scores = masked_scores(network, corpus, tokenizer, rate=getattr(config.objective, "rate", 0.15), **sizes)
    elif prefix:
        scores = prefix_scores(network, corpus, tokenizer, **sizes)
    else:
        sizes |= {name: options[name] for name in ("stride", "max_windows")}
        scores = perplexity(network, corpus, tokenizer=tokenizer, **sizes)
    lines = [
        f"{'loss':<16}{scores.loss:.4f} nats per {'masked token' if masked else 'token'}",
        f"{'perplexity':<16}{scores.perplexity:.4f}",
        f"{'accuracy':<16}{scores.accuracy:.2%} of tokens guessed right",
        f"{'tokens':<16}{scores.tokens:,}",
        *([f"{'bytes of text':<16}{scores.bytes:,}"] if scores.bytes else []),
    ]
    if scores.bits_per_byte is not None:
        lines.insert(2, f"{'bits per byte':<16}{scores.bits_per_byte:.4f}")
    elif not masked and not prefix and not options["as_json"]:
        click.echo("no bits per byte: unknown tokens stand for text that is lost", err=True)
    return asdict(scores), lines


def _translation(model: Model, options: Options) -> Scored:
    from qkv.evaluate.examples import pair_scores
    from qkv.evaluate.translation import translation_scores

    tokenize: Any = options["tokenize"] or "auto"
    translation_scores(["."], ["."], tokenize=tokenize)  # one that is unknown is refused before all is translated
    examples, found, told = (_written if _reads_files(model.config.model) else _translated)(model, options)
    scores = pair_scores(examples, found, tokenize=tokenize, lowercase=options["lowercase"])
    repeated = scores.sentences - told["sources"]
    short = "" if scores.four_grams else "  (none of the texts written has four words, so it is 0)"
    measures = {
        "bleu": f"{'BLEU':<22}{scores.bleu:.2f}{short}  {scores.signature}",
        "chrf": f"{'chrF':<22}{scores.chrf:.2f}  {scores.chrf_signature}",
        "exact-match": f"{'exact match':<22}{scores.exact_match:.2%}",
        "word-error-rate": f"{'word error rate':<22}{scores.word_error_rate:.2%}",
        "character-error-rate": f"{'character error rate':<22}{scores.character_error_rate:.2%}",
    }
    own = getattr(model.config.objective, "measure", "bleu")  # by which training judged the model
    return {**asdict(scores), **told}, [
        *sorted(measures.values(), key=lambda line: line != measures[own]),
        f"{'sentences':<22}{scores.sentences:,}" + (f", {repeated:,} of them repeat a source" if repeated else ""),
        *_how(told),
    ]


def _pronunciation(model: Model, options: Options) -> Scored:
    from qkv.evaluate.error_rates import pronunciation_scores

    examples, found, told = _translated(model, options)
    scores = pronunciation_scores(examples.texts, [found[word] for word in examples.texts], examples.answers)
    plain = scores.word_error_rate_without_stress, scores.phoneme_error_rate_without_stress
    return {**asdict(scores), **told}, [
        f"{'word error rate':<22}{scores.word_error_rate:.2%}, without stress {plain[0]:.2%}",
        f"{'phoneme error rate':<22}{scores.phoneme_error_rate:.2%}, without stress {plain[1]:.2%}",
        f"{'words':<22}{scores.words:,}",
        *_how(told),
    ]


def _transcription(model: Model, options: Options) -> Scored:
    from qkv.evaluate.error_rates import error_rate, exact_match

    examples, found, told = _written(model, options)
    written, wanted = [found[file] for file in examples.variants], list(examples.variants.values())
    figures = {
        "word_error_rate": error_rate(written, wanted, "word"),
        "character_error_rate": error_rate(written, wanted, "character"),
        "exact_match": exact_match(written, wanted),
    }
    lines = [f"{name.replace('_', ' '):<22}{value:.2%}" for name, value in figures.items()]
    return {**figures, **told}, [*lines, f"{'recordings':<22}{told['sources']:,}", *_how(told)]


def _classification(model: Model, options: Options) -> Scored:
    from qkv.evaluate.classification import classification_scores, confusion_table
    from qkv.generate.classify import class_labels

    labels = class_labels(model.config)
    examples = _labelled(model, options, labels)
    size = _FILES_READ if _reads_files(model.config.model) else len(examples.texts)
    found = [
        one
        for some in _parts(examples.texts, size)
        for one in model.classify(some, top=1, **_given(options, "batch_size"))
    ]
    scores = classification_scores([one.label for one in found], examples.answers, labels)
    unit = _UNITS.get(_first_input(model.config.model), "texts")
    lines = [
        f"{'accuracy':<16}{scores.accuracy:.2%}",
        f"{'macro F1':<16}{scores.f1:.2%}",
        f"{unit:<16}{scores.examples:,}",
        "",
        f"{'precision':>9}  {'recall':>7}  {'F1':>7}  {unit:>10}  label",
    ]
    for one in scores.classes:
        rates = f"{one.precision:>9.2%}  {one.recall:>7.2%}  {one.f1:>7.2%}"
        lines.append(f"{rates}  {one.support:>10,}  {printable(one.label)}")
    return {**asdict(scores), "labels": list(labels)}, [*lines, "", confusion_table(scores)]


_SCORE: dict[str, Callable[[Model, Options], Scored]] = {
    "language-model": _text,
    "prefix": _text,
    "masked": _text,
    "translation": _translation,
    "pronunciation": _pronunciation,
    "captioning": _translation,
    "transcription": _transcription,
    "classification": _classification,
}


def _labelled(model: Model, options: Options, labels: Sequence[str]) -> Examples:
    """What is to be classified, and its classes."""
    from qkv.config.data import LabelledDataConfig
    from qkv.evaluate.examples import held_out_examples, read_examples

    if options["data"] is None:
        return held_out_examples(model.config, labels)
    if _reads_files(model.config.model):
        return read_examples(_table_of_files(model, options), labels=labels)
    known = model.config.data if isinstance(model.config.data, LabelledDataConfig) else LabelledDataConfig()
    data = known.model_copy(update={"train": (str(options["data"]),)})
    return read_examples(_with_bad_bytes(data, options), labels=labels)


def _table_of_files(model: Model, options: Options) -> MediaDataConfig:
    """The table or folder of --data, read as the model's own data are."""
    from qkv.config.data import AudioDataConfig, ImagesDataConfig

    kind = ImagesDataConfig if _first_input(model.config.model) == "patches" else AudioDataConfig
    known: MediaDataConfig = model.config.data if isinstance(model.config.data, kind) else kind()
    data: MediaDataConfig = _with_bad_bytes(known.model_copy(update={"train": (str(options["data"]),)}), options)
    return data


def _written(model: Model, options: Options) -> tuple[Examples, dict[str, str], dict[str, Any]]:
    """Images or recordings to be scored, what is written of each, and how it came about."""
    from qkv.evaluate.examples import held_out_examples, read_examples
    from qkv.generate.caption import check_captions
    from qkv.generate.transcribe import check_transcribes

    images = _first_input(model.config.model) == "patches"
    (check_captions if images else check_transcribes)(model.network)
    if options["data"] is None:
        examples = held_out_examples(model.config)
    else:
        examples = read_examples(_table_of_files(model, options))
    files = list(examples.variants)
    given: dict[str, Any] = _given(options, "beam_size", "length_penalty", "batch_size")
    if images:
        captions = (model.caption(some, **given) for some in _parts(files, _FILES_READ))
        texts = (one.text for some in captions for one in some)
    else:
        texts = (model.transcribe(file, **given).text for file in files)
    found, told = _answered(examples, files, texts, options)
    return examples, found, {**told, "beam_size": given.get("beam_size", 4 if images else 1)}


def _translated(model: Model, options: Options) -> tuple[Examples, dict[str, str], dict[str, Any]]:
    """The pairs to be scored, the translation of each source, and how it came about."""
    from qkv.evaluate.examples import within_context

    examples = _pairs(model, options)
    assert model.network.encoder is not None
    sources = list(dict.fromkeys(examples.texts))
    readable = within_context(sources, model.source_tokenizer, model.network.encoder.config.max_seq_len)
    search = {"beam_size": 4, **_given(options, "beam_size", "length_penalty", "batch_size")}
    translations = model.translate_stream(readable, **search)
    found, told = _answered(examples, sources, (one.text for one in translations), options)
    left = sum(source != text for source, text in zip(sources, readable, strict=True))
    return examples, found, {**told, "untranslated": left, "beam_size": search["beam_size"]}


def _answered(
    examples: Examples, sources: Sequence[str], texts: Iterator[str], options: Options
) -> tuple[dict[str, str], dict[str, Any]]:
    """The text for each source, which --output keeps, and how long they took."""
    from qkv.cli.lines import one_line, progress_bar, writer

    output: Path | None = options["output"]
    inputs = [options[name] for name in ("data", "source", "target")]
    keeping = writer(output, *inputs) if output else nullcontext(lambda line: None)
    found: dict[str, str] = {}
    started = time.perf_counter()
    with keeping as keep, progress_bar(len(sources), shown=not options["as_json"]) as advance:
        for source, text in zip(sources, texts, strict=True):
            found[source] = one_line(text)
            advance()
        seconds = time.perf_counter() - started
        for source in examples.texts:
            keep(found[source])
    told = {"sources": len(sources), "seconds": seconds, "sentences_per_second": len(sources) / seconds}
    return found, told


def _parts(files: list[str], size: int) -> Iterator[list[str]]:
    return (files[first : first + size] for first in range(0, len(files), size))


def _pairs(model: Model, options: Options) -> Examples:
    from qkv.config.data import ParallelDataConfig, SideFiles
    from qkv.evaluate.examples import held_out_examples, read_examples

    data, source, target = (options[name] for name in ("data", "source", "target"))
    if (source is None) != (target is None) or (data is not None and source is not None):
        raise UsageError("pairs are in one file, or in two", hint="--data FILE, or --source FILE --target FILE")
    if data is None and source is None:
        return held_out_examples(model.config)
    known = model.config.data if isinstance(model.config.data, ParallelDataConfig) else ParallelDataConfig()
    if data is None:
        files = SideFiles(source=(str(source),), target=(str(target),))
        known = known.model_copy(update={"train": files, "reverse": False})
    else:
        known = known.model_copy(update={"train": (str(data),)})
    return read_examples(_with_bad_bytes(known, options))


def _how(told: Mapping[str, Any]) -> list[str]:
    speed = f"{told['seconds']:.1f} s, {told['sentences_per_second']:.1f} per second"
    lines = [f"{'decoding':<22}{speed}, beam size {told['beam_size']}"]
    if told.get("untranslated"):
        lines.append(f"{'untranslated':<22}{told['untranslated']:,}, longer than the model's context")
    return lines


def _given(options: Options, *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options[name] is not None}


def _with_bad_bytes(data: Any, options: Options) -> Any:
    return data.model_copy(update=_given(options, "bad_bytes"))

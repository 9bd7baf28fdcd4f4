"""`qkv demo`: the main job on text that Python itself carries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import json_option, print_json

if TYPE_CHECKING:
    from qkv.data.bundled import BundledText
    from qkv.model import Model

PROMPTS = ("def ", "class ", "The statement ")
MASKED = ("import <mask>", "    return <mask>", "for i in<mask>(10):", "if x is not<mask>:")


@click.command()
@click.argument("kind", type=click.Choice(["gpt", "bert"]), default="gpt")
@click.option("--steps", type=click.IntRange(min=1), help="How long to train (default: about 90 seconds on two cores).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run folder (default: a new one under runs/).")
@json_option
def demo(kind: str, steps: int | None, run_dir: Path | None, as_json: bool) -> None:
    """Train a small model on Python's documentation and standard library, and see what it learnt.

    gpt: a decoder; falling loss, bits per byte on files it never saw beside those of a character model fitted on the
    same text, a sample. bert: an encoder that fills in masked words.
    """
    import qkv
    from qkv.cli.progress import Progress
    from qkv.config.paths import cache_folder
    from qkv.config.run import Config
    from qkv.data.bundled import python_text
    from qkv.train.loop import fit

    text = python_text(cache_folder() / "demo")
    overrides = [f"data.train=[{text.train}]", f"data.validation=[{text.held_out}]"]
    if steps is not None:
        overrides += [f"train.steps={steps}", f"train.eval_every={steps}", f"train.schedule.warmup={min(10, steps)}"]
    config = Config.load("gpt-small-code" if kind == "gpt" else "bert-small", *overrides)
    with Progress(as_json) as progress:
        run = fit(config, run_dir=run_dir, name=f"demo-{kind}", listener=progress)
    model = qkv.load(run.path)
    result = _gpt(model, text) if kind == "gpt" else _bert(model, text)
    if as_json:
        print_json({"run": str(run.path), "val_loss": run.val_loss, **result})
        return
    click.echo(result.pop("report"))
    click.echo(_next_steps(kind, run.path), err=True)


def _gpt(model: Model, text: BundledText) -> dict[str, Any]:
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


def _bert(model: Model, text: BundledText) -> dict[str, Any]:
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


def _next_steps(kind: str, run: Path) -> str:
    preset = "gpt-small-code" if kind == "gpt" else "bert-small"
    use = f'qkv generate {run} --prompt "import "' if kind == "gpt" else f"qkv eval {run}"
    return "\n".join(
        [
            "",
            "next:",
            f"  {use}",
            f"  qkv train {preset} data.train=[your-file.txt]        your own text",
            f"  qkv train --resume {run} train.steps=1000",
            f"  qkv plot loss {run} -o loss.png",
        ]
    )

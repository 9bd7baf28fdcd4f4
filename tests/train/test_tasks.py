"""Translation, denoising and classification: what is learnt, measured, kept and said."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from qkv.checkpoint.store import find_checkpoint, load_checkpoint
from qkv.config.errors import QkvError
from qkv.config.objectives import TranslateObjectiveConfig
from qkv.evaluate import tasks
from qkv.evaluate.tasks import Measure, greedy, measure
from qkv.train import loop
from qkv.train.loop import fit
from qkv.train.resume import resume

from .small import ADAMW, TASKS, assert_same_checkpoint, config, losses, metrics, parts, step, train

TINY = ("model.num_layers=1", "model.d_model=48", "model.attention.num_heads=4", "model.position.kind=learned")
SEPARATE = ("tokenizer={source: {kind: char}, target: {kind: byte}}",)


def measured(run: str | Path, name: str) -> list[float]:
    return [line[f"val_{name}"] for line in metrics(run) if f"val_{name}" in line]


# --- what is learnt ---------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_learns_to_write_words_backwards() -> None:
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("abcd", k=draw.randint(1, 5))) for _ in range(900)})
    Path("words.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words), encoding="utf-8")
    changes = ("data.train=[words.tsv]", "tokenizer={kind: char}", "objective.measure=exact-match")
    steps = ("train.steps=250", "train.batch_tokens=256", "train.optimizer.lr=0.003", "train.eval_every=125")
    run = train("run", *TASKS["translate"], *TINY, *changes, *steps)
    before, after = measured(run, "exact_match")
    assert after > 0.9
    assert after >= before
    model = qkv.load(run)
    assert [model.translate(word, beam_size=2).text for word in ("abca", "dc")] == ["acba", "cd"]


@pytest.mark.parametrize(("family", "pooling"), [("encoder", "first"), ("encoder", "mean"), ("decoder", "last")])
def test_a_classifier_learns_which_word_is_in_a_text(family: str, pooling: str) -> None:
    changes = (*TASKS["classify"], f"model.family={family}", f"model.head.pooling={pooling}", "tokenizer.kind=word")
    run = train("run", *changes, *TINY, "train.steps=60", "train.optimizer.lr=0.01", "data.validation=0.3")
    assert measured(run, "accuracy") == [1.0]
    assert load_checkpoint(run).config.objective.model_dump()["labels"] == ("no", "yes")


@pytest.mark.parametrize("task", ["denoise", "span"])
def test_denoising_learns(task: str) -> None:
    run = train("run", *TASKS[task], *TINY, "train.steps=60", "train.optimizer.lr=0.01")
    assert metrics(run)[-1]["val_loss"] < 0.4 * losses(run)[0][1]


# --- validation by the task's own measure -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        ("bleu", True),
        ("chrf", True),
        ("exact-match", True),
        ("word-error-rate", False),
        ("character-error-rate", False),
    ],
)
def test_every_measure_of_translation_is_logged_and_kept(name: str, higher: bool) -> None:
    run = train("run", *TASKS["translate"], f"objective.measure={name}", "train.steps=1")
    (value,) = measured(run, name.replace("-", "_"))
    told = json.loads((step(run, 1) / "state.json").read_text(encoding="utf-8"))["measure"]
    assert told == {"name": name.replace("-", "_"), "value": value, "higher_is_better": higher}


@pytest.mark.parametrize(("higher", "best"), [(True, 2), (False, 4)])
def test_the_best_checkpoint_is_the_best_by_the_measure(
    higher: bool, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the loss says."""
    values = iter([0.3, 0.9, 0.5, 0.1])
    monkeypatch.setattr(loop, "measure", lambda *of: Measure("exact_match", next(values), higher))
    losses_told = iter([4.0, 3.0, 2.0, 1.0] if higher else [1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(
        loop.Trainer, "validate", lambda self, max_batches=None: 9.0 if max_batches else next(losses_told)
    )
    changes = ("train.steps=4", "train.eval_every=1", "train.save_every=1", "train.keep=1")
    run = train("run", *TASKS["translate"], *changes)
    assert find_checkpoint(run) == step(run, best)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        {f"step-{number:06d}" for number in (best, 4)}
    )


def test_a_measure_counts_every_right_answer_and_no_more_examples_than_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [("a", "x"), ("b", "y"), ("a", "z"), ("c", "w"), ("b", "v")]
    Path("held.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    settings = config(*TASKS["translate"], "data.validation=[held.tsv]")
    tokenizer, prepared, network = parts(settings)
    assert prepared.validation is not None
    asked: list[str] = []

    def answer(network: Any, sources: Any, tokenizer: Any, start_ids: Any) -> list[str]:
        asked.extend(tokenizer.decode(source) for source in sources)
        return ["z", "v", "?"][: len(asked)]

    monkeypatch.setattr(tasks, "greedy", answer)
    objective = TranslateObjectiveConfig(measure="exact-match")
    assert measure(objective, network, prepared.validation, tokenizer) == Measure("exact_match", 2 / 3, True)
    assert asked == ["a", "b", "c"]
    asked.clear()
    objective = TranslateObjectiveConfig(measure="exact-match", measure_examples=2)
    assert measure(objective, network, prepared.validation, tokenizer) == Measure("exact_match", 1.0, True)
    assert asked == ["a", "b"]


@pytest.mark.parametrize("task", TASKS)
def test_a_measure_draws_nothing_and_leaves_the_mode(task: str) -> None:
    settings = config(*TASKS[task], "model.dropout=0.5")
    tokenizer, prepared, network = parts(settings)
    assert prepared.validation is not None
    objective = (
        settings.objective.model_copy(update={"labels": prepared.labels}) if prepared.labels else settings.objective
    )
    before = torch.get_rng_state()
    for training in (True, False):
        network.train(training)
        one, again = (measure(objective, network, prepared.validation, tokenizer) for _ in range(2))
        assert one == again
        assert (one is None) == (task not in ("translate", "classify"))
        assert all(module.training == training for module in network.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_translation_does_not_depend_on_the_others_that_are_measured() -> None:
    settings = config(*TASKS["translate"])
    tokenizer, prepared, network = parts(settings)
    sources = [prepared.train.source.document(number).tolist() for number in range(20)]
    together = greedy(network, sources, tokenizer)
    assert [greedy(network, [source], tokenizer)[0] for source in sources] == together
    assert len(set(map(len, sources))) > 3


# --- what is kept and said --------------------------------------------------------------------------------------------


def test_either_side_has_its_own_vocabulary_through_saving_loading_and_resuming() -> None:
    changes = (*TASKS["translate"], *SEPARATE, *ADAMW, "train.steps=4", "train.save_every=2")
    run = train("whole", *changes)
    loaded = load_checkpoint(run)
    assert loaded.source_tokenizer is not None
    assert loaded.tokenizer is not None
    sizes = [stack.vocab_size for stack in loaded.config.model.stacks.values()]
    assert sizes == [loaded.source_tokenizer.vocab_size, loaded.tokenizer.vocab_size]
    assert sizes[0] != sizes[1] == 260
    shutil.copytree(run, "halves")
    shutil.rmtree(step("halves", 4))
    shutil.rmtree("cache")  # the checkpoint has what is needed
    assert resume("halves").step == 4
    assert_same_checkpoint(step("whole", 4), step("halves", 4))
    assert isinstance(qkv.load(run).translate("a cat").text, str)


def test_the_first_pairs_held_out_are_written_beside_what_the_model_makes_of_them() -> None:
    run = train("run", *TASKS["translate"], *SEPARATE, "train.steps=1")
    samples = (run / "samples/step-000001.txt").read_text(encoding="utf-8")
    pairs = [line.split("\t") for line in Path("pairs.tsv").read_text(encoding="utf-8").splitlines()]
    shown = samples.split("\n\n")[0].split("\n")
    assert [shown[0].removeprefix("source     "), shown[1].removeprefix("reference  ")] in pairs
    assert shown[2].startswith("model      ")


def test_the_start_tells_what_there_is_to_learn_from_and_what_was_left_out() -> None:
    told: list[dict[str, Any]] = []
    with Path("pairs.tsv").open("a", encoding="utf-8") as file:
        file.write(f"{'long ' * 20}\tshort\n")
    fit(config(*TASKS["translate"], "train.steps=1"), run_dir="run", listener=told.append)
    start, note = told[:2]
    assert (start["unit"], start["train_documents"] + start["validation_documents"]) == ("pairs", 60 - skipped())
    assert start["train_tokens"] > 0
    assert note["event"] == "note"
    assert "training pairs are left out" in note["text"]
    told.clear()
    fit(config(*TASKS["classify"], "train.steps=1"), run_dir="other", listener=told.append)
    assert (told[0]["unit"], told[0]["train_documents"] + told[0]["validation_documents"]) == ("texts", 61)


def skipped() -> int:
    """How many of the pairs are longer than the context of the small model."""
    lines = Path("pairs.tsv").read_text(encoding="utf-8").splitlines()[:60]
    return sum(len(line.partition("\t")[0].encode()) + 2 > 16 for line in lines)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_run_whatever_the_caller_drew(task: str) -> None:
    torch.manual_seed(1)
    one = losses(train("one", *TASKS[task], "model.dropout=0.2"))
    torch.manual_seed(2)
    assert losses(train("two", *TASKS[task], "model.dropout=0.2")) == one
    assert losses(train("other", *TASKS[task], "model.dropout=0.2", "train.seed=1")) != one


# --- before the first step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("classify", ("model.head.num_classes=3",), r"num_classes` is 3, and there are 2 labels: no, yes"),
        ("translate", ("model.encoder.vocab_size=9",), r"`model\.encoder\.vocab_size` is 9, and the tokenizer has 260"),
        ("span", ("tokenizer=null", "tokenizer.path=saved"), "no sentinels"),
        ("denoise", ("data.validation=[one.txt]",), "hold no target"),
        ("translate", ("data.validation=[empty.tsv]",), "hold no target"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_no_run(task: str, changes: tuple[str, ...], said: str) -> None:
    qkv.Tokenizer.train([], kind="byte").save("saved")
    Path("one.txt").write_text("a\n", encoding="utf-8")
    Path("empty.tsv").touch()
    with pytest.raises(QkvError, match=said):
        train("run", *TASKS[task], *changes)
    assert not Path("run").exists()

"""A run that starts from a trained model: what it takes over, what starts fresh, and what it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import qkv
from qkv.checkpoint.store import load_checkpoint
from qkv.config.errors import NotFoundError, QkvError
from qkv.nn.transformer import Transformer
from qkv.train.finetune import finetune, take_weights
from qkv.train.resume import resume

from .small import ADAMW, TASKS, assert_same_checkpoint, config, losses, metrics, step, train, weights

TRAIN = """
data: {train: [corpus.txt], split: lines, validation: 0.1}
train: {batch_tokens: 128, log_every: 1, eval_every: null, save_every: null, keep: 100, precision: fp32, compile: 'off'}
"""
STILL = ("train.optimizer.lr=1e-30", "train.optimizer.weight_decay=0", "train.steps=1")
"""One step that changes nothing."""
LABELLED = ("data=null", "data={train: [reviews.tsv], validation: 0.1}")


@pytest.fixture(autouse=True)
def tune(folder: Path) -> str:
    """A configuration without a model."""
    (folder / "tune.yaml").write_text(TRAIN, encoding="utf-8")
    return "tune.yaml"


def notes(model: str | Path, *overrides: str, run: str = "tuned") -> list[str]:
    """What a run from `model` says, one step long and without any effect."""
    told: list[dict[str, Any]] = []
    finetune(model, "tune.yaml", *STILL, *overrides, run_dir=run, listener=told.append)
    return [event["text"] for event in told if event["event"] == "note"]


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["causal", "masked", "translate", "denoise", "classify"])
def test_the_first_loss_is_the_last_of_the_model(task: str) -> None:
    run = train("run", *TASKS[task], "model.dropout=0.1", "train.optimizer.lr=0.01", "train.steps=8")
    of_task = [change for change in TASKS[task] if not change.startswith("model.")]
    finetune("run", "tune.yaml", *of_task, *STILL, run_dir="tuned")
    assert metrics("tuned")[-1]["val_loss"] == pytest.approx(metrics(run)[-1]["val_loss"], rel=1e-6)
    assert weights("tuned", 1).keys() == weights("run", 8).keys()


def test_a_run_goes_on_learning_with_another_schedule_and_other_text() -> None:
    train("run", "train.steps=20", "train.optimizer.lr=0.01")
    Path("other.txt").write_text("a quite different text, of other words\n" * 30, encoding="utf-8")
    finetune("run", "tune.yaml", "data={train: [other.txt], validation: 0}", *ADAMW, "train.steps=20", run_dir="tuned")
    told = losses("tuned")
    assert told[-1][1] < told[0][1] - 0.3


def test_either_side_keeps_its_tokenizer() -> None:
    train("run", *TASKS["translate"], "tokenizer={source: {kind: char}, target: {kind: byte}}", "train.steps=1")
    Path("more.tsv").write_text("cat\tdog\ndog\tcat\ntree\thouse\n", encoding="utf-8")
    assert notes("run", "data=null", "data={train: [more.tsv], validation: 0}")[0].startswith("starting from run/")
    old, new = load_checkpoint(Path("run")), load_checkpoint(Path("tuned"))
    assert old.tokenizer is not None
    assert old.source_tokenizer is not None
    assert new.tokenizer is not None
    assert new.source_tokenizer is not None
    assert new.tokenizer.fingerprint == old.tokenizer.fingerprint
    assert new.source_tokenizer.fingerprint == old.source_tokenizer.fingerprint


def test_a_published_model_is_tuned() -> None:
    run = train("run", "model.vocab_size=264", "train.steps=2")
    qkv.load(run).save_hf("published")
    assert qkv.finetune is finetune
    assert notes("published", "tokenizer.kind=byte") == ["starting from published"]
    before, after = weights("run", 2), weights("tuned", 1)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_decoder_goes_on_starting_from_the_model_s_own_ids() -> None:
    """Of published models they are known, and may be others than the tokenizer's."""
    train("run", *TASKS["translate"], "generation.start_ids=[256, 7]", "train.steps=1")
    finetune("run", "tune.yaml", "data=null", "data={train: [pairs.tsv], validation: 0.1}", *STILL, run_dir="tuned")
    assert metrics("tuned")[-1]["val_loss"] == pytest.approx(metrics("run")[-1]["val_loss"], rel=1e-6)
    assert load_checkpoint(Path("tuned")).config.generation.start_ids == (256, 7)


def test_a_matrix_that_is_no_longer_tied_starts_as_a_copy() -> None:
    train("run", "model.tie_embeddings=head", "train.steps=1")
    assert "fresh" not in notes("run", "model.tie_embeddings=none")[0]
    saved = weights("tuned", 1)
    assert torch.equal(saved["head.weight"], saved["decoder_embedding.input.weight"])


# --- what starts fresh ------------------------------------------------------------------------------------------------


def test_a_new_head_starts_fresh_on_what_was_pretrained_and_is_said() -> None:
    train("run", *TASKS["masked"], "model.tie_embeddings=head", "train.steps=2")
    (said,) = notes(
        "run", *LABELLED, "model.tie_embeddings=none", "model.head={kind: classifier, pooling: mean, pooler: false}"
    )
    assert said == "starting from run/checkpoints/step-000002; head.output.weight, head.output.bias start fresh"
    before, after = weights("run", 2), weights("tuned", 1)
    assert [name for name in after if name not in before] == ["head.output.bias", "head.output.weight"]
    assert all(torch.equal(after[name], before[name]) for name in after.keys() & before.keys())
    assert qkv.load("tuned").classify(["the cat"])[0].label in ("no", "yes")


@pytest.mark.parametrize(
    ("labels", "changes", "fresh"),
    [
        (("no", "yes"), (), False),
        (("bad", "good"), (), True),
        (("a", "b", "c"), ("model.head.num_classes=null",), True),
        (("no", "yes"), ("objective={kind: classify, labels: [yes, no]}",), True),
    ],
)
def test_scores_are_taken_over_only_for_the_same_classes(
    labels: tuple[str, ...], changes: tuple[str, ...], fresh: bool
) -> None:
    """The pooler before them is the model's in any case."""
    train("run", *TASKS["classify"], "train.steps=1")
    rows = [f"{label} {number}\t{label}\n" for number in range(4) for label in labels]
    Path("other.tsv").write_text("".join(["text\tlabel\n", *rows]), encoding="utf-8")
    (said,) = notes("run", "data=null", "data={train: [other.tsv], validation: 0}", *changes)
    assert said.endswith("head.output.weight, head.output.bias start fresh") == fresh
    before, after = weights("run", 1), weights("tuned", 1)
    assert torch.equal(after["head.pooler.dense.weight"], before["head.pooler.dense.weight"])
    assert torch.equal(after["head.output.weight"][:2], before["head.output.weight"]) != fresh


def test_a_fresh_head_depends_on_the_seed_alone() -> None:
    train("run", *TASKS["masked"], "train.steps=1")
    head = (*LABELLED, "model.head.kind=classifier")
    for run, seed in (("one", 0), ("two", 0), ("three", 1)):
        torch.manual_seed(len(run))
        notes("run", *head, f"train.seed={seed}", run=run)
    one, two, three = (weights(run, 1)["head.output.weight"] for run in ("one", "two", "three"))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_what_is_missing_outside_the_head_is_an_error() -> None:
    small, other = (
        Transformer(config(f"model.position.kind={kind}", "model.vocab_size=9").model) for kind in ("rope", "learned")
    )
    with pytest.raises(QkvError, match=r"needs `decoder_embedding\.position\.weight` .* does not have it"):
        take_weights(other, small)
    assert take_weights(small, other) == []


# --- the run ----------------------------------------------------------------------------------------------------------


def test_the_run_is_complete_says_where_it_started_and_resumes_bit_for_bit() -> None:
    train("run", *TASKS["masked"], "model.dropout=0.1", "train.steps=2")
    changes = (*LABELLED, "model.head.kind=classifier", "objective.token_dropout=0.2", "train.save_every=2")
    finetune("run", "tune.yaml", *changes, "train.steps=4", run_dir="whole")
    started = json.loads(Path("whole/env.json").read_text(encoding="utf-8"))["started_from"]
    assert started == "run/checkpoints/step-000002"
    assert f"- started from the weights of {started}\n" in Path("whole/report.md").read_text(encoding="utf-8")
    shutil.copytree("whole", "halves")
    shutil.rmtree(step("halves", 4))
    shutil.rmtree("run")
    assert resume("halves").step == 4
    assert_same_checkpoint(step("whole", 4), step("halves", 4))


def test_a_tuned_model_is_tuned_again() -> None:
    train("run", "train.steps=1")
    notes("run")
    assert notes("tuned", "model.dropout=0.3", run="again") == ["starting from tuned/checkpoints/step-000001"]
    assert load_checkpoint(Path("again")).config.model.layers[1].dropout == 0.3


# --- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("model.d_model=64",), r"`model\.d_model` is 32 in the model, and may not become 64"),
        (("model.max_seq_len=32",), r"`decoder_embedding\.position\.weight` \[32, 32\].* has it as \[16, 32\]"),
        (("model.head.kind=classifier", *LABELLED), r"`head\.kind`|tie_embeddings"),
        (("tokenizer.kind=char",), r'`tokenizer\.kind` is "byte" in the model'),
        (("objective.kind=masked",), "masked needs a model of family encoder"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_and_leaves_no_run(changes: tuple[str, ...], said: str) -> None:
    train("run", "model.position.kind=learned", "model.tie_embeddings=head", "train.steps=1")
    with pytest.raises(QkvError, match=said):
        notes("run", *changes)
    assert not Path("tuned").exists()


def test_a_model_that_is_none_or_has_no_tokenizer_is_refused() -> None:
    with pytest.raises(NotFoundError, match="a preset is a configuration without weights"):
        notes("decoder-tiny")
    qkv.Model(Transformer(config("model.vocab_size=9").model), None, config("model.vocab_size=9")).save("bare")
    with pytest.raises(QkvError, match="no tokenizer"):
        notes("bare")


def test_the_weights_of_the_model_stay_as_they_are() -> None:
    train("run", "train.steps=1")
    before = load_file(step("run", 1) / "model.safetensors")
    finetune("run", "tune.yaml", "train.steps=2", run_dir="tuned")
    assert all(torch.equal(value, before[name]) for name, value in weights("run", 1).items())

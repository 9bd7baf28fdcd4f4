"""What a step computes: the loss, its gradient, validation; and when training stops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import qkv
from qkv.checkpoint.store import load_checkpoint
from qkv.config.errors import ConfigError, QkvError
from qkv.data import validation_batches
from qkv.data.tokenizers import tokenizer_for
from qkv.nn.threads import describe_threads
from qkv.train.loop import Trainer, fit, new_trainer
from qkv.train.optimizer import Optimizer
from qkv.train.resume import resume

from .small import (
    ADAMW,
    MUON,
    TASKS,
    assert_equal,
    config,
    first_step,
    losses,
    metrics,
    parts,
    step,
    steps_of,
    train,
    weights,
)
from .test_experts import MIXED


def cross_entropies(network: Any, batches: list[Any]) -> list[torch.Tensor]:
    """The log-probabilities [N, V] and labels [N] of the targets of each batch, as (-log p [N], mean -log p [N])."""
    found = []
    network.eval()
    with torch.no_grad():
        for batch in batches:
            logits = network(batch.inputs, **batch.arguments).double()
            logs = -F.log_softmax(logits, dim=-1)
            real = batch.labels != -100
            picked = logs.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0][real]
            found.append(torch.stack([picked, logs.mean(-1)[real]]))
    return found


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "seed"), [("causal", 0), ("masked", 0), ("translate", 1), ("span", 0)])
def test_the_loss_is_the_mean_over_the_targets_of_the_step(task: str, seed: int) -> None:
    """Not the mean of the means of micro-batches, whose numbers of targets differ."""
    changes = (*TASKS[task], "train.batch_tokens=160", "train.micro_batch_tokens=48", "train.steps=1")
    changes = (*changes, f"train.seed={seed}")
    settings = config(*changes)
    _, _, network = parts(settings)
    each = [table[0] for table in cross_entropies(network, first_step(settings))]
    assert len({len(part) for part in each}) > 1
    first = metrics(train("run", *changes))[0]
    assert first["loss"] == pytest.approx(torch.cat(each).mean().item(), rel=1e-5)
    assert first["loss"] != pytest.approx(torch.stack([part.mean() for part in each]).mean().item(), rel=1e-5)
    assert first["tokens"] == sum(len(part) for part in each)


def test_of_texts_with_a_label_the_tokens_are_counted_and_the_loss_is_per_text() -> None:
    settings = config(*TASKS["classify"])
    _, _, network = parts(settings)
    (batch,) = first_step(settings)
    with torch.no_grad():
        expected = F.cross_entropy(network.eval()(batch.inputs, **batch.arguments), batch.labels).item()
    first = metrics(train("run", *TASKS["classify"], "train.steps=1"))[0]
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert batch.lengths is not None
    assert first["tokens"] == int(batch.lengths.sum()) <= 128


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [*((task, ADAMW) for task in TASKS), *((task, MUON) for task in ("causal", "masked", "translate"))],
    ids=[*TASKS, "causal-muon", "masked-muon", "translate-muon"],
)
def test_loss_and_gradient_do_not_depend_on_how_a_step_is_split(task: str, optimizer: tuple[str, ...]) -> None:
    runs = []
    for tokens in ("null", "64", "48", "16"):  # 1 part, 2, 3 uneven ones, 8 of a row each
        changes = (*optimizer, f"train.micro_batch_tokens={tokens}", "train.steps=3", "train.save_every=1")
        runs.append(metrics(train(f"run-{tokens}", *TASKS[task], *changes)))
    for other in runs[1:]:
        for one, two in zip(runs[0][:3], other[:3], strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 if one["step"] == 1 else 1e-3)
            assert two["tokens"] == one["tokens"]


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("task", [*TASKS, "prefix", "experts", "translating experts"])
def test_one_two_four_or_eight_parts_have_one_loss_and_one_gradient(task: str, dtype: torch.dtype, rel: float) -> None:
    others = {
        "prefix": ("objective.kind=prefix",),
        "experts": (MIXED,),
        "translating experts": (*TASKS["translate"], MIXED),
    }
    found, parts_taken = [], []
    for ways in (1, 2, 4, 8):
        changes = TASKS[task] if task in TASKS else others[task]
        tokens = "null" if ways == 1 else str(128 // ways)
        settings = config(*changes, f"train.micro_batch_tokens={tokens}", "train.label_smoothing=0.1")
        trainer = new_trainer(settings, tokenizer_for(settings, "cache"), None, None)
        trainer.network.to(dtype)
        parts_taken.append(len(first_step(settings)))
        taken = trainer.take_step()
        found.append([value for key, value in taken.items() if key == "grad_norm" or key.endswith("loss")])
    assert parts_taken[0] == 1 < parts_taken[2] < parts_taken[3]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=rel)


def test_label_smoothing_is_in_the_training_loss_and_not_in_validation() -> None:
    changes = ("train.steps=1", "train.optimizer.lr=1e-30", "train.optimizer.weight_decay=0")
    settings = config(*changes)
    _, _, network = parts(settings)
    (plain, spread) = torch.cat(cross_entropies(network, first_step(settings)), dim=1).mean(1).tolist()
    clear, smooth = (
        train(name, *changes, f"train.label_smoothing={share}") for name, share in (("clear", 0), ("smooth", 0.3))
    )
    assert losses(clear)[0][1] == pytest.approx(plain, rel=1e-5)
    assert losses(smooth)[0][1] == pytest.approx(0.7 * plain + 0.3 * spread, rel=1e-5)
    assert plain != pytest.approx(spread, rel=1e-3)
    assert metrics(clear)[-1]["val_loss"] == metrics(smooth)[-1]["val_loss"]


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_the_validation_loss_is_that_of_the_weights_without_dropout(family: str) -> None:
    changes = ("model.dropout=0.3", "train.steps=3", "train.micro_batch_tokens=32")
    run = train("run", *changes, family=family)
    settings = config(*changes, family=family)
    tokenizer, prepared, _ = parts(settings)
    assert settings.objective is not None
    assert prepared.validation is not None
    batches = validation_batches(
        prepared.validation, settings.objective, tokenizer, max_seq_len=16, batch_tokens=16
    )  # one row at a time
    tables = cross_entropies(load_checkpoint(run).network, list(batches))
    assert metrics(run)[-1]["val_loss"] == pytest.approx(torch.cat(tables, dim=1)[0].mean().item(), rel=1e-5)


def test_training_learns() -> None:
    changes = ("train.steps=60", "train.optimizer.lr=0.01", "train.eval_every=20", "train.log_every=10")
    run = train("run", *changes)
    found = [line["val_loss"] for line in metrics(run) if "val_loss" in line]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.7 * math.log(260)
    assert [number for number, _ in losses(run)] == [1, 10, 20, 30, 40, 50, 60]


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["null", "0.25", "1000"])
def test_gradients_are_clipped_to_the_norm_asked_for(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logged norm is the one before clipping."""
    used: list[float] = []
    take = Optimizer.step

    def watch(self: Optimizer, share: float) -> float:
        gradients = [p.grad for inner in self.optimizers for group in inner.param_groups for p in group["params"]]
        used.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)))
        return take(self, share)

    monkeypatch.setattr(Optimizer, "step", watch)
    logged = [line["grad_norm"] for line in metrics(train("run", f"train.clip={clip}")) if "grad_norm" in line]
    assert min(logged) > 0.25
    assert used == pytest.approx([0.25] * 4 if clip == "0.25" else logged, rel=1e-5)


def test_gradients_do_not_pile_up_from_step_to_step() -> None:
    """Two steps at a learning rate of nothing have the gradient norms that two runs of one step have."""
    changes = ("train.optimizer.lr=1e-30", "train.optimizer.weight_decay=0", "data.validation=0", "train.clip=null")
    whole = metrics(train("whole", *changes, "train.steps=2", "train.batch_tokens=16384"))
    assert whole[1]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=0.2)


# --- without validation -----------------------------------------------------------------------------------------------


def test_validation_files_without_text_are_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(QkvError, match="hold no target"):
        train("run", f"data.validation=[{tmp_path / 'empty.txt'}]")
    assert not Path("run").exists()


@pytest.mark.parametrize("nothing", ["data.validation=0", "data.validation=[]"])
def test_a_run_without_validation_works(nothing: str) -> None:
    run = fit(config(nothing, "train.eval_every=1", "train.save_every=2", "train.keep=1"), run_dir="run")
    assert run.val_loss is None
    assert not any("val_loss" in line for line in metrics("run"))
    assert steps_of("run") == ["step-000004"]
    assert load_checkpoint(Path("run")).path == step("run", 4)


def test_the_run_that_is_returned_tells_what_the_metrics_tell() -> None:
    run = fit(config(), run_dir="run")
    assert (run.path, run.step) == (Path("run"), 4)
    assert run.loss == losses("run")[-1][1]
    assert run.val_loss == metrics("run")[-1]["val_loss"]


# --- when training cannot go on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", ["1e30", "1e38"])
def test_a_figure_that_is_not_finite_stops_the_run_and_names_the_step(lr: str) -> None:
    train("run", "train.steps=2", "train.save_every=2")
    good = weights("run", 2)
    changes = (f"train.optimizer.lr={lr}", "train.clip=null", "data.validation=0", "train.schedule.kind=constant")
    with pytest.raises(QkvError, match=r"the (loss|gradient norm) is (nan|inf) at step [23]") as stop:
        train("broken", *changes, "train.steps=9")
    assert stop.value.exit_code == 1
    assert stop.value.hint is not None
    assert "a lower learning rate" in stop.value.hint
    assert "checkpoint" not in stop.value.hint
    assert steps_of("broken") == []
    taken = [line for line in metrics("broken") if "loss" in line]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in taken)
    assert_equal(weights("run", 2), good)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("train.steps=6", "train.save_every=1", "train.keep=1")
    forward = Trainer._forward

    def poisoned(self: Trainer, batch: Any) -> Any:
        output = forward(self, batch)
        if self.step == 3 and torch.is_grad_enabled():
            output.loss_sum.register_hook(lambda gradient: gradient * math.nan)
        return output

    monkeypatch.setattr(Trainer, "_forward", poisoned)
    with pytest.raises(QkvError, match=r"the gradient norm is nan at step 4[\s\S]*last checkpoint is intact"):
        train("run", *changes)
    monkeypatch.setattr(Trainer, "_forward", forward)
    assert steps_of("run") == ["step-000003"]
    assert all(value.isfinite().all() for value in weights("run", 3).values())
    assert resume("run").step == 6


def test_a_validation_loss_that_is_not_finite_stops_the_run_before_it_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(self: Trainer, max_batches: int | None = None) -> float:
        return math.nan if self.step == 4 else 1.0

    monkeypatch.setattr(Trainer, "validate", validate)
    with pytest.raises(QkvError, match="the validation loss is nan at step 4"):
        train("run", "train.eval_every=1", "train.save_every=1")
    assert steps_of("run") == ["step-000001", "step-000002", "step-000003"]
    assert len([line for line in metrics("run") if "val_loss" in line]) == 3


# --- before the first step --------------------------------------------------------------------------------------------


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`model\.vocab_size` is 100, and the tokenizer has 260 ids"):
        train("run", "model.vocab_size=100")
    assert not Path("run").exists()


def test_a_vocabulary_that_is_larger_is_kept() -> None:
    run = train("run", "model.vocab_size=320", "train.steps=1")
    assert qkv.load(run).network.config.vocab_size == 320


def test_the_tokenizers_size_is_taken_where_none_is_given() -> None:
    run = train("run", "tokenizer.kind=bpe", "tokenizer.vocab_size=300", "train.steps=1")
    model = qkv.load(run)
    assert model.tokenizer is not None
    assert model.network.config.vocab_size == model.tokenizer.vocab_size <= 300


def test_a_text_too_short_for_one_window_leaves_no_run_folder() -> None:
    Path("corpus.txt").write_text("tiny", encoding="utf-8")
    with pytest.raises(QkvError, match=r"\d+ training tokens are too few: a window of 16 takes \d+"):
        train("run", "data.validation=0")
    assert not Path("run").exists()


def test_the_start_says_what_runs_where() -> None:
    told: list[dict[str, Any]] = []
    fit(config(*MUON), run_dir="run", listener=told.append)
    start = told[0]
    assert start["event"] == "start"
    assert start["parameters"] == sum(tensor.numel() for tensor in weights("run", 4).values())
    assert start["compute"] == [
        f"device cpu, {describe_threads()}",
        "fp32 (asked for)",
        "eager (asked for)",
        "attention by math (16 tokens at most)",
    ]
    assert [line.split(":")[0] for line in start["optimizer"]] == ["Muon", "AdamW", "AdamW"]
    assert [event["event"] for event in told] == ["start", *["train"] * 4, "validation", "checkpoint", "end"]

"""The one training loop: every family and objective goes through it.

A step is a list of micro-batches. The loss is the sum over all target tokens of the step, divided once by their number,
plus further losses (`Output.further`), summed over all targets or rows and divided by theirs, so that the gradient does
not depend on how the step is split. What a run needs to go on exactly where it stopped is in its checkpoint: weights,
optimiser, generators, the place in the data.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from qkv.checkpoint.lock import holder, in_use, locked
from qkv.checkpoint.store import save_checkpoint
from qkv.config.errors import QkvError
from qkv.config.paths import cache_folder
from qkv.config.run import Config
from qkv.data.batches import BatchLoader, validation_batches
from qkv.data.places import places
from qkv.data.prefetch import Prefetched
from qkv.data.prepare import Pairs, Prepared, prepare
from qkv.data.rows import Batch
from qkv.data.tokenizers import tokenizers_for
from qkv.evaluate.tasks import Measure, measure
from qkv.nn.experts import correct_biases, forget_loads
from qkv.nn.transformer import Output, Transformer
from qkv.tokenizer.tokenizer import Tokenizer
from qkv.train.averaging import Averaged, build_averaging
from qkv.train.compute import Compute, choose_compute, compile_blocks, recompute_blocks
from qkv.train.guards import generators_of, interrupts, lent_generators, read_generators
from qkv.train.optimizer import build_optimizer
from qkv.train.report import write_report
from qkv.train.run_folder import RunFolder, require_space, require_unused, written
from qkv.train.samples import write_sample
from qkv.train.schedule import share_of_peak
from qkv.train.sizes import sized

Listener = Callable[[dict[str, Any]], None]
"""Told what happens: {"event": "start" | "note" | "train" | "skip" | "validation" | "checkpoint" | "end", ...}."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a checkpoint to go on from; `run` is its folder. saved: whether that was saved after Ctrl-C."""

    def __init__(self, run: Path, saved: str) -> None:
        super().__init__(f"interrupted{saved}; go on with: qkv train --resume {shlex.quote(str(run))}")
        self.run = run


class NonFiniteError(QkvError):
    """A step that was not taken, because its loss or gradient is no number; `record` is what the metrics tell of it."""

    def __init__(self, name: str, value: float, step: int, places: list[str], hint: str) -> None:
        super().__init__(
            f"the {name} is {value} at step {step}",
            where="; ".join(places) or None,
            hint=hint,
        )
        self.record = {"non_finite": name, "places": places}


@dataclass(frozen=True)
class Run:
    """What training leaves: the run folder, the last step, its losses (nats per target token)."""

    path: Path
    step: int
    loss: float | None
    val_loss: float | None


def fit(
    config: Config,
    *,
    run_dir: str | Path | None = None,
    name: str = "run",
    preset: str | None = None,
    listener: Listener | None = None,
) -> Run:
    """Train a new model as `config` says, in a new run folder (`run_dir`, or one under runs/).

    preset: what the report compares `config` with (`qkv.config.load.preset_of`).

    Raises QkvError for what cannot be trained; Interrupted after Ctrl-C, when everything has been saved.
    """
    place = Path(run_dir) if run_dir else None
    if place is not None:
        if who := holder(place):
            raise in_use(place, who)
        require_unused(place)
    trainer = new_trainer(config, *tokenizers_for(config, cache_folder()), listener)
    about = {"preset": preset, **trainer.about}
    run = RunFolder.create(trainer.config, name, place, space=trainer.space, about=about)
    with locked(run.path):
        return trainer.run_in(run)


def new_trainer(
    config: Config, tokenizer: Tokenizer | None, source_tokenizer: Tokenizer | None, listener: Listener | None
) -> Trainer:
    """A network before its first step, its weights drawn by `train.seed`, with the data prepared."""
    prepared = prepare(config, tokenizer, cache_folder() / "data", source_tokenizer=source_tokenizer)
    config = sized(config, tokenizer, source_tokenizer, prepared.labels)
    generator = torch.Generator().manual_seed(config.train.seed)
    network = Transformer(config.model, generator=generator)
    compute = choose_compute(config.train, network)
    return Trainer(config, network, tokenizer, prepared, compute, listener, source_tokenizer)


class Trainer:
    """A network in training: everything that changes from step to step, and how it is saved."""

    def __init__(
        self,
        config: Config,
        network: Transformer,
        tokenizer: Tokenizer | None,
        prepared: Prepared,
        compute: Compute,
        listener: Listener | None = None,
        source_tokenizer: Tokenizer | None = None,
    ) -> None:
        self.source_tokenizer = source_tokenizer
        self.config, self.tokenizer, self.prepared, self.compute = config, tokenizer, prepared, compute
        self.network = network.to(compute.device)
        self.network.label_smoothing = config.train.label_smoothing
        self.tell: Listener = listener or (lambda event: None)
        self.objective = config.objective
        loader = BatchLoader(
            prepared.train,
            self.objective,
            tokenizer,
            max_seq_len=config.model.context,
            batch_tokens=config.train.batch_tokens,
            micro_batch_tokens=config.train.micro_batch_tokens,
            ramp=config.train.ramp,
            seed=config.train.seed,
        )
        self.loader = Prefetched(loader)
        if self.has_validation:
            self._validation_batches()  # what holds no target is refused now, not at the first validation
        self.optimizer = build_optimizer(config.train.optimizer, self.network)
        self.averaging = build_averaging(config.train, self.network, self.optimizer)
        self.schedule = config.train.schedule_by_step
        if config.train.activation_checkpointing:
            recompute_blocks(self.network)
        if compute.compiled:
            compile_blocks(self.network, one_shape=self.loader.one_shape)
        self.step = 0
        self.saved = False  # whether there is a checkpoint to go back to
        self.skipped = 0
        self.tokens = 0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.measure: Measure | None = None
        self.seconds = 0.0
        self._dropout = generators_of(config.train.seed, compute.device)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run_in(self, run: RunFolder) -> Run:
        """Take the remaining steps, logging and saving in `run`. The report is there however they end, but for a second
        Ctrl-C."""
        self._tell_start(run)
        for text in self.prepared.notes:
            self.tell({"event": "note", "text": text})
        try:
            self._take_steps(run)
        except (Interrupted, Exception) as stop:
            with suppress(Exception):  # what has ended the run matters more
                if isinstance(stop, QkvError):
                    run.log({"step": self.step + 1, "failed": stop.what})
                write_report(run.path)
            raise
        except KeyboardInterrupt:  # the second one
            if not (checkpoints := run.checkpoints):
                raise
            raise Interrupted(run.path, f"; the newest checkpoint is {checkpoints[-1].name}") from None
        write_report(run.path)
        self.tell({"event": "end", "run": str(run.path), "step": self.step, "seconds": self.seconds})
        return Run(run.path, self.step, self.loss, self.val_loss)

    def _take_steps(self, run: RunFolder) -> None:
        train = self.config.train
        stops = {"event": "note", "text": "stopping after this step; Ctrl-C again stops at once and saves nothing"}
        with lent_generators(self._dropout, self.compute.device), interrupts(lambda: self.tell(stops)) as interrupted:
            while self.step < train.steps:
                self._log_step(run, self._next_step(run))
                last = self.step == train.steps
                stopping = interrupted()
                if self.has_validation and (last or _due(self.step, train.eval_every)):
                    self._log_validation(run)
                if last or stopping or _due(self.step, train.save_every):
                    self.save(run)
                if stopping and not last:
                    raise Interrupted(run.path, " and saved")

    def _next_step(self, run: RunFolder) -> dict[str, Any]:
        """Take a step. Batches whose loss or gradient is not finite are passed over, within the budget."""
        most = self.config.train.skip_non_finite
        while True:
            try:
                return self.take_step()
            except NonFiniteError as found:
                if self.skipped >= most:
                    raise
                self.skipped += 1
                record = {"step": self.step + 1, "skipped": self.skipped, **found.record}
                run.log(record)
                text = f"{found.what}: batch passed over ({self.skipped} of at most {most}), {found.where}"
                self.tell({"event": "skip", **record, "text": text})

    def take_step(self) -> dict[str, Any]:
        """One update of the weights. Returns its metrics. Raises NonFiniteError before anything but the place in the
        data, and dropout's generator, has changed; the step does not count, for a stage of a ramp neither."""
        started = time.perf_counter()
        with record_function("data"):  # ranges for qkv.train.profile
            batches = next(self.loader)
        targets, rows = sum(batch.target_count for batch in batches), sum(len(batch.inputs) for batch in batches)
        self.network.train()
        total, further = 0.0, Counter[str]()
        for batch in batches:
            output = self._forward(batch)
            losses = output.further(targets, rows)
            loss_part = output.loss_sum / targets + sum(losses.values())
            loss_part.backward()  # type: ignore[no-untyped-call]
            loss_sum = output.loss_sum.item()
            if not math.isfinite(loss_sum):
                raise self._refused("loss", loss_sum, [batch])
            total += loss_sum
            further.update({f"{name}_loss": loss.item() for name, loss in losses.items()})
        loss = total / targets
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        clip = self.config.train.clip
        with record_function("clipping"):
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            grad_norm = norm.item()
            if not math.isfinite(grad_norm):
                raise self._refused("gradient norm", grad_norm, batches)
            if clip is not None:
                nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        self.step += 1
        share = share_of_peak(self.schedule, self.step, self.config.train.steps)
        with record_function("optimiser"):
            lr = self.optimizer.step(share)
            self.optimizer.zero_grad()
            correct_biases(self.network)
            self.averaging.update(self.step)
        tokens = sum(batch.tokens for batch in batches)
        self.tokens += tokens
        self.loss, self.val_loss, self.measure = loss, None, None
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        return {
            "step": self.step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            **further,
            "tokens": self.tokens,
            "tokens_per_second": tokens / elapsed,
        }

    def _refused(self, name: str, value: float, batches: list[Batch]) -> NonFiniteError:
        """Forget the step that was about to be taken; the error names the rows behind it."""
        self.optimizer.zero_grad()
        forget_loads(self.network)
        self.loader.pass_over()
        source = self.source_tokenizer if isinstance(self.prepared.train, Pairs) else None
        found = places(self.prepared, batches, source or self.tokenizer)
        going_on = ", and a run may go on with it," if self.saved else ""
        hint = f"{self._against_divergence}; a larger train.skip_non_finite{going_on} passes more of them over"
        return NonFiniteError(name, value, self.step + 1, found, hint)

    @property
    def _against_divergence(self) -> str:
        """What to try where a number is not finite."""
        more = "; the last checkpoint is intact" if self.saved else ""
        return f"a lower learning rate, or train.clip=1.0{more}"

    def _forward(self, batch: Batch) -> Output:
        batch = batch.to(self.compute.device)
        with self.compute.forward_passes():
            output: Output = self.network(batch.inputs, labels=batch.labels, **batch.arguments)
        return output

    # --- validation ---------------------------------------------------------------------------------------------------

    @property
    def has_validation(self) -> bool:
        return self.prepared.validation is not None

    @torch.no_grad()
    def validate(self, max_batches: int | None = None) -> float:
        """The mean loss over the targets held out, without dropout or label smoothing; draws nothing at random."""
        batches = self._validation_batches()
        self.network.eval()
        smoothing, self.network.label_smoothing = self.network.label_smoothing, 0.0
        total, count = 0.0, 0
        # evaluated blocks are other graphs than trained ones: compiled for every shape, they cost more than they save,
        # and take up what the compiler keeps for training
        eager = nullcontext() if self.loader.one_shape else torch.compiler.set_stance("force_eager")
        with self.averaging.applied(), eager:
            for batch in islice(batches, max_batches):
                total += self._forward(batch).loss_sum.item()
                count += batch.target_count
        self.network.label_smoothing = smoothing
        return total / count

    def _validation_batches(self) -> Iterator[Batch]:
        assert self.prepared.validation is not None
        return validation_batches(
            self.prepared.validation,
            self.objective,
            self.tokenizer,
            max_seq_len=self.config.model.context,
            batch_tokens=self.config.train.micro_batch_tokens or self.config.train.batch_tokens,
        )

    def _probe(self) -> float | None:
        """The loss on one fixed batch: saved, and computed again on resuming, so that one sees it is the same model."""
        return self.validate(max_batches=1) if self.has_validation else None

    # --- what is written ----------------------------------------------------------------------------------------------

    @property
    def about(self) -> dict[str, Any]:
        """What is trained on what and how, for env.json: as told at the start, and the fingerprint of the data."""
        return {"training": self._sizes(), "data_fingerprint": self.prepared.fingerprint}

    def _sizes(self) -> dict[str, Any]:
        train, validation = self.prepared.train, self.prepared.validation
        return {
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "unit": train.unit,
            "train_documents": train.num_documents,
            "train_tokens": train.num_tokens,
            "validation_documents": validation.num_documents if validation is not None else 0,
            "validation_tokens": validation.num_tokens if validation is not None else 0,
            "compute": list(self.compute.why),
            "optimizer": [*self.optimizer.describe(), *self.averaging.describe()],
            "ramp": self.config.train.describe_ramp(),
        }

    def _tell_start(self, run: RunFolder) -> None:
        place = {"run": str(run.path), "step": self.step, "steps": self.config.train.steps}
        self.tell({"event": "start", **place, **self._sizes()})

    def _log_step(self, run: RunFolder, metrics: dict[str, Any]) -> None:
        if self.step == 1 or self.step == self.config.train.steps or _due(self.step, self.config.train.log_every):
            run.log(metrics)
            self.tell({"event": "train", **metrics})

    def _log_validation(self, run: RunFolder) -> None:
        self.val_loss = self.validate()
        if not math.isfinite(self.val_loss):
            what = f"the validation loss is {self.val_loss} at step {self.step}"
            raise QkvError(what, hint=self._against_divergence)
        record: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "val_loss": self.val_loss}
        # a compiled block would be compiled anew for every length
        with self.averaging.applied(), torch.compiler.set_stance("force_eager"):
            self.measure = self._measure()
            if self.measure is not None:
                record[f"val_{self.measure.name}"] = self.measure.value
            run.log(record)
            self.tell({"event": "validation", **record})
            path = run.path / "samples" / f"step-{self.step:06d}.txt"
            with written("the samples", path):
                path.parent.mkdir(exist_ok=True)
                write_sample(path, self.network, self.tokenizer, self.source_tokenizer, self.prepared.validation)

    def _measure(self) -> Measure | None:
        """What the task itself is judged by, on the data held out."""
        assert self.prepared.validation is not None
        return measure(self.objective, self.network, self.prepared.validation, self.tokenizer)

    def save(self, run: RunFolder) -> Path:
        """Write a complete checkpoint of this step and drop those that rotation drops."""
        self._require_finite_weights()
        path = run.checkpoint_path(self.step)
        require_space(run.path, self.space // 2, under_way=self.saved)
        training = self.optimizer.state() | self.averaging.state()
        training |= {f"generator/{name}": state for name, state in read_generators(self.compute.device).items()}
        state = {
            "step": self.step,
            "skipped": self.skipped,
            "tokens": self.tokens,
            "loss": self.loss,
            "val_loss": self.val_loss,
            "measure": None if self.measure is None else asdict(self.measure),
            "seconds": self.seconds,
            "probe_loss": self._probe(),
            "compiled": self.compute.compiled,
            "loader": self.loader.state_dict(),
            "data": self.prepared.fingerprint,
        }
        with self.averaging.applied():
            save_checkpoint(
                path,
                self.network,
                self.config,
                self.tokenizer,
                source_tokenizer=self.source_tokenizer,
                training=training,
                state=state,
            )
        self.saved = True
        run.rotate(self.config.train.keep)
        self.tell({"event": "checkpoint", "step": self.step, "path": str(path)})
        return path

    def _require_finite_weights(self) -> None:
        for name, parameter in self.network.named_parameters():
            if not parameter.isfinite().all():
                raise QkvError(
                    f"the weights of {name} are not all finite after step {self.step}, and were not saved",
                    hint=self._against_divergence,
                )

    def take_up(self, state: dict[str, Any], training: dict[str, torch.Tensor]) -> None:
        """Continue from what `save` wrote."""
        self.saved = True
        self.step, self.tokens, self.seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])
        self.skipped = int(state.get("skipped", 0))
        self.loss, self.val_loss = state["loss"], state["val_loss"]
        self.measure = Measure(**state["measure"]) if state.get("measure") else None
        self.loader.load_state_dict(state["loader"])
        self.optimizer.load_state(training)
        self.averaging.load_state(training)
        generators = {key.partition("/")[2]: value for key, value in training.items() if key.startswith("generator/")}
        if "cpu" not in generators:
            raise QkvError("the generators' states are missing from training.safetensors")
        self._dropout = generators
        probe, told = self._probe(), state["probe_loss"]
        if probe is not None and told is not None:
            self.tell({"event": "note", "text": f"loss on the fixed batch: {told:.6f} when saved, {probe:.6f} now"})
            if abs(probe - told) > 1e-2 * max(abs(told), 1.0):
                raise QkvError(f"the model that was loaded is not the one that was saved ({told:.6f}, {probe:.6f})")

    @property
    def space(self) -> int:
        """Bytes of two checkpoints: weights, two moments and, beside averaged weights, trained ones, in float32."""
        copies = 3 + isinstance(self.averaging, Averaged)
        return 2 * sum(copies * 4 * parameter.numel() for parameter in self.network.parameters())


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

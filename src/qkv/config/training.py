"""How a model is trained: optimiser, schedule, steps and batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qkv.config.base import MAX_COUNT, Count, Kinds, Node, Part, contradiction
from qkv.config.numbers import Length, Probability


class OptimizerConfig(Part):
    """`lr` is the peak of the schedule. Weight decay acts on matrices only."""

    lr: float = Field(1e-3, gt=0)


class AdamConfig(OptimizerConfig):
    """Adam as in "Attention Is All You Need", 5.3: without weight decay."""

    kind: Literal["adam"] = "adam"
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    eps: float = Field(1e-9, gt=0)


class AdamWConfig(OptimizerConfig):
    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)


class MuonConfig(OptimizerConfig):
    """Muon on the hidden matrices (`lr`, `momentum`), AdamW (`adam_lr`, `betas`, `eps`) on the rest.

    adjust_lr: what `lr` is multiplied by for a matrix of r rows and c columns: sqrt(max(1, r / c)) (original: Jordan et
    al. 2024), or 0.2 sqrt(max(r, c)), with which a learning rate of AdamW serves (match-rms-adamw: arXiv 2502.16982).
    """

    kind: Literal["muon"] = "muon"
    lr: float = Field(0.02, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    momentum: Probability = 0.95
    adjust_lr: Literal["original", "match-rms-adamw"] = "original"
    adam_lr: float = Field(3e-3, gt=0)
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)


class ScheduleFreeConfig(OptimizerConfig):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): an average of the weights, which is what is
    evaluated and saved, takes the place of a falling learning rate."""

    kind: Literal["schedule-free"] = "schedule-free"
    lr: float = Field(2.5e-3, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], Probability] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)


Optimizer = Annotated[OptimizerConfig, Kinds(AdamWConfig, AdamConfig, MuonConfig, ScheduleFreeConfig)]


class ScheduleConfig(Part):
    """The learning rate over the steps, as a share of its peak. It rises linearly, and never uses 0, for `warmup` steps
    or, by `warmup_unit`, for the steps that so many target tokens fill."""

    warmup: int = Field(0, ge=0, le=MAX_COUNT)
    warmup_unit: Literal["steps", "tokens"] = "steps"


class CosineScheduleConfig(ScheduleConfig):
    """Half a cosine from the peak to `final` of it."""

    kind: Literal["cosine"] = "cosine"
    final: float = Field(0.1, ge=0, le=1)


class WSDScheduleConfig(ScheduleConfig):
    """Warm up, stay, and fall linearly to `final` over the last `decay` of the steps."""

    kind: Literal["wsd"] = "wsd"
    decay: float = Field(0.2, ge=0, le=1)
    final: float = Field(0.0, ge=0, le=1)


class InverseSqrtScheduleConfig(ScheduleConfig):
    """2017: after its warm-up it falls with the inverse square root of the step."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    warmup: Count = 4000


class ConstantScheduleConfig(ScheduleConfig):
    kind: Literal["constant"] = "constant"


Schedule = Annotated[
    ScheduleConfig, Kinds(CosineScheduleConfig, WSDScheduleConfig, InverseSqrtScheduleConfig, ConstantScheduleConfig)
]


class RampStageConfig(Node):
    """So many steps at the beginning of a run, or after the stage before, with rows of another length or other batches
    than the rest of it has (null: the same)."""

    steps: Count
    max_seq_len: Length | None = None
    batch_tokens: Count | None = None


class TrainConfig(Node):
    """How long, how fast, how much at once. Token counts are target tokens, of texts with a label their tokens; padding
    is not counted. `micro_batch_tokens`, what is in memory at once, counts the longer side of pairs.

    ramp: the stages that a run begins with; few, as compiled code is made anew for every length. ema: the share of the
    old in a moving average of the weights, which is what is then evaluated and saved as the model. skip_non_finite: how
    many steps of a run may be passed over because their loss or gradient is no number; the next one stops it.
    activation_checkpointing: the backward pass computes blocks again, which takes time and saves memory.
    """

    steps: Count = 1000
    batch_tokens: Count = 16384
    micro_batch_tokens: Count | None = None
    ramp: tuple[RampStageConfig, ...] = Field((), max_length=4)
    optimizer: Optimizer = AdamWConfig()
    schedule: Schedule = CosineScheduleConfig()
    ema: float | None = Field(None, gt=0, lt=1)
    clip: float | None = Field(1.0, gt=0)
    skip_non_finite: int = Field(3, ge=0, le=MAX_COUNT)
    label_smoothing: Probability = 0.0
    log_every: Count = 10
    eval_every: Count | None = 250
    save_every: Count | None = 250
    keep: Count = 2
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    activation_checkpointing: bool = False
    device: str = "auto"
    seed: int = Field(0, ge=0, le=MAX_COUNT)

    @model_validator(mode="before")
    @classmethod
    def _usual_schedule(cls, data: Any) -> Any:
        """A schedule that is not named is constant where the optimiser is schedule-free."""
        if not isinstance(data, Mapping) or _kind_of(data.get("optimizer")) != "schedule-free":
            return data
        schedule = data.get("schedule") or {}
        if isinstance(schedule, Mapping) and not schedule.get("kind"):
            data = {**data, "schedule": {**schedule, "kind": "constant"}}
        return data

    @model_validator(mode="after")
    def _averages_once(self) -> Self:
        if isinstance(self.optimizer, ScheduleFreeConfig):
            if not isinstance(self.schedule, ConstantScheduleConfig):
                raise contradiction(
                    "train.optimizer.kind",
                    "train.schedule.kind",
                    "schedule-free averages instead of lowering the learning rate",
                    "train.schedule.kind=constant",
                )
            if self.ema is not None:
                raise contradiction(
                    "train.optimizer.kind", "train.ema", "schedule-free averages the weights itself", "train.ema=null"
                )
        return self

    @model_validator(mode="after")
    def _ramp_ends(self) -> Self:
        ramped = sum(stage.steps for stage in self.ramp)
        if ramped >= self.steps:
            raise contradiction(
                "train.ramp",
                "train.steps",
                f"the ramp takes {ramped} of {self.steps} steps, and none is left after it",
                "shorter stages or more steps",
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        peak = self.schedule_by_step.warmup
        if peak > self.steps and not isinstance(self.schedule, InverseSqrtScheduleConfig):
            shorter = (self.steps if self.schedule.warmup_unit == "steps" else self.tokens) // 10
            raise contradiction(
                "train.schedule.warmup",
                "train.steps",
                f"the warm-up takes {peak:,} steps, and the run has {self.steps:,}",
                f"train.schedule.warmup={shorter} or train.steps={peak}",
            )
        return self

    @property
    def schedule_by_step(self) -> ScheduleConfig:
        """The schedule with its warm-up in steps: those that are planned to hold its tokens, where it is in tokens."""
        if self.schedule.warmup_unit == "steps":
            return self.schedule
        warmup = self._steps_that_fill(self.schedule.warmup)
        return self.schedule.model_copy(update={"warmup": warmup, "warmup_unit": "steps"})

    def _steps_that_fill(self, tokens: int) -> int:
        steps = 0
        for stage in self.ramp:
            size = stage.batch_tokens or self.batch_tokens
            if tokens <= size * stage.steps:
                return steps + math.ceil(tokens / size)
            tokens -= size * stage.steps
            steps += stage.steps
        return steps + math.ceil(tokens / self.batch_tokens)

    def describe_ramp(self) -> list[str]:
        """One line per stage."""
        lines, first = [], 1
        for stage in self.ramp:
            last = first + stage.steps - 1
            rows = f" in rows of {stage.max_seq_len:,}" if stage.max_seq_len else ""
            lines.append(f"steps {first} to {last}: {stage.batch_tokens or self.batch_tokens:,} tokens each{rows}")
            first = last + 1
        return lines

    @property
    def tokens(self) -> int:
        """The tokens that the whole run is planned to see."""
        ramp = [(stage.steps, stage.batch_tokens or self.batch_tokens) for stage in self.ramp]
        after = self.steps - sum(steps for steps, _ in ramp)
        return sum(steps * size for steps, size in ramp) + after * self.batch_tokens


def _kind_of(part: Any) -> Any:
    return part.get("kind") if isinstance(part, Mapping) else getattr(part, "kind", None)

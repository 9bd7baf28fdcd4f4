"""Runs that take a fraction of a second, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qkv.config.run import Config
from qkv.data import BatchLoader, Prepared, prepare
from qkv.data.tokenizers import tokenizer_for
from qkv.nn.transformer import Transformer
from qkv.tokenizer import Tokenizer
from qkv.train.loop import fit
from qkv.train.sizes import sized

CONFIG = """
model:
  family: {family}
  max_seq_len: 16
  d_model: 32
  num_layers: 2
  attention: {{num_heads: 2}}
  feed_forward: {{d_ff: 48}}
tokenizer: {{kind: byte}}
data: {{train: [corpus.txt], split: lines, validation: 0.1}}
train:
  steps: 4
  batch_tokens: 128
  log_every: 1
  eval_every: null
  save_every: null
  keep: 100
  precision: fp32
  compile: 'off'
  device: cpu
"""
TASKS = {
    "causal": ("model.family=decoder",),
    "masked": ("model.family=encoder",),
    "translate": ("model.family=encoder-decoder", "data=null", "data={train: [pairs.tsv], validation: 0.1}"),
    "denoise": ("model.family=encoder-decoder", "objective.kind=denoise"),
    "span": ("model.family=encoder-decoder", "objective.kind=span"),
    "classify": (
        "model.family=encoder",
        "model.head.kind=classifier",
        "data=null",
        "data={train: [reviews.tsv], validation: 0.1}",
    ),
}
"""What makes the small configuration one of each task."""
MUON = ("train.optimizer.kind=muon", "train.optimizer.lr=0.02")
ADAMW = ("train.optimizer.lr=0.01",)


def write_config(family: str = "decoder", name: str = "small.yaml") -> Path:
    """The configuration as a file in the working folder."""
    path = Path(name)
    path.write_text(CONFIG.format(family=family), encoding="utf-8")
    return path


def config(*overrides: str, family: str = "decoder") -> Config:
    """The small configuration with `key=value` overrides."""
    return Config.load(write_config(family), *overrides)


def train(run: str, *overrides: str, family: str = "decoder") -> Path:
    """A finished run in the folder `run`."""
    return fit(config(*overrides, family=family), run_dir=run).path


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, which must be strict JSON."""
    text = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def losses(run: str | Path) -> list[tuple[int, float]]:
    """(step, training loss) of every line that has one."""
    return [(line["step"], line["loss"]) for line in metrics(run) if "loss" in line]


def steps_of(run: str | Path) -> list[str]:
    """What is in the folder of checkpoints."""
    return sorted(path.name for path in (Path(run) / "checkpoints").iterdir())


def step(run: str | Path, number: int) -> Path:
    """A checkpoint's folder."""
    return Path(run) / "checkpoints" / f"step-{number:06d}"


def weights(run: str | Path, number: int) -> dict[str, Tensor]:
    """The parameters saved after a step."""
    return load_file(step(run, number) / "model.safetensors")


def rewrite_state(folder: Path, **changes: Any) -> None:
    """A checkpoint whose state.json says something else, as if it had been written so."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    del state["sha256"]
    (folder / "state.json").write_text(json.dumps({**state, **changes}), encoding="utf-8")


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_same_checkpoint(first: Path, second: Path) -> None:
    """Weights, optimiser, generators and the place in the data, bit for bit."""
    for file in ("model.safetensors", "training.safetensors"):
        assert_equal(load_file(first / file), load_file(second / file))
    states = [json.loads((folder / "state.json").read_text(encoding="utf-8")) for folder in (first, second)]
    for state in states:
        del state["seconds"], state["files"], state["sha256"]
    assert states[0] == states[1]


def parts(settings: Config) -> tuple[Tokenizer, Prepared, Transformer]:
    """What `fit` starts from: tokenizer, data, and the network with its first weights."""
    tokenizer = tokenizer_for(settings, "cache")
    prepared = prepare(settings, tokenizer, "cache/data")
    generator = torch.Generator().manual_seed(settings.train.seed)
    settings = sized(settings, tokenizer, None, prepared.labels)
    return tokenizer, prepared, Transformer(settings.model, generator=generator)


def first_step(settings: Config) -> list[Any]:
    """The micro-batches of step 1."""
    return first_steps(settings, 1)[0]


def first_steps(settings: Config, count: int) -> list[list[Any]]:
    """The micro-batches of the first steps."""
    tokenizer, prepared, _ = parts(settings)
    loader = BatchLoader(
        prepared.train,
        settings.objective,
        tokenizer,
        max_seq_len=settings.model.context,
        batch_tokens=settings.train.batch_tokens,
        micro_batch_tokens=settings.train.micro_batch_tokens,
        ramp=settings.train.ramp,
        seed=settings.train.seed,
    )
    return [next(loader) for _ in range(count)]

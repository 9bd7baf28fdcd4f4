"""A run that starts from the weights of a trained model."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch

from qkv.checkpoint.load import load_model
from qkv.checkpoint.lock import locked
from qkv.config.errors import ConfigError, UsageError
from qkv.config.finetune import finetune_config
from qkv.config.objectives import ClassifyObjectiveConfig, ObjectiveConfig
from qkv.data.tokenizers import has_texts
from qkv.nn.transformer import Transformer
from qkv.train.loop import Listener, Run, new_trainer
from qkv.train.run_folder import RunFolder, require_unused


def finetune(
    model: str | PathLike[str],
    config: str | PathLike[str],
    *overrides: str,
    run_dir: str | PathLike[str] | None = None,
    name: str = "run",
    listener: Listener | None = None,
    allow: tuple[str, ...] = (),
) -> Run:
    """Train `model` on, as `config` says, in a new run folder (`run_dir`, or one under runs/).

    model: what `qkv.load` takes. config: a file or a preset, with `key=value` overrides. The shape of the model and its
    tokenizer are the trained ones; `config` needs no `model` section, and with one it may give the model another head,
    other dropouts and another context. Every parameter that the model has is taken; a head it has not, and scores of
    classes it does not know, start as in a new run. allow: as in `qkv.load`.

    Raises QkvError for what cannot be trained, ConfigError for a `config` of another shape; Interrupted after Ctrl-C.
    """
    place = Path(run_dir) if run_dir else None
    if place is not None:
        require_unused(place)
    loaded = load_model(Path(model), dtype=torch.float32, allow=allow)
    settings = finetune_config(Path(config), overrides, loaded.config, f"the model {loaded.path}", allow or None)
    if loaded.tokenizer is None and has_texts(settings):
        raise UsageError("the model has no tokenizer, so it cannot read texts", where=str(loaded.path))
    trainer = new_trainer(settings, loaded.tokenizer, loaded.source_tokenizer, listener)
    same_classes = _classes(trainer.objective) == _classes(loaded.config.objective)
    fresh = take_weights(trainer.network, loaded.network, same_classes=same_classes)
    started = f"; {', '.join(fresh)} start{'s' if len(fresh) == 1 else ''} fresh" if fresh else ""
    trainer.tell({"event": "note", "text": f"starting from {loaded.path}{started}"})
    about = {"started_from": str(loaded.path), **trainer.about}
    run = RunFolder.create(trainer.config, name, place, space=trainer.space, about=about)
    with locked(run.path):
        return trainer.run_in(run)


def _classes(objective: ObjectiveConfig) -> tuple[str, ...] | None:
    return objective.labels if isinstance(objective, ClassifyObjectiveConfig) else None


@torch.no_grad()
def take_weights(network: Transformer, trained: Transformer, *, same_classes: bool = True) -> list[str]:
    """Give `network` every parameter of `trained` that has its name and shape. Returns the names of the others, which
    stay as they are: only the head may have such.

    same_classes: what the scores of a classifier stand for is the same in both; otherwise they are not taken.
    Raises ConfigError for a parameter outside the head that `trained` does not have.
    """
    there = dict(trained.named_parameters(remove_duplicate=False))  # a matrix no longer tied is under both its names
    fresh = []
    for name, parameter in network.named_parameters():
        known = there.get(name)
        scores = name.startswith("head.output.")
        if known is not None and known.shape == parameter.shape and (same_classes or not scores):
            parameter.copy_(known)
        elif name.startswith("head."):
            fresh.append(name)
        else:
            had = "does not have it" if known is None else f"has it as {list(known.shape)}"
            raise ConfigError(f"the network needs `{name}` {list(parameter.shape)}, and the trained model {had}")
    return fresh

"""What the model is asked to predict: one class per objective, from windows of tokens to inputs and labels.

B rows, T slots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import TYPE_CHECKING, Protocol

import numpy as np

from qkv.config.base import import_object
from qkv.config.errors import ConfigError
from qkv.config.objectives import CausalObjectiveConfig, MaskedObjectiveConfig, ObjectiveConfig
from qkv.data.windows import Ints, Window
from qkv.nn import IGNORE

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer


class Objective(Protocol):
    """Makes inputs and labels. `lookahead` is the number of tokens after a slot that its label needs."""

    lookahead: int

    def targets(self, window: Window, keys_B: Sequence[tuple[int, ...]]) -> tuple[Ints, Ints]:
        """Inputs and labels [B, T]; the logits at a slot predict the label of the same slot, IGNORE for none.

        `keys_B` seed all that is random about a row, so that a row is the same whenever it is made. Padding needs no
        care: the caller overwrites it.
        """


@singledispatch
def build_objective(config: ObjectiveConfig, tokenizer: Tokenizer) -> Objective:
    """The objective of a configuration. Raises ConfigError when the tokenizer lacks what it needs."""
    if config.module is None:
        raise ConfigError(f"no data can be made for `{config.kind}` from plain documents", where="objective.kind")
    return import_object(config.module)(config, tokenizer)  # type: ignore[no-any-return]


class Causal:
    """Every next token of the same document: the last input of a document is labelled with its EOS."""

    lookahead = 1

    def targets(self, window: Window, keys_B: Sequence[tuple[int, ...]]) -> tuple[Ints, Ints]:
        return window.tokens_BT, window.next_BT


@build_objective.register(CausalObjectiveConfig)
def _(config: CausalObjectiveConfig, tokenizer: Tokenizer) -> Causal:
    return Causal()


class Masked:
    """BERT (arXiv 1810.04805, 3.1): `rate` of the tokens of each row are targets, special tokens never.

    Their number is `rate` of the row's tokens, rounded, and at least one (none in a row of special tokens only). Of
    the targets 80 % are replaced by [MASK], 10 % by a random ordinary token, and 10 % stay.
    """

    lookahead = 0

    def __init__(self, rate: float, mask_id: int, special_ids: Sequence[int], vocab_size: int) -> None:
        self.rate, self.mask_id = rate, mask_id
        self.ordinary_V = np.ones(vocab_size, np.bool_)
        self.ordinary_V[list(special_ids)] = False
        self.ordinary_ids = np.flatnonzero(self.ordinary_V)

    def targets(self, window: Window, keys_B: Sequence[tuple[int, ...]]) -> tuple[Ints, Ints]:
        tokens_BT = window.tokens_BT
        random_3BT = np.stack([np.random.default_rng(key).random((3, tokens_BT.shape[1])) for key in keys_B], axis=1)
        order_BT, action_BT, other_BT = random_3BT

        eligible_BT = self.ordinary_V[tokens_BT] & window.real_BT
        eligible_B1 = eligible_BT.sum(axis=1, keepdims=True)
        wanted_B1 = np.minimum(np.maximum(np.rint(self.rate * eligible_B1), 1), eligible_B1)
        rank_BT = np.where(eligible_BT, order_BT, 1).argsort(axis=1).argsort(axis=1)
        chosen_BT = rank_BT < wanted_B1

        random_BT = self.ordinary_ids[(other_BT * len(self.ordinary_ids)).astype(np.int64)]
        replaced_BT = np.where(action_BT < 0.8, self.mask_id, np.where(action_BT < 0.9, random_BT, tokens_BT))
        return np.where(chosen_BT, replaced_BT, tokens_BT), np.where(chosen_BT, tokens_BT, IGNORE)


@build_objective.register(MaskedObjectiveConfig)
def _(config: MaskedObjectiveConfig, tokenizer: Tokenizer) -> Masked:
    if tokenizer.mask_id is None:
        raise ConfigError(
            "the tokenizer has no mask token", where="objective.kind=masked", hint="tokenizer.kind=wordpiece"
        )
    return Masked(config.rate, tokenizer.mask_id, list(tokenizer.special_ids), tokenizer.vocab_size)

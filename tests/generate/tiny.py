"""Tiny networks with random weights, spread widely enough that no two tokens are as good as equal."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from qkv.config.model import ModelConfig
from qkv.config.run import Config
from qkv.generate import Decoding, Generation, Sampling, Token
from qkv.model import Model
from qkv.nn import Transformer
from qkv.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
CONTEXT = 48


@cache
def byte_tokenizer() -> Tokenizer:
    """Every byte an id, then pad, bos, eos, mask: 260 ids."""
    return Tokenizer.train("any text", kind="byte")


def config(**changes: Any) -> ModelConfig:
    tree: dict[str, Any] = {
        "vocab_size": 260,
        "max_seq_len": CONTEXT,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "feed_forward": {"kind": "swiglu", "d_ff": 24},
        "init": {"kind": "normal", "std": 0.5},
    }
    return ModelConfig.model_validate({**tree, **changes})


def network(seed: int = 0, **changes: Any) -> Transformer:
    return Transformer(config(**changes), generator=torch.Generator().manual_seed(seed)).eval()


def model(tokenizer: Tokenizer | None = None, seed: int = 0, **changes: Any) -> Model:
    made = network(seed, **changes)
    return Model(made, tokenizer or byte_tokenizer(), Config(model=made.config))


class Scripted(Transformer):
    """Writes `script` after a prompt of `after` tokens, whatever stands there; then EOS for ever."""

    def __init__(self, script: bytes, after: int) -> None:
        super().__init__(config(max_seq_len=256))
        self.script, self.after = script, after

    def forward(self, ids: Tensor, *, lengths: Tensor | None = None, cache: Any = None, **_: Any) -> Tensor:  # type: ignore[override]
        seen = torch.full((len(ids),), ids.shape[1]) if lengths is None else lengths
        if cache is not None:
            seen = seen + cache.lengths_B
            cache.advance(ids.shape[1], lengths)
        logits = torch.zeros(len(ids), 1, 260)
        for row, count in enumerate(seen.tolist()):
            written = count - self.after
            logits[row, 0, self.script[written] if 0 <= written < len(self.script) else 258] = 50.0
        return logits


def scripted(script: str | bytes, prompt: str = "p") -> Model:
    """A model that answers `prompt` with `script` and EOS."""
    data = script.encode() if isinstance(script, str) else script
    made = Scripted(data, after=1 + len(prompt.encode()))
    return Model(made, byte_tokenizer(), Config(model=made.config))


def decode(made: Transformer, prompts: list[list[int]], **options: Any) -> Decoding:
    """Run to the end."""
    defaults: dict[str, Any] = {"sampling": GREEDY, "seeds": [0] * len(prompts), "max_new_tokens": 20}
    decoding = Decoding(made, prompts, **{**defaults, **options})
    tokens: list[Token] = list(decoding)
    assert [[token.token_id for token in tokens if token.row == row] for row in range(len(prompts))] == (
        decoding.generated
    )
    return decoding


def greedy_by_hand(made: Transformer, prompt: list[int], count: int, **source: Tensor) -> list[int]:
    """The oracle: the whole text again for every token, alone, without anything of `qkv.generate`."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(made(torch.tensor([ids]), **source)[0, -1].argmax()))
    return ids[len(prompt) :]


def same(one: Generation, other: Generation) -> bool:
    """Equal in all but time."""
    return (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)

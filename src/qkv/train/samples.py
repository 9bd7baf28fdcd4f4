"""What a model in training writes, so that one can read along."""

from __future__ import annotations

from pathlib import Path

import torch

from qkv.generate.decode import Decoding
from qkv.generate.prompts import begin_of
from qkv.generate.sampling import Sampling
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

TOKENS = 128


def write_sample(path: Path, network: Transformer, tokenizer: Tokenizer) -> str | None:
    """Let a decoder write from the beginning of a text, always with the same seed, and keep it at `path`.

    Draws nothing from a global generator. Returns the text, or None where nothing stands for a beginning.
    """
    begin = begin_of(tokenizer)
    if network.config.family != "decoder" or not begin:
        return None
    decoding = Decoding(
        network,
        [begin],
        sampling=Sampling(temperature=0.8),
        seeds=[0],
        max_new_tokens=TOKENS,
        eos_ids=[] if tokenizer.eos_id is None else [tokenizer.eos_id],
        vocab_size=tokenizer.vocab_size,
    )
    with torch.compiler.set_stance("force_eager"):  # a compiled block would be compiled anew for every length
        for _ in decoding:
            pass
    text = tokenizer.decode(decoding.generated[0])
    path.write_text(text + "\n", encoding="utf-8")
    return text

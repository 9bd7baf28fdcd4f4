"""Logits -> tokens -> text: sampling, stopping, decoding with and without a cache, scoring, filling gaps."""

from qkv.generate.decode import Decoding, Token
from qkv.generate.masked import Candidate, fill_mask
from qkv.generate.sampling import Sampling
from qkv.generate.scoring import Score, score
from qkv.generate.stopping import StopStrings
from qkv.generate.text import Generation, TextStream, TokenLogprob, Writing

__all__ = [
    "Candidate",
    "Decoding",
    "Generation",
    "Sampling",
    "Score",
    "StopStrings",
    "TextStream",
    "Token",
    "TokenLogprob",
    "Writing",
    "fill_mask",
    "score",
]

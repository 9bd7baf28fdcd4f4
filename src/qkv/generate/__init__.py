"""Logits -> tokens -> text: sampling, beam search, stopping, translating, scoring; and texts as vectors and classes."""

from qkv.generate.beam import Beams, Hypothesis, beam_search
from qkv.generate.classify import Classification, classify
from qkv.generate.decode import Decoding, Token
from qkv.generate.embed import embed
from qkv.generate.masked import Candidate, fill_mask
from qkv.generate.sampling import Sampling
from qkv.generate.scoring import Score, score
from qkv.generate.stopping import StopStrings
from qkv.generate.suppression import Suppression
from qkv.generate.text import Generation, TextStream, TokenLogprob, Writing
from qkv.generate.translate import Alternative, Translation, translate

__all__ = [
    "Alternative",
    "Beams",
    "Candidate",
    "Classification",
    "Decoding",
    "Generation",
    "Hypothesis",
    "Sampling",
    "Score",
    "StopStrings",
    "Suppression",
    "TextStream",
    "Token",
    "TokenLogprob",
    "Translation",
    "Writing",
    "beam_search",
    "classify",
    "embed",
    "fill_mask",
    "score",
    "translate",
]

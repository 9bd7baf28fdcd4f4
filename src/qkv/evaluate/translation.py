"""How close translations come to those of people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, get_args

from qkv.config.errors import UsageError, nearest
from qkv.evaluate.pairs import HAN, references_of

BleuTokenizer = Literal["auto", "13a", "intl", "zh", "char", "none", "ja-mecab", "ko-mecab"]

_HAN = re.compile(f"[{HAN}]")


@dataclass(frozen=True)
class TranslationScores:
    """BLEU and chrF, 0 to 100, higher is better; the signatures say how each was computed, and belong beside it.

    `four_grams`: how many runs of four words the hypotheses have; BLEU, which counts them, is 0 where there is none.
    """

    bleu: float
    chrf: float
    signature: str
    chrf_signature: str
    sentences: int
    four_grams: int


def translation_scores(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    tokenize: BleuTokenizer = "auto",
    lowercase: bool = False,
) -> TranslationScores:
    """Corpus BLEU (Papineni et al. 2002) and chrF (Popović 2015) as sacreBLEU has them (Post 2018).

    Both sides are plain text, not split into tokens: sacreBLEU does that itself. A hypothesis has one reference or a
    list of several. `tokenize` is how BLEU finds words; `auto` is `zh` where more than half of the references' letters
    are Chinese characters, and otherwise `13a`, which expects spaces between words. Japanese and Korean are asked for
    by name, `ja-mecab` and `ko-mecab`, and need `pip install "sacrebleu[ja]"` or `"sacrebleu[ko]"`.

    Raises UsageError for unequal counts, for nothing to score, and for a tokenizer that is unknown or not installed.
    """
    listed = references_of(hypotheses, references)
    if tokenize not in get_args(BleuTokenizer):
        guess = nearest(tokenize, get_args(BleuTokenizer))
        raise UsageError(f"BLEU has no tokenizer `{tokenize}` here", hint=guess or ", ".join(get_args(BleuTokenizer)))
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    try:
        bleu = BLEU(tokenize=_tokenizer_for(listed) if tokenize == "auto" else tokenize, lowercase=lowercase)
    except RuntimeError:
        extra = f"sacrebleu[{tokenize[:2]}]"
        raise UsageError(f"BLEU's tokenizer `{tokenize}` is not installed", hint=f'pip install "{extra}"') from None
    chrf = CHRF(lowercase=lowercase)
    streams: list[Any] = list(zip_longest(*listed))  # one per reference; None where a hypothesis has no more
    found = bleu.corpus_score(hypotheses, streams)
    return TranslationScores(
        bleu=found.score,
        chrf=chrf.corpus_score(hypotheses, streams).score,
        signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        sentences=len(hypotheses),
        four_grams=found.totals[-1],
    )


def _tokenizer_for(references: list[list[str]]) -> BleuTokenizer:
    text = "".join(reference for several in references for reference in several)
    letters = sum(character.isalpha() for character in text)
    return "zh" if 2 * len(_HAN.findall(text)) > letters else "13a"

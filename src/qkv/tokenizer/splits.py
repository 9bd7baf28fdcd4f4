"""How known byte-level BPE tokenizers cut text before they merge.

The same vocabulary with another cut gives other ids, so a file says by name which one it was made with; a name that is
not here is refused. Patterns are those of the published tokenizers, in the syntax of Oniguruma.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{suffix}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{suffix}"
)


def _words(digits: str) -> str:
    """Words with one sign before them, numbers, runs of signs, lines, spaces: cl100k's cut and its descendants'."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
    )


def _cased_words(suffix: str, digits: str) -> str:
    """As `_words`, where a word also ends before a capital letter."""
    words = _WORDS_BY_CASE.replace("{suffix}", suffix)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"


@dataclass(frozen=True)
class Split:
    """A way to cut text.

    pattern: each match is a piece; None is GPT-2's own. digits: every digit is a piece, whatever the pattern says.
    form: the Unicode normalisation before. whole_pieces: a piece that is a token is taken as it is, without merging.
    prefix_space: GPT-2's cut begins with a space, whether the text does or not.
    """

    pattern: str | None = None
    digits: bool = False
    form: Literal["NFC"] | None = None
    whole_pieces: bool = False
    prefix_space: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        """What happens to text before it is cut."""
        return normalizers.NFC() if self.form else None

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """The cut, and bytes spelled as characters."""
        if self.pattern is not None:
            cut = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        plain = pre_tokenizers.ByteLevel(add_prefix_space=self.prefix_space)
        if not self.digits:
            return plain
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])


_GPT2 = Split()
_GPT2_NFC = Split(form="NFC")
_GPT2_DIGITS = Split(digits=True)
_THREE_DIGITS = _words(r"\p{N}{1,3}")
_LLAMA3 = Split(_THREE_DIGITS, whole_pieces=True)
_QWEN2 = Split(_words(r"\p{N}"), form="NFC")
_O200K = _cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")

# cl100k alone keeps white space at the very end of a text in one piece, line ends and all
_CL100K = _THREE_DIGITS.replace(_LINES_AND_SPACES, rf"\s+\z|{_LINES_AND_SPACES}")

GGUF_SPLITS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2_NFC,
    "olmo": _GPT2_NFC,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": Split(_THREE_DIGITS),
    "smaug-bpe": Split(_THREE_DIGITS),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Split(_cased_words("", r"\p{N}"), whole_pieces=True),
    "gpt-4o": Split(_O200K),
    "llama4": Split(_O200K),
}
"""`tokenizer.ggml.pre` of a GGUF file -> the cut."""


@dataclass(frozen=True)
class Encoding:
    """A published tiktoken encoding: its cut, and the special tokens that its rank file does not hold."""

    split: Split
    special: dict[str, int]
    bos: str | None = None
    eos: str = "<|endoftext|>"
    sha256: str | None = None


def _llama3_special() -> dict[str, int]:
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
    reserved = iter(range(256))
    names = [named.get(place) or f"reserved_special_token_{next(reserved)}" for place in range(256)]
    return {f"<|{name}|>": 128_000 + place for place, name in enumerate(names)}


_FIM = {"<|fim_prefix|>": 100_258, "<|fim_middle|>": 100_259, "<|fim_suffix|>": 100_260}
_R50K_SPLIT = Split(whole_pieces=True)

TIKTOKEN_ENCODINGS = {
    "r50k_base": Encoding(
        _R50K_SPLIT,
        {"<|endoftext|>": 50_256},
        sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    ),
    "p50k_base": Encoding(
        _R50K_SPLIT,
        {"<|endoftext|>": 50_256},
        sha256="94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    ),
    "cl100k_base": Encoding(
        Split(_CL100K, whole_pieces=True),
        {"<|endoftext|>": 100_257, **_FIM, "<|endofprompt|>": 100_276},
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k_base": Encoding(
        Split(_O200K, whole_pieces=True),
        {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    "llama3": Encoding(_LLAMA3, _llama3_special(), bos="<|begin_of_text|>", eos="<|end_of_text|>"),
    "qwen": Encoding(
        Split(_words(r"\p{N}"), form="NFC", whole_pieces=True),
        {token: 151_643 + n for n, token in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
        | {f"<|extra_{n}|>": 151_646 + n for n in range(205)},
    ),
}
"""Name -> encoding. A rank file is recognised by its digest or by its name; otherwise it has to be named."""

"""Kinds of tokenizers, and texts to try them on."""

from __future__ import annotations

import base64
import random

KINDS = ("bpe", "unigram", "wordpiece", "word", "char", "byte")
RUNS = ("a", "^", "Chinese", "base64")
CHINESE = (
    "满纸荒唐言，一把辛酸泪！都云作者痴，谁解其中味？\n此开卷第一回也。作者自云：因曾历过一番梦幻之后，故将真事隐去。"
)


def huge_run(name: str, length: int) -> str:
    """`length` characters without a place to cut: of one letter, one sign, Chinese, or base64."""
    chance = random.Random(0)
    if name == "base64":
        return base64.b64encode(chance.randbytes(length)).decode()[:length]
    if name == "Chinese":
        return "".join(chr(chance.randrange(0x4E00, 0x9FA5)) for _ in range(length))
    return name * length

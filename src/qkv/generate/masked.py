"""What an encoder would put in a gap.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from qkv.config.errors import UsageError
from qkv.config.parts import MaskedLanguageModelHeadConfig
from qkv.generate.decode import check_ids, device_of, evaluating, pad
from qkv.generate.prompts import within
from qkv.generate.sampling import refuse_non_finite
from qkv.nn.transformer import Transformer
from qkv.tokenizer.text import normalize
from qkv.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Candidate:
    """What may stand in a masked place; `token` is how it reads."""

    token_id: int
    token: str
    probability: float


@torch.inference_mode()
def fill_mask(network: Transformer, tokenizer: Tokenizer | None, text: str, top: int) -> list[list[Candidate]]:
    """For each mask in `text` the `top` most likely tokens, best first.

    `[MASK]`, `<mask>` and the tokenizer's own spelling stand for its mask token. Where a token carries the space before
    its word, a space before a mask belongs to the masked token. Raises UsageError for a text without a mask, and for
    models and tokenizers that know none.
    """
    head = network.config.head
    if not isinstance(head, MaskedLanguageModelHeadConfig):
        instead = {"classifier": "classify, or ", "language-model": "generate, or "}.get(head.kind if head else "", "")
        raise UsageError(
            f"a model of family {network.config.family} has no masked-language-model head",
            hint=f"{instead}a model trained with objective.kind=masked",
        )
    if tokenizer is None or tokenizer.mask_id is None:
        raise UsageError("the model's tokenizer has no mask token")
    spellings = {"[MASK]", "<mask>", tokenizer.id_to_token(tokenizer.mask_id)}
    parts = re.split("|".join(map(re.escape, sorted(spellings))), normalize(text))
    if len(parts) == 1:
        raise UsageError("the text has no mask to fill", hint='"Paris is the [MASK] of France."')
    if tokenizer.kind in ("bpe", "unigram", "word"):
        parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
    ids = tokenizer.encode(parts[0])
    for part in parts[1:]:
        ids += [tokenizer.mask_id, *tokenizer.encode(part)]
    ids = within(tokenizer, ids)
    check_ids(ids, network.config.vocab_size, "the text")
    with evaluating(network.modules()):
        scores_TV = network(pad([ids], device_of(network))[0])[0].float().cpu()
    result = []
    for place, token_id in enumerate(ids):
        if token_id == tokenizer.mask_id:
            refuse_non_finite(scores_TV[place][None], [0], place + 1)
            p, best = scores_TV[place].softmax(-1)[: tokenizer.vocab_size].topk(min(top, tokenizer.vocab_size))
            result.append(
                [
                    Candidate(number, tokenizer.decode([number], skip_special=False), value)
                    for number, value in zip(best.tolist(), p.tolist(), strict=True)
                ]
            )
    return result

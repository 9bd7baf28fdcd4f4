"""How likely a continuation is, against a hand-made sum; and what fills a mask."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.config.errors import QkvError, UsageError
from qkv.generate import scoring
from qkv.model import Model
from qkv.tokenizer import Tokenizer

from .tiny import CONTEXT, byte_tokenizer, model

WORDS = ["the sky is blue. " * 4 + "bluebird is blue, the bird is the sky. " * 3]


def bpe(**special: str) -> Tokenizer:
    return Tokenizer.train(WORDS, kind="bpe", vocab_size=300, special={"eos": "<eos>", **special})


def sum_by_hand(made: Model, ids: list[int], first: int) -> float:
    """log p of ids[first:] by one full forward."""
    with torch.no_grad():
        logprobs = made.network(torch.tensor([ids]))[0].log_softmax(-1)
    return math.fsum(logprobs[place - 1, ids[place]].item() for place in range(first, len(ids)))


@pytest.mark.parametrize("chunk", [256, 3])
def test_with_bos_every_token_of_the_continuation_is_scored_and_no_other(chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK", chunk)
    made = model()
    found = made.score("The sky is", " blue")
    assert found.token_ids == list(b" blue")
    assert found == pytest.approx(sum_by_hand(made, [257, *b"The sky is blue"], 11), abs=1e-4)
    assert found == pytest.approx(math.fsum(found.logprobs))
    assert len(found.logprobs) == 5
    empty = made.score("", "ab")
    assert empty == pytest.approx(sum_by_hand(made, [257, *b"ab"], 1), abs=1e-4)


def test_without_bos_positions_are_one_earlier_and_a_first_token_is_refused() -> None:
    tokenizer = bpe()
    assert tokenizer.bos_id is None
    made = model(tokenizer, vocab_size=tokenizer.vocab_size)
    ids, before = tokenizer.encode("the sky is blue"), len(tokenizer.encode("the sky is"))
    assert ids[:before] == tokenizer.encode("the sky is")
    assert made.score("the sky is", " blue") == pytest.approx(sum_by_hand(made, ids, before), abs=1e-4)
    with pytest.raises(UsageError, match="nothing before it"):
        made.score("", "blue")


def test_a_token_that_spans_the_join_is_scored() -> None:
    tokenizer = bpe(bos="<bos>")
    made = model(tokenizer, vocab_size=tokenizer.vocab_size)
    assert len(tokenizer.encode(" blue")) == 1
    found = made.score("the sky is bl", "ue")
    assert found.token_ids == tokenizer.encode(" blue")
    ids = [tokenizer.bos_id, *tokenizer.encode("the sky is blue")]
    assert found == pytest.approx(sum_by_hand(made, ids, len(ids) - 1), abs=1e-4)


def test_the_parts_of_a_text_add_up_to_the_whole() -> None:
    made = model()
    assert made.score("", "abc") == pytest.approx(made.score("", "a") + made.score("a", "bc"), abs=1e-4)


def test_a_text_longer_than_the_context_loses_the_start_of_the_prompt_only() -> None:
    made = model()
    prompt = "".join(chr(97 + place % 26) for place in range(CONTEXT + 20))
    found = made.score(prompt, "XYZ")
    # bos, the end of the prompt, and all of the continuation: the last token is predicted and not read
    kept = prompt[-(CONTEXT + 1 - 1 - 3) :]
    assert found.truncated == len(prompt) - len(kept)
    assert found.token_ids == list(b"XYZ")
    read = [257, *kept.encode(), *b"XYZ"]
    with torch.no_grad():
        logprobs = made.network(torch.tensor([read[:-1]]))[0].log_softmax(-1)
    assert found == pytest.approx(sum(logprobs[-3 + n, read[-3 + n]].item() for n in range(3)), abs=1e-4)
    assert made.score("p", "x" * CONTEXT).truncated == 1
    with pytest.raises(UsageError, match=str(CONTEXT + 1)):
        made.score("p", "x" * (CONTEXT + 1))


def test_a_continuation_without_a_token_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to score"):
        model().score("abc", "")


def test_scores_that_are_not_finite_are_an_error() -> None:
    made = model()
    with torch.no_grad():
        made.network.head.weight.fill_(math.nan)
    with pytest.raises(QkvError, match="not finite"):
        made.score("a", "b")


def test_a_target_is_scored_given_its_source() -> None:
    made = model(family="encoder-decoder")
    found = made.score("ab", "cd")
    source = torch.tensor([[257, *b"ab", 258]])
    with torch.no_grad():
        logprobs = made.network(torch.tensor([[257, *b"cd"]]), source=source)[0].log_softmax(-1)
    assert found == pytest.approx((logprobs[0, ord("c")] + logprobs[1, ord("d")]).item(), abs=1e-4)
    assert found != pytest.approx(made.score("ba", "cd"), abs=1e-4)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["[MASK]", "<mask>"])
def test_fill_mask_gives_the_most_likely_tokens_of_the_masked_place(spelling: str) -> None:
    made = model(family="encoder")
    found = made.fill_mask(f"ab{spelling}c", top=7)
    ids = [257, *b"ab", byte_tokenizer().mask_id, *b"c", 258]
    with torch.no_grad():
        p, best = made.network(torch.tensor([ids]))[0, 3].softmax(-1).topk(7)
    assert [candidate.token_id for candidate in found] == best.tolist()
    assert [candidate.probability for candidate in found] == pytest.approx(p.tolist(), abs=1e-5)
    assert found[0].token == byte_tokenizer().decode([found[0].token_id], skip_special=False)


def test_several_masks_and_several_texts_give_lists() -> None:
    made = model(family="encoder")
    two = made.fill_mask("a[MASK]b\r\n[MASK]")
    assert [len(candidates) for candidates in two] == [5, 5]
    assert made.fill_mask(["a[MASK]b\n[MASK]", "[MASK]"])[0] == two


def test_the_space_before_a_mask_belongs_to_a_token_that_carries_it() -> None:
    tokenizer = Tokenizer.train(WORDS, kind="bpe", vocab_size=300)
    made = model(tokenizer, family="encoder", vocab_size=tokenizer.vocab_size)
    read: list[list[int]] = []
    made.network.register_forward_pre_hook(lambda module, args: read.append(args[0][0].tolist()))
    made.fill_mask("the <mask> is")
    ids = tokenizer.encode("the sky is")
    place = ids.index(tokenizer.encode(" sky")[0])
    assert read == [[tokenizer.bos_id, *ids[:place], tokenizer.mask_id, *ids[place + 1 :], tokenizer.eos_id]]


def test_what_cannot_be_filled_is_refused() -> None:
    made = model(family="encoder")
    with pytest.raises(UsageError, match="no mask"):
        made.fill_mask("abc")
    with pytest.raises(UsageError, match="context of 48"):
        made.fill_mask("a" * 60 + "[MASK]")
    classifier, usual = {"kind": "classifier", "num_classes": 2}, {"kind": "language-model"}
    for family, head, instead in (("encoder", classifier, "classify, or a"), ("decoder", usual, "generate, or a")):
        with pytest.raises(UsageError, match="no masked-language-model head") as caught:
            model(family=family, head=head).fill_mask("[MASK]")
        assert (caught.value.hint or "").startswith(instead)
    tokenizer = bpe()
    with pytest.raises(UsageError, match="no mask token"):
        model(tokenizer, family="encoder", vocab_size=tokenizer.vocab_size).fill_mask("[MASK]")

"""`qkv.evaluate.perplexity` against brute force: one forward pass for every single token."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch.nn import functional as F

from qkv.config.data import TextDataConfig
from qkv.config.errors import QkvError, UsageError
from qkv.config.objectives import CausalObjectiveConfig
from qkv.data import validation_batches
from qkv.evaluate import score_batches, text_corpus
from qkv.evaluate.perplexity import perplexity
from qkv.evaluate.windows import SlidingWindows
from qkv.tokenizer.tokenizer import Tokenizer

VOCABULARY = 300
DOCUMENTS = ([5, 6, 7, 8, 9], [10], [11, 12], [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24], [25, 26])


def brute_force(network, documents, window: int, stride: int, max_windows: int | None = None) -> list[float]:
    """The loss of every token in float64, each from a forward pass over its own context alone."""
    slots = [(document, place) for document in documents for place in range(len(document) - 1)]
    losses = []
    for slot, (document, place) in enumerate(slots):
        first_window = max(0, math.ceil((slot - window + 1) / stride))
        if max_windows is not None and first_window >= max_windows:
            break
        begin = max(0, place - (slot - first_window * stride))
        with torch.no_grad():
            logits = network(torch.tensor([document[begin : place + 1]]))[0, -1].double()
        losses.append(float(-logits.log_softmax(-1)[document[place + 1]]))
    return losses


@pytest.mark.parametrize("count", [2, 3, 8, 9, 10, 16, 17, 23])
@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (8, 1), (5, 5), (5, 2), (1, 1)])
def test_every_token_but_the_first_is_scored_once_with_the_context_of_its_first_window(
    network, random_ids, count: int, window: int, stride: int
) -> None:
    ids = random_ids(count)
    wanted = brute_force(network, [ids], window, stride)
    scores = perplexity(network, ids, window=window, stride=stride)
    assert scores.tokens == len(wanted) == count - 1
    assert scores.loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
    assert scores.perplexity == pytest.approx(math.exp(scores.loss))


@pytest.mark.parametrize("count", [2, 8, 9, 10, 16, 17, 23, 25])
def test_with_a_stride_of_one_more_each_window_is_a_text_of_its_own(network, random_ids, count: int) -> None:
    ids = random_ids(count)
    losses = []
    for chunk in torch.tensor(ids).split(8):  # windows of 8 tokens, as others count them
        if len(chunk) > 1:
            with torch.no_grad():
                logits = network(chunk[None, :-1])[0].double()
            losses += (-logits.log_softmax(-1).gather(1, chunk[1:, None])).flatten().tolist()
    scores = perplexity(network, ids, window=7, stride=8)
    assert scores.tokens == len(losses)
    assert scores.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    first = perplexity(network, ids, window=7, stride=8, max_windows=1)
    assert first.loss == pytest.approx(sum(losses[:7]) / len(losses[:7]), rel=1e-5)


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (4, 2), (3, 3)])
def test_documents_do_not_see_each_other(make_network, make_corpus, position: str, window: int, stride: int) -> None:
    network = make_network(position={"kind": position}).eval()
    wanted = brute_force(network, DOCUMENTS, window, stride)
    scores = perplexity(network, make_corpus(*DOCUMENTS), window=window, stride=stride)
    assert scores.tokens == len(wanted) == sum(len(document) - 1 for document in DOCUMENTS)
    assert scores.loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)


@pytest.mark.parametrize(
    ("window", "stride"), [(w, s) for w, s in itertools.product((1, 2, 3, 7, 50), repeat=2) if s <= w]
)
def test_windows_make_every_token_a_target_once(make_corpus, window: int, stride: int) -> None:
    batches = SlidingWindows(make_corpus(*DOCUMENTS), window, stride).batches(batch_size=3)
    targets = [label for batch in batches for label in batch.labels.flatten().tolist() if label != -100]
    assert sorted(targets) == sorted(label for document in DOCUMENTS for label in document[1:])


def test_windows_without_overlap_are_the_rows_of_validation(network, make_corpus, byte_tokenizer) -> None:
    corpus = make_corpus(*DOCUMENTS)
    rows = validation_batches(corpus, CausalObjectiveConfig(), byte_tokenizer, max_seq_len=8, batch_tokens=16)
    assert perplexity(network, corpus).loss == pytest.approx(score_batches(network, rows).loss, rel=1e-6)


@pytest.mark.parametrize("stride", [8, 3])
def test_the_batch_size_has_no_effect_on_the_figures(network, random_ids, stride: int) -> None:
    ids = random_ids(60)
    alone = perplexity(network, ids, stride=stride, batch_size=1)
    for batch_size in (2, 3, 100, None):
        batched = perplexity(network, ids, stride=stride, batch_size=batch_size)
        assert batched.loss == pytest.approx(alone.loss, rel=1e-6)
        assert (batched.tokens, batched.accuracy) == (alone.tokens, alone.accuracy)


def test_max_windows_scores_the_front(network, random_ids) -> None:
    ids = random_ids(40)
    wanted = brute_force(network, [ids], 8, 3, max_windows=4)
    scores = perplexity(network, ids, stride=3, max_windows=4, batch_size=3)
    assert scores.tokens == len(wanted) == 8 + 3 * 3
    assert scores.loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
    assert perplexity(network, ids, stride=3, max_windows=1000) == perplexity(network, ids, stride=3)


def test_ids_may_be_a_tensor_or_an_array(network, random_ids) -> None:
    ids = random_ids(12)
    assert perplexity(network, torch.tensor(ids)) == perplexity(network, ids)
    with pytest.raises(UsageError, match="one row"):
        perplexity(network, torch.tensor([ids]))


def test_a_bos_is_never_a_target_wherever_it_stands(network, byte_tokenizer) -> None:
    bos, eos = byte_tokenizer.bos_id, byte_tokenizer.eos_id
    ids = [bos, 1, 2, eos, bos, 3, 4]
    losses = brute_force(network, [ids], 8, 8)
    scores = perplexity(network, ids, tokenizer=byte_tokenizer)
    assert scores.tokens == 5
    assert scores.loss == pytest.approx((sum(losses) - losses[3]) / 5, rel=1e-5)
    with pytest.raises(QkvError, match="nothing but <bos>"):
        perplexity(network, [bos, bos, bos], tokenizer=byte_tokenizer)


def test_a_token_that_begins_and_ends_texts_is_scored_as_an_end(network) -> None:
    tokenizer = Tokenizer.train([], kind="byte", special={"bos": "<|endoftext|>", "eos": "<|endoftext|>"})
    end = tokenizer.eos_id
    assert perplexity(network, [end, 1, 2, end], tokenizer=tokenizer).tokens == 3


def test_the_loss_is_float32_whatever_the_precision(make_network, random_ids) -> None:
    network = make_network().to(torch.bfloat16).eval()
    ids = torch.tensor(random_ids(9))
    with torch.no_grad():
        logits = network(ids[None, :-1])[0]
    wanted = F.cross_entropy(logits.double(), ids[1:])
    assert perplexity(network, ids).loss == pytest.approx(wanted.item(), rel=1e-6)


def test_scoring_uses_neither_dropout_nor_label_smoothing_nor_random_numbers(make_network, random_ids) -> None:
    plain = make_network()
    dropping = make_network(dropout=0.5)
    dropping.label_smoothing = 0.3
    dropping.train()
    before = torch.get_rng_state()
    assert perplexity(dropping, random_ids(20)) == perplexity(plain, random_ids(20))
    assert dropping.training
    assert torch.equal(before, torch.get_rng_state())


def test_accuracy_is_the_share_of_tokens_guessed_right(network) -> None:
    ids = [1]
    for _ in range(5):  # the network's own guesses, and two that it would not make
        with torch.no_grad():
            guess = int(network(torch.tensor([ids]))[0, -1].argmax())
        ids.append(guess if len(ids) not in (2, 4) else (guess + 1) % VOCABULARY)
    assert perplexity(network, ids).accuracy == 3 / 5


# --- bits per byte ----------------------------------------------------------------------------------------------------


def corpus_of(text: str, tokenizer, folder: Path):
    path = folder / "text.txt"
    path.write_text(text, encoding="utf-8")
    return text_corpus(path, tokenizer)


def test_bits_per_byte_are_all_nats_over_all_bytes(network, byte_tokenizer, tmp_path) -> None:
    text = "Zürich, 我爱你。\n"
    scores = perplexity(network, corpus_of(text, byte_tokenizer, tmp_path), tokenizer=byte_tokenizer)
    assert scores.tokens == scores.bytes == len(text.encode())
    assert scores.bits_per_byte == pytest.approx(scores.loss * scores.tokens / math.log(2) / scores.bytes)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "char", "word"])
def test_bytes_are_those_of_the_text_for_every_kind_of_tokenizer(network, tmp_path, kind: str) -> None:
    text = "the low lower lowest owls of 我 know the lowest 你 owl " * 4 + "the end"
    tokenizer = Tokenizer.train(text, kind=kind, vocab_size=290)
    scores = perplexity(network, corpus_of(text, tokenizer, tmp_path), tokenizer=tokenizer)
    assert scores.bytes == len(text.encode())


def test_the_space_before_the_first_word_of_a_text_is_no_byte_of_it(network, tmp_path) -> None:
    words = {"<s>": 0, "▁a": 1, "▁b": 2, "▁": 3, "a": 4, "b": 5}
    backend = tokenizers.Tokenizer(models.BPE(words, [("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}', encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("a b a\nb b\n", encoding="utf-8")
    corpus = text_corpus(path, tokenizer, TextDataConfig(split="lines"))
    assert perplexity(network, corpus, tokenizer=tokenizer).bytes == len("a b a") + len("b b")
    front = perplexity(network, corpus, window=2, stride=1, max_windows=3, tokenizer=tokenizer)
    assert (front.tokens, front.bytes) == (4, len("a b a") + len("b"))


def test_special_tokens_have_no_bytes(network, byte_tokenizer) -> None:
    ids = [byte_tokenizer.bos_id, 1, 2, byte_tokenizer.eos_id]
    scores = perplexity(network, ids, tokenizer=byte_tokenizer)
    assert (scores.tokens, scores.bytes) == (3, 2)


def test_text_lost_in_unknown_tokens_has_no_bits_per_byte(network, tmp_path) -> None:
    tokenizer = Tokenizer.train("abc", kind="char")
    scores = perplexity(network, corpus_of("abxc", tokenizer, tmp_path), tokenizer=tokenizer)
    assert (scores.tokens, scores.bits_per_byte) == (4, None)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"window": 9}, "at most 8"),
        ({"stride": -1}, "stride must be at least 1"),
        ({"window": 4, "stride": 6}, "stride 6 is too large"),
        ({"max_windows": 0}, "max_windows must be"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(network, options, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        perplexity(network, [1, 2, 3], **options)


@pytest.mark.parametrize("ids", [[], [1]])
def test_fewer_than_two_tokens_are_refused(network, ids) -> None:
    with pytest.raises(QkvError, match=f"{len(ids)} token"):
        perplexity(network, ids)


def test_a_model_that_predicts_no_next_token_is_refused(make_network) -> None:
    encoder = make_network(family="encoder")
    pair = make_network(family="encoder-decoder")
    headless = make_network(head={"kind": "none"})
    for network, said in ((encoder, "encoder"), (pair, "source and target"), (headless, "kind none")):
        with pytest.raises(UsageError, match=said):
            perplexity(network, [1, 2, 3])


def test_an_answer_that_is_not_finite_is_an_error_not_a_figure(network) -> None:
    with torch.no_grad():
        network.head.weight[3] = math.nan
    with pytest.raises(QkvError, match="not finite"):
        perplexity(network, [1, 2, 3])

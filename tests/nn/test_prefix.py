"""Prefix-LM: the tokens of a row's prefix see each other, those after it what came before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.generate import Sampling
from qkv.generate.beam import Beams, beam_search
from qkv.generate.decode import Decoding
from qkv.generate.scoring import log_probabilities
from qkv.nn import Transformer
from qkv.nn.kernels import MathKernel

from .matrix import assert_equal, one_thread, set_kernel  # noqa: F401

V = 23
LENGTHS, PREFIXES = torch.tensor([9, 6, 8]), torch.tensor([4, 6, 0])
POSITIONS = pytest.mark.parametrize("position", ["rope", "relative", "alibi"])
WINDOWS = pytest.mark.parametrize("window", [None, 3], ids=["global", "window"])


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def network(position: str = "rope", window: int | None = None, **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "prefix": True,
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 2,
        "position": {"kind": position},
        "attention": {"num_heads": 4, "num_kv_heads": 2, "window": window},
        "init": {"kind": "normal", "std": 0.3},
    }
    config = ModelConfig.model_validate(tree | changes)
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


def ids_of(rows: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


@WINDOWS
def test_who_sees_whom_is_what_a_loop_says(window: int | None) -> None:
    net, seen = network(window=window), []
    set_kernel(net, "math")
    for module in net.modules():
        if isinstance(module, MathKernel):
            module.register_forward_pre_hook(lambda kernel, given: seen.append(given[3].tensor()))
    net(ids_of(), prefix_lengths=PREFIXES)
    for mask in seen:
        for row, prefix in enumerate(PREFIXES.tolist()):
            for query in range(9):
                for key in range(9):
                    allowed = key <= query or (key < prefix and query < prefix)
                    near = window is None or abs(query - key) < window
                    assert bool(mask[row, 0, query, key]) == (allowed and near)


def test_a_changed_token_changes_what_may_see_it_and_no_more() -> None:
    net, ids, prefix = network(), ids_of(1), torch.tensor([4])
    logits = net(ids, prefix_lengths=prefix)
    for place in range(9):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % V
        changed = (net(other, prefix_lengths=prefix) != logits).any(2)[0].tolist()
        assert changed == [slot >= place or (place < 4 and slot < 4) for slot in range(9)]


def test_without_a_prefix_or_with_one_of_a_token_the_model_is_causal() -> None:
    net, causal = network(), network(prefix=False)
    causal.load_state_dict(net.state_dict())
    assert_equal(net(ids_of()), causal(ids_of()))
    assert_equal(net(ids_of(), prefix_lengths=torch.tensor([0, 1, 1])), causal(ids_of()))


@POSITIONS
@WINDOWS
def test_alone_equals_in_a_padded_batch(position: str, window: int | None) -> None:
    net, ids = network(position, window), ids_of()
    logits = net(ids, lengths=LENGTHS, prefix_lengths=PREFIXES)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = net(ids[row : row + 1, :length], prefix_lengths=PREFIXES[row : row + 1])
        assert_equal(logits[row : row + 1, :length], alone)


@POSITIONS
@WINDOWS
@pytest.mark.parametrize("capacity", [None, 12], ids=["growing", "static"])
def test_cached_equals_the_full_forward_once_the_prefix_is_read_whole(
    position: str, window: int | None, capacity: int | None
) -> None:
    net, ids = network(position, window), ids_of()
    full = net(ids, prefix_lengths=PREFIXES)
    for chunks in ([6, 1, 1, 1], [7, 2], [9]):
        cache, parts = net.new_cache(3, capacity), []
        for part in ids.split(chunks, 1):
            parts.append(net(part, cache=cache, prefix_lengths=None if parts else PREFIXES))
        assert_equal(torch.cat(parts, 1), full)


def test_all_kernels_give_the_same_logits() -> None:
    net, logits = network(window=3), {}
    for kernel in ("math", "tiled", "sdpa"):
        set_kernel(net, kernel)  # type: ignore[arg-type]
        logits[kernel] = net(ids_of(), lengths=LENGTHS, prefix_lengths=PREFIXES)[torch.arange(9) < LENGTHS[:, None]]
    assert_equal(logits["tiled"], logits["math"])
    assert_equal(logits["sdpa"], logits["math"])


def test_what_is_generated_follows_from_a_prompt_read_in_both_directions() -> None:
    net, prompts = network(), [ids_of(1, 5)[0].tolist(), ids_of(1, 3, seed=1)[0].tolist()]
    found = []
    for use_cache in (True, False):
        greedy: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "seeds": [0, 1]}
        decoding = Decoding(net, prompts, max_new_tokens=4, use_cache=use_cache, **greedy)
        for _ in decoding:
            pass
        found.append(decoding.generated)
        searched = beam_search(net, prompts, Beams(beam_size=1), max_new_tokens=4, use_cache=use_cache)
        found.append([best[0].token_ids for best in searched])
    for prompt, generated in zip(prompts, found[0], strict=True):
        for count, token_id in enumerate(generated):
            ids = torch.tensor([prompt + generated[:count]])
            assert net(ids, prefix_lengths=torch.tensor([len(prompt)]))[0, -1].argmax() == token_id
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("start", [1, 4, 8])
def test_what_is_scored_follows_from_a_prefix_read_in_both_directions(start: int) -> None:
    net, ids = network(), ids_of(1)
    scores = log_probabilities(net, ids[0].tolist(), start)
    logprobs = net(ids[:, :-1], prefix_lengths=torch.tensor([start])).log_softmax(-1)[0]
    expected = [float(logprobs[place - 1, ids[0, place]]) for place in range(start, 9)]
    assert [score for score, _ in scores] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prefix_lengths": torch.tensor([1, 2])}, "prefix_lengths"),
        ({"prefix_lengths": torch.tensor([1, 2, 10])}, "10 in `prefix_lengths`"),
        (
            {"prefix_lengths": PREFIXES, "lengths": torch.tensor([9, 5, 8])},
            "prefix of row 1 has 6 tokens, and the row 5",
        ),
        ({"prefix_lengths": PREFIXES, "documents": torch.zeros(3, 9, dtype=torch.int64)}, "documents"),
    ],
)
def test_a_prefix_that_cannot_be_meant_is_refused(given: dict[str, Tensor], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        network()(ids_of(), **given)


def test_a_prefix_is_refused_by_other_models_and_after_the_first_call() -> None:
    net = network()
    with pytest.raises(UsageError, match="no prefix"):
        network(prefix=False)(ids_of(), prefix_lengths=PREFIXES)
    cache = net.new_cache(3)
    net(ids_of(), cache=cache)
    with pytest.raises(UsageError, match="first call"):
        net(ids_of(), cache=cache, prefix_lengths=PREFIXES)
    assert cache.longest == 9

"""Layers of several kinds in one stack, as in Gemma 3: five that see a window, then one that sees everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.config.run import Config
from qkv.nn import Transformer

from .matrix import assert_equal, one_thread  # noqa: F401

WINDOW, LAYERS = 3, 12
LOCAL = [layer for layer in range(LAYERS) if layer % 6 != 5]


@pytest.fixture(scope="module")
def network() -> Transformer:
    small = ("d_model=16", "vocab_size=23", f"num_layers={LAYERS}", "attention.num_heads=4", "feed_forward.d_ff=20")
    config = Config.load("gemma-tiny", "tokenizer.vocab_size=23", *(f"model.{key}" for key in small))
    layers = [
        layer.model_copy(update={"attention": layer.attention.model_copy(update={"window": WINDOW})})
        if layer.attention.window
        else layer
        for layer in config.model.layers
    ]
    model = config.model.model_copy(update={"layers": tuple(layers)})
    return Transformer(model, generator=torch.Generator().manual_seed(0)).eval().requires_grad_(False)


def ids_of(length: int = 20) -> torch.Tensor:
    return torch.randint(0, 23, (2, length), generator=torch.Generator().manual_seed(1))


def test_the_preset_is_five_local_layers_to_a_global_one_with_bases_of_their_own() -> None:
    layers = Config.load("gemma-tiny").model.layers
    assert [layer.attention.window for layer in layers] == [64] * 5 + [None]
    assert [layer.position.theta for layer in layers] == [1e4] * 5 + [1e6]


def test_masks_and_phases_are_made_once_for_each_kind(network: Transformer) -> None:
    given: list[dict[str, Any]] = []
    handles = [
        block.attention("self").register_forward_pre_hook(
            lambda attention, args, kwargs: given.append(kwargs), with_kwargs=True
        )
        for block in network.decoder.blocks
    ]
    network(ids_of())
    for handle in handles:
        handle.remove()
    for name in ("mask", "phases"):
        kinds = [id(call[name]) for call in given]
        assert len(set(kinds)) == 2
        assert len({kinds[layer] for layer in LOCAL}) == 1


@pytest.mark.parametrize("capacity", [None, 20], ids=["growing", "static"])
def test_cached_equals_the_full_forward_beyond_the_window(network: Transformer, capacity: int | None) -> None:
    full = network(ids_of())
    for chunks in ([1] * 20, [11, 1, 5, 3]):
        cache = network.new_cache(2, capacity)
        assert_equal(torch.cat([network(part, cache=cache) for part in ids_of().split(chunks, 1)], 1), full)


def test_only_global_layers_reach_beyond_the_windows(network: Transformer) -> None:
    """Of a local layer a changed token reaches the WINDOW - 1 tokens after it, layer by layer, and no further."""
    other = ids_of().clone()
    other[:, 0] = (other[:, 0] + 1) % 23
    hidden: list[list[torch.Tensor]] = [[], []]
    for index, ids in enumerate((ids_of(), other)):
        handles = [
            block.register_forward_hook(lambda block, args, out, index=index: hidden[index].append(out))
            for block in network.decoder.blocks
        ]
        network(ids)
        for handle in handles:
            handle.remove()
    reach = [int((a != b).any(2)[0].nonzero().max()) for a, b in zip(*hidden, strict=True)]
    assert reach[:6] == [2, 4, 6, 8, 10, 19]

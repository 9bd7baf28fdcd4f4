"""Attention weights: those that the network computes, whatever its kernel, and nothing notices that they are read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from generate.tiny import byte_tokenizer, config, network
from nn.matrix import CASES, Case, draw_inputs, network_of
from torch import Tensor, nn

from qkv.config.errors import UsageError
from qkv.inspect.attention import StackName, alignment, attention_of, attention_weights, read_attention
from qkv.nn import Transformer, use_kernel
from qkv.nn.kernels import KernelName, MathKernel
from qkv.nn.mask import Mask
from qkv.tokenizer import Tokenizer

IDS = torch.tensor([[5, 9, 2, 7, 7, 1, 30]])
SOURCE = torch.tensor([[3, 8, 250, 8]])
PAIR: dict[str, Any] = {"family": "encoder-decoder", "position": {"kind": "sinusoidal"}}
KERNELS: tuple[KernelName, ...] = ("math", "tiled", "sdpa")


Noted = tuple[Tensor, Tensor]
"""The weights of a layer, and which keys are not hidden."""


class Noting(MathKernel):
    """Notes the weights that it computes."""

    def __init__(self, notes: list[Noted]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, *rest: Any) -> Tensor:
        out, weights = self.attend(q_BHTD, k_BGSD, v_BGSE, mask, *rest)
        self.notes.append((weights, mask.tensor()))
        return out


def noted(model: Transformer, inputs: dict[str, Any]) -> dict[tuple[str, str], list[Noted]]:
    """Stack and kind -> what its layers noted in a forward pass of a copy that computes by `math`."""
    model = copy.deepcopy(model).eval()
    found: dict[tuple[str, str], list[Noted]] = {}
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for block in stack.blocks if stack is not None else ():
            for kind in ("self", "cross"):
                attention = block.attention(kind)
                if attention is not None:
                    attention.kernel = Noting(found.setdefault((name, kind), []))
    with torch.no_grad():
        model(**inputs)
    return found


def hooks_of(model: nn.Module) -> list[object]:
    return [hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)]


# --- the weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_weights_are_those_of_the_math_kernel_and_logits_do_not_change(case: Case) -> None:
    model, inputs = network_of(case), draw_inputs(case, 1, 9)
    inputs["lengths"] = torch.tensor([8])
    if case.has_source and not case.reads_images:
        inputs["source_lengths"] = torch.tensor([5])
    notes = noted(model, inputs)
    before = model(**inputs)
    assert len(notes) == {"encoder-decoder": 3}.get(case.family, 1)
    for (stack, kind), layers in notes.items():
        found = attention_weights(model, inputs["ids"], stack=stack, kind=kind, **other_inputs(inputs))
        assert len(found) == len(layers)
        for weights_HTS, (expected, allowed) in zip(found, layers, strict=True):
            torch.testing.assert_close(weights_HTS, expected[0], atol=1e-5, rtol=0)
            assert not weights_HTS.masked_select(~allowed[0]).any()
            some = allowed[0].any(-1).expand(weights_HTS.shape[:2])  # padding may see nothing at all
            if case.options["sinks"] == "sinks":
                assert (weights_HTS.sum(-1)[some] < 1).all()
            else:
                torch.testing.assert_close(weights_HTS.sum(-1), some.float())
    assert torch.equal(model(**inputs), before)
    assert hooks_of(model) == []


def other_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "ids"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_bit_changes_while_it_is_looked_at(kernel: KernelName) -> None:
    model = network(**PAIR)
    use_kernel(model, kernel)
    seen: list[Tensor] = []
    handle = model.decoder.register_forward_hook(lambda _, args, out: seen.append(out))
    model(IDS, source=SOURCE)
    attention_weights(model, IDS, source=SOURCE, kind="cross")
    handle.remove()
    assert torch.equal(seen[0], seen[1])


def test_query_heads_of_a_group_share_their_keys() -> None:
    model = network(position={"kind": "none"})  # 4 heads, 2 key/value heads
    first = model.decoder.blocks[0].self_attention
    seen: list[Tensor] = []
    handle = first.function.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    weights_HTS = attention_weights(model, IDS, layers=[0])[0]
    handle.remove()
    queries, keys = first.function.query(seen[0])[0], first.function.key(seen[0])[0]
    for head in range(4):
        q_TD, k_SD = queries[:, 4 * head :][:, :4], keys[:, 4 * (head // 2) :][:, :4]
        scores_TS = (q_TD @ k_SD.T / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(weights_HTS[head], scores_TS.softmax(-1).detach())


def test_a_decoder_sees_no_future_and_a_window_no_distant_past() -> None:
    model = network(attention={"num_heads": 4, "window": 3})
    for weights_HTS in attention_weights(model, IDS):
        assert torch.equal(weights_HTS != 0, torch.ones(4, 7, 7).tril().triu(-2).bool())


def test_padding_and_other_documents_have_weight_0() -> None:
    encoder = network(family="encoder", head={"kind": "none"})
    for weights_HTS in attention_weights(encoder, IDS, lengths=torch.tensor([5])):
        assert torch.equal(weights_HTS != 0, (torch.arange(7) < 5).expand(4, 7, 7))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    same = documents == documents.T
    for weights_HTS in attention_weights(encoder, IDS, documents=documents):
        assert torch.equal(weights_HTS != 0, same.expand(4, 7, 7))
    pair = network(**PAIR)
    source_documents = torch.tensor([[0, 1, 1, 1]])
    inputs = {"documents": documents, "source_documents": source_documents, "source_lengths": torch.tensor([3])}
    for weights_HTS in attention_weights(pair, IDS, source=SOURCE, kind="cross", **inputs):
        assert torch.equal(
            weights_HTS != 0, ((source_documents == documents.T) & (torch.arange(4) < 3)).expand(4, 7, 4)
        )


def test_the_stacks_of_an_encoder_decoder_have_shapes_of_their_own() -> None:
    model = network(**PAIR, encoder={"num_layers": 3, "attention": {"num_heads": 2}})
    shapes = {
        ("encoder", "self"): (3, (2, 4, 4)),
        ("decoder", "self"): (2, (4, 7, 7)),
        ("decoder", "cross"): (2, (4, 7, 4)),
    }
    for (stack, kind), (count, shape) in shapes.items():
        layers = read_attention(model, IDS, source=SOURCE, stack=stack, kind=kind)  # type: ignore[arg-type]
        assert [layer.shape for layer in layers] == [shape] * count
        assert [tuple(layer.weights().shape) for layer in layers] == [shape] * count


def test_only_the_layers_asked_for_are_kept_in_the_order_asked_for() -> None:
    model = network(num_layers=4)
    every = attention_weights(model, IDS)
    some = attention_weights(model, IDS, layers=[3, 0])
    assert len(some) == 2
    assert torch.equal(some[0], every[3])
    assert torch.equal(some[1], every[0])
    assert torch.equal(read_attention(model, IDS, layers=[3])[0].head(2), every[3][2])


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    model = network(dropout=0.5, attention={"num_heads": 4, "dropout": 0.5}).train()
    model.decoder.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    first, second = (attention_weights(model, IDS) for _ in range(2))
    assert [module.training for module in model.modules()] == modes
    expected = noted(model, {"ids": IDS})["decoder", "self"]
    for one, other, (weights, _) in zip(first, second, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, weights[0])
        assert not one.requires_grad


def test_rows_sum_to_1_in_half_precision_too() -> None:
    for weights_HTS in attention_weights(network().to(torch.bfloat16), IDS):
        assert weights_HTS.dtype == torch.float32
        torch.testing.assert_close(weights_HTS.sum(-1), torch.ones(4, 7))


def test_compiled_blocks_are_looked_at_too() -> None:
    model = network()
    expected = attention_weights(model, IDS)
    for block in model.decoder.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        model(IDS)
    for one, other in zip(attention_weights(model, IDS), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ["door", "layer"])
def test_hooks_and_mode_are_put_back_after_an_error(where: str, monkeypatch) -> None:
    model = network().train()
    ids = torch.tensor([[999]]) if where == "door" else IDS
    if where == "layer":
        monkeypatch.setattr(model.decoder.blocks[1].feed_forward.function, "forward", lambda x: 1 / 0)
    with pytest.raises(UsageError if where == "door" else ZeroDivisionError):
        attention_weights(model, ids)
    assert hooks_of(model) == []
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [2]}, "layers 0 to 1, got 2"),
        ({"layers": [-1]}, "layers 0 to 1, got -1"),
        ({"layers": [True]}, "layers 0 to 1"),
        ({"stack": "encoder"}, "decoder has no encoder"),
        ({"stack": "tower"}, "tower"),
        ({"kind": "cross"}, "only the decoder of an encoder-decoder"),
        ({"kind": "own"}, "own"),
        ({"source": SOURCE}, "source"),
    ],
)
def test_what_the_network_does_not_have_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_attention(network(), IDS, **options)


def test_one_sequence_is_read_at_a_time_and_one_head_is_in_range() -> None:
    with pytest.raises(UsageError, match="not of 2"):
        attention_weights(network(), IDS.expand(2, -1))
    layer = read_attention(network(), IDS)[0]
    for head in (4, -1):
        with pytest.raises(UsageError, match=f"heads 0 to 3, got {head}"):
            layer.head(head)
    with pytest.raises(UsageError, match="only the decoder"):
        read_attention(network(**PAIR), IDS, source=SOURCE, stack="encoder", kind="cross")


# --- of a text --------------------------------------------------------------------------------------------------------


def test_a_decoder_reads_begin_and_text_and_parts_of_characters_are_bytes() -> None:
    found = attention_of(network(), byte_tokenizer(), "a 诗")
    assert (found.stack, found.kind) == ("decoder", "self")
    assert found.rows == found.columns == ["<bos>", "a", " ", "\\xe8", "\\xaf", "\\x97"]
    ids = torch.tensor([[257, *"a 诗".encode()]])
    for layer, weights_HTS in zip(found.layers, attention_weights(network(), ids), strict=True):
        assert torch.equal(layer.weights(), weights_HTS)


def test_a_whole_character_in_one_token_is_itself() -> None:
    tokenizer = Tokenizer.train("诗歌 诗歌 诗歌 诗歌", kind="char")
    model = network(vocab_size=tokenizer.vocab_size)
    assert attention_of(model, tokenizer, "诗 歌").rows[-3:] == ["诗", " ", "歌"]


def test_an_encoder_reads_begin_text_end() -> None:
    found = attention_of(network(family="encoder", head={"kind": "none"}), byte_tokenizer(), "ab")
    assert found.stack == "encoder"
    assert found.rows == found.columns == ["<bos>", "a", "b", "<eos>"]


def test_rows_of_cross_attention_are_the_tokens_being_predicted() -> None:
    model = network(**PAIR)
    found = attention_of(model, byte_tokenizer(), "ab", target="xyz", kind="cross")
    assert found.rows == ["x", "y", "z", "<eos>"]
    assert found.columns == ["<bos>", "a", "b", "<eos>"]
    source = torch.tensor([[257, 97, 98, 258]])
    expected = attention_weights(model, torch.tensor([[257, 120, 121, 122]]), source=source, kind="cross")
    for layer, weights_HTS in zip(found.layers, expected, strict=True):
        assert torch.equal(layer.weights(), weights_HTS)


def test_generated_ids_are_a_target_with_or_without_an_end() -> None:
    model = network(**PAIR)
    for ids, rows in (([120, 258], ["x", "<eos>"]), ([120, 121], ["x", "y"]), ([257, 120], ["x"])):
        assert attention_of(model, byte_tokenizer(), "ab", target=ids, kind="cross").rows == rows


@pytest.mark.parametrize(
    ("stack", "target", "tokens"),
    [("encoder", None, ["<bos>", "a", "b", "<eos>"]), ("decoder", "xy", ["<bos>", "x", "y"])],
)
def test_self_attention_of_either_stack_has_the_tokens_it_reads_on_both_axes(
    stack: StackName, target: str | None, tokens: list[str]
) -> None:
    found = attention_of(network(**PAIR), byte_tokenizer(), "ab", target=target, stack=stack)
    assert found.rows == found.columns == tokens
    assert found.layers[0].shape == (4, len(tokens), len(tokens))


def test_source_and_target_may_have_tokenizers_of_their_own() -> None:
    letters = Tokenizer.train("abc", kind="char")
    model = network(**PAIR, encoder={"vocab_size": letters.vocab_size})
    found = attention_of(model, byte_tokenizer(), "cab", target="é", source_tokenizer=letters, kind="cross")
    assert found.rows == ["\\xc3", "\\xa9", "<eos>"]
    assert found.columns == ["<bos>", "c", "a", "b", "<eos>"]


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"target": "x"}, "no target"),
        ({}, {"kind": "cross"}, "only the decoder"),
        ({}, {"tokenizer": None}, "no tokenizer"),
        ({}, {"source": "x" * 60}, "the text has 61 tokens, and the decoder's context is 48"),
        (PAIR, {}, "reads a target"),
        (PAIR, {"target": "x", "stack": "encoder"}, "no target"),
        (PAIR, {"target": "x" * 60}, "the target has 61 tokens, and the decoder's context is 48"),
        (PAIR, {"target": [120, 999, 258]}, "999"),
        (PAIR | {"encoder": {"input": {"kind": "features", "width": 5}}}, {"target": "x"}, "features, not text"),
    ],
)
def test_a_text_that_cannot_be_read_so_is_refused(changes: dict[str, Any], options: dict[str, Any], said: str) -> None:
    arguments = {"tokenizer": byte_tokenizer(), "source": "ab"} | options
    with pytest.raises(UsageError, match=said):
        attention_of(Transformer(config(**changes)), **arguments)


# --- alignment --------------------------------------------------------------------------------------------------------


def test_an_alignment_is_the_mean_over_the_heads_of_a_layer_or_of_all() -> None:
    layers = read_attention(network(**PAIR), IDS, source=SOURCE, kind="cross")
    weights_LHTS = torch.stack([layer.weights() for layer in layers])
    for options, expected in (
        ({}, weights_LHTS[1].mean(0)),
        ({"layer": 0}, weights_LHTS[0].mean(0)),
        ({"layer": "mean"}, weights_LHTS.mean((0, 1))),
        ({"layer": 0, "head": 3}, weights_LHTS[0, 3]),
        ({"head": 2}, weights_LHTS[1, 2]),
    ):
        found_TS = alignment(layers, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(found_TS, expected)
        torch.testing.assert_close(found_TS.sum(-1), torch.ones(7))
    with pytest.raises(UsageError, match="layers 0 to 1, got 2"):
        alignment(layers, layer=2)


def test_with_sinks_the_rows_of_an_alignment_sum_to_less_than_one() -> None:
    made = network(family="encoder-decoder", attention={"num_heads": 4, "sinks": True})
    ids = torch.tensor([[1, 2, 3, 4]])
    plain_TS, sunk_TS = (
        alignment(read_attention(one, ids, source=ids, kind="cross"))
        for one in (network(family="encoder-decoder"), made)
    )
    torch.testing.assert_close(plain_TS.sum(-1), torch.ones(4))
    assert (sunk_TS.sum(-1) < 0.99).all()
    assert (sunk_TS.sum(-1) > 0).all()

"""Images, sound and factorised embeddings: what enters the stream, how long it is, and what padding cannot do."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.nn import Transformer
from qkv.nn.resize import for_image_size
from qkv.nn.stem import resize_positions

from .matrix import one_thread  # noqa: F401
from .parity_weights import Tensors, copy_weights, randomise

MELS, V = 5, 23
IMAGES = {"kind": "patches", "image_size": [8, 12], "patch_size": 4}
SOUND = {"kind": "log-mel", "num_mels": MELS}


def model(family: str = "encoder", **changes: Any) -> ModelConfig:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "position": {"kind": "learned"},
        "init": {"kind": "normal", "std": 0.3},
    }
    return ModelConfig.model_validate(tree | changes)


def network(family: str = "encoder", **changes: Any) -> Transformer:
    """A small network in eval mode and float64; of an encoder without a head, hidden vectors come out."""
    if family == "encoder":
        changes = {"head": {"kind": "none"}} | changes
    generator = torch.Generator().manual_seed(0)
    return Transformer(model(family, **changes), generator=generator).double().eval()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def refused(**changes: Any) -> str:
    with pytest.raises(ValidationError) as error:
        model(**changes)
    return str(error.value)


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_cut_row_by_row_after_the_class_token(class_token: bool, bias: bool) -> None:
    net = network(input=IMAGES | {"class_token": class_token, "bias": bias}, position={"kind": "none"})
    images, stem = randn(2, 3, 8, 12), net.encoder_embedding.input
    expected = [stem.class_token.expand(2, -1)] if class_token else []
    for top in (0, 4):
        for left in (0, 4, 8):
            patch = images[:, :, top : top + 4, left : left + 4].flatten(1)
            expected.append(F.linear(patch, stem.convolution.weight.flatten(1), stem.convolution.bias))
    close(net.encoder_embedding(images, torch.arange(len(expected))[None]), torch.stack(expected, dim=1))
    assert (stem.convolution.bias is not None) == bias


def test_registers_stand_between_the_class_token_and_the_patches() -> None:
    net = network(input=IMAGES | {"num_registers": 2}, position={"kind": "none"})
    images, stem = randn(2, 3, 8, 12), net.encoder_embedding.input
    found = net.encoder_embedding(images, torch.arange(9)[None])
    close(found[:, 0], stem.class_token.expand(2, -1))
    close(found[:, 1:3], stem.registers.expand(2, -1, -1))
    close(found[:, 3:], stem.convolution(images).flatten(2).mT)
    assert stem.registers.std() > 0.1  # drawn, as the class token is


def test_resized_positions_follow_rows_and_columns_and_the_others_stay() -> None:
    """Half a step apart, positions that count rows and columns do so too, but for bicubic interpolation's waves."""
    table = torch.cat((torch.full((3, 2), 77.0), torch.cartesian_prod(torch.arange(8.0), torch.arange(10.0))))
    found = resize_positions(table, (8, 10), (16, 20))
    assert torch.equal(found[:3], table[:3])
    grid = found[3:].unflatten(0, (16, 20))
    halves = (torch.cartesian_prod(torch.arange(16.0), torch.arange(20.0)) / 2 - 0.25).unflatten(0, (16, 20))
    assert (grid - halves)[4:-4, 4:-4].abs().max() < 0.05
    assert torch.equal(resize_positions(table, (8, 10), (8, 10)), table)


@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_a_network_for_another_image_size_has_the_same_weights_but_positions(family: str) -> None:
    given = {"input": IMAGES} if family == "encoder" else {"encoder": {"input": IMAGES}}
    net = network(family, **given)
    resized = for_image_size(net, (12, 20))
    before, after = net.state_dict(), resized.state_dict()
    changed = [name for name in before if before[name].shape != after[name].shape]
    assert changed == ["encoder_embedding.position.weight"]
    assert all(torch.equal(before[name], after[name]) for name in before if name not in changed)
    assert resized.config.stacks["encoder"].max_seq_len == len(after[changed[0]]) == 1 + 3 * 5
    assert resized.encode(randn(1, 3, 12, 20)).shape == (1, 16, 16)
    same = for_image_size(net, (8, 12)).encode(randn(1, 3, 8, 12))
    close(same, net.encode(randn(1, 3, 8, 12)), 1e-6)  # positions go through float32


def test_an_image_has_a_position_for_the_class_token_and_one_for_each_patch() -> None:
    config = model(input=IMAGES)
    assert config.max_seq_len == 1 + 2 * 3
    assert network(input=IMAGES).encoder_embedding.position.weight.shape == (7, 16)
    assert model(input=IMAGES | {"class_token": False}).max_seq_len == 6
    assert model(input={"kind": "patches"}).max_seq_len == 1 + 14 * 14
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_square_image_is_one_number() -> None:
    square = model(input=IMAGES | {"image_size": [8, 8]})
    assert square == model(input=IMAGES | {"image_size": 8})
    assert square.input.model_dump()["image_size"] == 8


def test_a_decoder_s_context_is_not_its_image_encoder_s() -> None:
    config = model("encoder-decoder", max_seq_len=20, encoder={"input": IMAGES})
    assert config.encoder is not None
    assert config.decoder is not None
    assert (config.encoder.max_seq_len, config.decoder.max_seq_len) == (7, 20)
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_row_of_images_does_not_depend_on_the_others() -> None:
    net, images = network(input=IMAGES), randn(3, 3, 8, 12)
    alone = net(images[1:2])
    images[0], images[2] = torch.nan, 1e6
    close(net(images)[1:2], alone)


@pytest.mark.parametrize("pooler", [True, False])
def test_an_image_classifier_reads_the_class_token(pooler: bool) -> None:
    head = {"kind": "classifier", "num_classes": 4, "pooler": pooler}
    net, images = network(input=IMAGES, head=head, vocab_size=None), randn(3, 3, 8, 12)
    scores = net(images)
    assert scores.shape == (3, 4)
    close(scores, net.head.output(net.head.pooler(net.encode(images)[:, 0])))
    labels = torch.tensor([1, 0, 3])
    close(net(images, labels=labels).loss, F.cross_entropy(scores, labels))


def test_captions_of_images_are_the_same_with_a_cache() -> None:
    net = network("encoder-decoder", encoder={"input": IMAGES})
    ids, images = torch.randint(V, (2, 5), generator=torch.Generator().manual_seed(1)), randn(2, 3, 8, 12)
    whole, cache = net(ids, source=images), net.new_cache(2)
    steps = [net(ids[:, :2], source=images, cache=cache), *(net(ids[:, t : t + 1], cache=cache) for t in (2, 3, 4))]
    close(torch.cat(steps, dim=1), whole)


# --- sound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 2, 9, 10])
def test_two_frames_become_one_vector(frames: int) -> None:
    net, sound = network(input=SOUND, position={"kind": "none"}), randn(2, frames, MELS)
    first, second = net.encoder_embedding.input.first, net.encoder_embedding.input.second
    length = math.ceil(frames / 2)

    def window(x_BFM: Tensor, middle: int) -> Tensor:
        """Three frames around this one, channels first; beyond the ends are zeros."""
        return F.pad(x_BFM, (0, 0, 1, 1))[:, middle : middle + 3].transpose(1, 2).flatten(1)

    x_BFM = torch.stack(
        [F.gelu(F.linear(window(sound, t), first.weight.flatten(1), first.bias)) for t in range(frames)], dim=1
    )
    expected = [F.gelu(F.linear(window(x_BFM, 2 * t), second.weight.flatten(1), second.bias)) for t in range(length)]
    close(net.encoder_embedding(sound, torch.arange(length)[None]), torch.stack(expected, dim=1))
    assert net(sound).shape == (2, length, 16)


@pytest.mark.parametrize("rubbish", [7.0, math.nan])
def test_sound_in_a_padded_batch_is_as_on_its_own(rubbish: float) -> None:
    net, lengths = network(input=SOUND), torch.tensor([11, 4, 7, 1])
    sound = randn(4, 11, MELS)
    sound[torch.arange(11) >= lengths[:, None]] = rubbish
    together = net(sound, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        close(together[row : row + 1, : (length + 1) // 2], net(sound[row : row + 1, :length]))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_classifier_of_sound_pools_vectors_not_frames(pooling: str) -> None:
    head = {"kind": "classifier", "num_classes": 3, "pooling": pooling}
    net, sound, lengths = network(input=SOUND, head=head), randn(2, 9, MELS), torch.tensor([5, 9])
    close(net(sound, lengths=lengths)[:1], net(sound[:1, :5]))


def test_a_decoder_sees_no_padding_of_the_sound() -> None:
    net = network("encoder-decoder", encoder={"input": SOUND})
    ids, sound, lengths = torch.randint(V, (3, 4)), randn(3, 10, MELS), torch.tensor([10, 3, 6])
    sound[torch.arange(10) >= lengths[:, None]] = math.nan
    together, cache = net(ids, source=sound, source_lengths=lengths), net.new_cache(3)
    prefix = net(ids[:, :3], source=sound, source_lengths=lengths, cache=cache)
    close(torch.cat((prefix, net(ids[:, 3:], cache=cache)), dim=1), together)
    for row, length in enumerate(lengths.tolist()):
        close(together[row : row + 1], net(ids[row : row + 1], source=sound[row : row + 1, :length]))


def test_the_context_counts_vectors_not_frames() -> None:
    net = network(input=SOUND, max_seq_len=4)
    assert net(randn(1, 8, MELS)).shape[1] == 4
    with pytest.raises(UsageError, match=r"9 frames.* 5 vectors.* context of 4"):
        net(randn(1, 9, MELS))


# --- factorised embeddings --------------------------------------------------------------------------------------------


def test_a_factorised_embedding_is_narrow_up_to_its_projection() -> None:
    net = network(embedding={"width": 6, "norm": True, "num_segments": 2}, head=None, norm={"kind": "layernorm"})
    part, ids, segments = net.encoder_embedding, torch.tensor([[3, 1, 2]]), torch.tensor([[0, 1, 1]])
    assert [part.input.weight.shape[1], part.position.weight.shape[1], part.segments.weight.shape[1]] == [6, 6, 6]
    narrow = part.input.weight[ids] + part.position.weight[:3] + part.segments.weight[segments]
    normed = F.layer_norm(narrow, (6,), part.norm.weight, part.norm.bias, part.norm.eps)
    close(part(ids, torch.arange(3)[None], segments), F.linear(normed, part.projection.weight, part.projection.bias))


def test_a_head_that_fills_masks_reads_a_factorised_embedding_tied() -> None:
    net = network(embedding={"width": 6}, tie_embeddings="head", head={"kind": "masked-language-model"})
    assert net.head.weight is net.encoder_embedding.input.weight
    assert net.head.dense.weight.shape == (6, 16)
    assert net(torch.tensor([[1, 2]])).shape == (1, 2, V)


def test_padding_stays_zero_through_the_projection() -> None:
    part = network(embedding={"width": 6}, head=None).encoder_embedding
    nn.init.ones_(part.projection.bias)
    x_BTM = part(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], lengths_B=torch.tensor([2]))
    assert x_BTM[0, 2].eq(0).all()
    assert x_BTM[0, :2].ne(0).all()


# --- starting weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "std"),
    [("normal", {"convolution": 0.5, "class_token": 0.5}), ("t5", {"convolution": 192**-0.5, "class_token": 1.0})],
)
def test_stems_are_drawn_like_other_matrices_and_tables(kind: str, std: dict[str, float]) -> None:
    init = {"kind": kind, "std": 0.5} if kind == "normal" else {"kind": kind}
    stem = network(input=IMAGES | {"patch_size": 4, "channels": 12}, d_model=256, init=init).encoder_embedding.input
    assert stem.convolution.weight.std().item() == pytest.approx(std["convolution"], rel=0.1)
    assert stem.class_token.std().item() == pytest.approx(std["class_token"], rel=0.2)
    assert stem.convolution.bias.eq(0).all()


# --- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input": IMAGES | {"patch_size": 5}}, ("input.image_size", "input.patch_size", "(8, 12)", "5")),
        ({"input": IMAGES | {"image_size": 0}}, ("image_size",)),
        ({"input": IMAGES | {"image_size": [8, 12, 3]}}, ("image_size",)),
        ({"input": IMAGES | {"image_size": 2**20}}, ("image_size",)),
        ({"input": IMAGES | {"channels": 0}}, ("channels",)),
        ({"input": IMAGES, "max_seq_len": 6}, ("max_seq_len", "input.kind", "7", "6")),
        ({"input": IMAGES, "embedding": {"num_segments": 2}}, ("embedding.num_segments", "images")),
        ({"input": SOUND | {"num_mels": 0}}, ("num_mels",)),
        ({"input": SOUND, "embedding": {"num_segments": 2}}, ("embedding.num_segments", "log-mel")),
        ({"input": SOUND, "family": "decoder"}, ("family", "input.kind")),
        ({"input": SOUND, "tie_embeddings": "head"}, ("tie_embeddings", "input.kind")),
        ({"embedding": {"width": 0}}, ("width",)),
        ({"embedding": {"width": 5}, "position": {"kind": "sinusoidal"}}, ("position.kind", "embedding.width", "5")),
        (
            {"embedding": {"width": 6}, "family": "decoder", "tie_embeddings": "head"},
            ("tie_embeddings", "embedding.width"),
        ),
        (
            {"family": "encoder-decoder", "encoder": {"embedding": {"width": 6}}, "tie_embeddings": "source-target"},
            ("tie_embeddings", "encoder.embedding.width"),
        ),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_by_name(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = refused(**changes)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (IMAGES, {"ids": randn(2, 1, 8, 12)}, ("ids", "[2, 1, 8, 12]", "images [B, 3, 8, 12]")),
        (IMAGES, {"ids": randn(2, 3, 12, 8)}, ("[2, 3, 12, 8]", "images [B, 3, 8, 12]")),
        (IMAGES, {"ids": randn(3, 8, 12)}, ("[3, 8, 12]", "images [B, 3, 8, 12]")),
        (IMAGES, {"ids": torch.ones(2, 3, 8, 12, dtype=torch.int64)}, ("int64", "images")),
        (IMAGES, {"ids": randn(1, 3, 8, 12), "lengths": torch.tensor([1])}, ("images", "lengths")),
        (IMAGES, {"ids": randn(1, 3, 8, 12), "documents": torch.zeros(1, 7, dtype=torch.int64)}, ("documents",)),
        (IMAGES, {"ids": randn(1, 3, 8, 12), "positions": torch.zeros(1, 8, dtype=torch.int64)}, ("[1, 8]", "[1, 7]")),
        (SOUND, {"ids": randn(2, 6, MELS + 1)}, ("[2, 6, 6]", "log-mel features [B, F, 5]")),
        (SOUND, {"ids": randn(2, MELS)}, ("[2, 5]", "log-mel features [B, F, 5]")),
        (SOUND, {"ids": randn(2, 0, MELS)}, ("[2, 0, 5]",)),
        (SOUND, {"ids": randn(1, 6, MELS), "lengths": torch.tensor([7])}, ("7", "lengths", "0 .. 6")),
        (SOUND, {"ids": randn(1, 6, MELS), "documents": torch.zeros(1, 3, dtype=torch.int64)}, ("documents",)),
    ],
)
def test_arguments_that_do_not_fit_the_stem_are_refused_by_name(
    kind: dict[str, Any], arguments: dict[str, Tensor], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as error:
        network(input=kind)(**arguments)
    for word in words:
        assert word in str(error.value)


def test_labels_of_masked_sound_stand_at_vectors() -> None:
    net = network(input=SOUND, head={"kind": "masked-language-model"})
    assert net(randn(1, 6, MELS), labels=torch.tensor([[1, -100, 2]])).target_count == 2
    with pytest.raises(UsageError, match=r"\[1, 6\].*\[1, 3\]"):
        net(randn(1, 6, MELS), labels=torch.zeros(1, 6, dtype=torch.int64))


# --- parity -----------------------------------------------------------------------------------------------------------

ENCODER_LAYER = {
    r"self_attn\.out_proj|attention\.o_proj": "self_attention.function.output",
    r"(?:self_attn|attention)\.q_proj": "self_attention.function.query",
    r"(?:self_attn|attention)\.k_proj": "self_attention.function.key",
    r"(?:self_attn|attention)\.v_proj": "self_attention.function.value",
    r"self_attn_layer_norm|layernorm_before": "self_attention.norm_in",
    r"final_layer_norm|layernorm_after": "feed_forward.norm_in",
    r"(?:mlp\.)?fc1": "feed_forward.function.up",
    r"(?:mlp\.)?fc2": "feed_forward.function.down",
}
WHISPER = {
    r"conv1": "encoder_embedding.input.first",
    r"conv2": "encoder_embedding.input.second",
    r"layer_norm": "encoder.final_norm",
}
VIT = {
    r"embeddings\.cls_token": "encoder_embedding.input.class_token",
    r"embeddings\.position_embeddings": "encoder_embedding.position.weight",
    r"embeddings\.patch_embeddings\.projection": "encoder_embedding.input.convolution",
    r"layernorm": "encoder.final_norm",
    r"pooler\.dense": "head.pooler.dense",
}


def renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """Their tensors under our names; what is renamed by no rule stays behind."""
    rules = {rf"layers\.(\d+)\.(?:{theirs})": rf"encoder.blocks.\1.{ours}" for theirs, ours in ENCODER_LAYER.items()}
    result = {}
    for theirs, ours in (rules | names).items():
        for name in list(tensors):
            match = re.fullmatch(rf"(?:{theirs})(\.weight|\.bias|)", name)
            if match:
                result[match.expand(ours) + match.groups()[-1]] = tensors.pop(name)
    return result


PUBLISHED = {
    "norm": {"kind": "layernorm", "eps": 1e-5},
    "feed_forward": {"kind": "gelu", "d_ff": 24, "bias": True},
    "attention": {"num_heads": 4, "bias": True},
}


def test_a_whisper_encoder_computes_what_transformers_computes() -> None:
    config = WhisperConfig(
        d_model=16,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=24,
        num_mel_bins=MELS,
        max_source_positions=9,
    )
    oracle = WhisperEncoder(config)
    table = oracle.embed_positions.weight.detach().clone()
    randomise(oracle)
    oracle.embed_positions.weight.data = table
    oracle = oracle.double().eval()
    whisper = PUBLISHED | {
        "position": {"kind": "sinusoidal", "layout": "tensor2tensor"},
        "attention": {"num_heads": 4, "bias": "qvo"},
    }
    net = network(input=SOUND, max_seq_len=9, **whisper)

    def translate(tensors: Tensors) -> Tensors:
        tensors.pop("embed_positions.weight")
        return renamed(tensors, WHISPER)

    copy_weights(oracle, net, translate)
    sound = randn(2, 18, MELS)
    close(net(sound), oracle(sound.transpose(1, 2)).last_hidden_state, 1e-6)  # their table is rounded to float32


def test_a_vit_computes_what_transformers_computes() -> None:
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=(8, 12),
        patch_size=4,
        layer_norm_eps=1e-5,
    )
    oracle = randomise(ViTModel(config)).double().eval()
    net = network(input=IMAGES, head={"kind": "none", "pooler": True}, **PUBLISHED)

    def translate(tensors: Tensors) -> Tensors:
        result = renamed(tensors, VIT)
        for name in ("input.class_token", "position.weight"):
            result[f"encoder_embedding.{name}"] = result[f"encoder_embedding.{name}"].squeeze()
        return result

    copy_weights(oracle, net, translate)
    images = randn(2, 3, 8, 12)
    expected = oracle(images)
    hidden = net(images)
    close(hidden, expected.last_hidden_state)
    close(net.head.pooler(hidden[:, 0]), expected.pooler_output)

"""A text as one vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkv.checkpoint.store import Pooling
from qkv.config.errors import UsageError
from qkv.config.run import Config
from qkv.generate import embed
from qkv.model import Model
from qkv.nn import Transformer

from .tiny import CONTEXT, byte_tokenizer, model, network

TEXTS = ["so good", "", "a much longer text than the others are", "我", "so good"]
HEADS = {
    "none": {"kind": "none"},
    "pooler": {"kind": "none", "pooler": True},
    "masked": {"kind": "masked-language-model"},
    "classifier": {"kind": "classifier", "num_classes": 3},
}


def whole(text: str) -> list[int]:
    return [257, *text.encode(), 258]


def hidden(made: Transformer, text: str) -> torch.Tensor:
    """The oracle: the hidden vectors [S, M] of a text alone."""
    with torch.no_grad():
        return made.encode(torch.tensor([whole(text)]))[0]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_a_vector_is_pooled_from_the_texts_own_tokens(head: str, pooling: str) -> None:
    made = model(family="encoder", head=HEADS[head])
    found = made.embed(TEXTS, pooling=pooling, batch_size=2)
    assert (found.shape, found.dtype) == ((5, 16), np.float32)
    pooled = {
        "mean": lambda h: h.mean(0),
        "cls": lambda h: h[0],
        "max": lambda h: h.amax(0),
        "last": lambda h: h[-1],
    }[pooling]
    expected = np.stack([pooled(hidden(made.network, text)).numpy() for text in TEXTS])
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_vector_does_not_depend_on_its_neighbours_nor_on_the_batch() -> None:
    made = model(family="encoder")
    together = made.embed(TEXTS)
    for batch_size in (1, 2, 100):
        np.testing.assert_allclose(made.embed(TEXTS, batch_size=batch_size), together, atol=2e-5)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(made.embed(text), vector, atol=2e-5)
    np.testing.assert_allclose(made.embed(TEXTS[::-1]), together[::-1], atol=2e-5)
    assert made.embed([]).shape == (0, 16)
    ids, text = made.embed([whole("so good"), "so good"])
    np.testing.assert_allclose(ids, text, atol=1e-6)


def test_a_folder_says_how_its_model_pools_and_the_caller_may_say_otherwise() -> None:
    made = model(family="encoder")
    made.pooling = Pooling("max", normalise=True)
    asked = Model(made.network, made.tokenizer, made.config)
    plain = asked.embed(TEXTS, pooling="max")
    np.testing.assert_allclose(made.embed(TEXTS, normalise=False), plain, atol=1e-6)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(made.embed(TEXTS), plain / lengths, atol=1e-6)
    np.testing.assert_allclose(made.embed(TEXTS, pooling="mean", normalise=False), asked.embed(TEXTS), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(asked.embed(TEXTS, normalise=True), axis=1), 1, atol=1e-6)


def test_a_text_longer_than_the_context_is_cut_and_still_ends() -> None:
    made = model(family="encoder")
    cut = [257, *b"x" * (CONTEXT - 2), 258]
    np.testing.assert_allclose(made.embed("x" * 500), made.embed(cut), atol=1e-6)


def test_a_text_is_cut_where_the_folder_says() -> None:
    made = model(family="encoder")
    made.pooling = Pooling("mean", normalise=False, max_seq_len=6)
    np.testing.assert_allclose(made.embed("x" * 9), made.embed([257, *b"xxxx", 258]), atol=1e-6)
    made.pooling = Pooling("mean", normalise=False, max_seq_len=10 * CONTEXT)
    np.testing.assert_allclose(made.embed("x" * 500), made.embed("x" * 400), atol=1e-6)


def test_a_decoder_gives_the_vector_of_its_last_token_when_asked() -> None:
    for head in ({"kind": "language-model"}, {"kind": "classifier", "num_classes": 2, "pooling": "last"}):
        made = model(head=head)
        bare = network(head={"kind": "none"})
        bare.load_state_dict({k: v for k, v in made.network.state_dict().items() if not k.startswith("head.")})
        with torch.no_grad():
            expected = np.stack([bare(torch.tensor([whole(text)]))[0, -1].numpy() for text in TEXTS])
        np.testing.assert_allclose(made.embed(TEXTS, pooling="last"), expected, atol=2e-5)
        with pytest.raises(UsageError, match="the last token alone") as caught:
            made.embed(TEXTS)
        assert "pooling last" in str(caught.value)


def test_the_encoder_of_an_encoder_decoder_embeds_its_sources() -> None:
    made = model(family="encoder-decoder")
    expected = np.stack([hidden(made.network, text).mean(0).numpy() for text in TEXTS])
    np.testing.assert_allclose(made.embed(TEXTS), expected, atol=2e-5)


def test_what_cannot_be_meant_is_refused_by_name() -> None:
    made = model(family="encoder")
    with pytest.raises(UsageError, match="no pooling 'sum'"):
        made.embed(TEXTS, pooling="sum")
    with pytest.raises(UsageError, match="normalise is True or False"):
        made.embed(TEXTS, normalise="no")
    with pytest.raises(UsageError, match="batch_size"):
        made.embed(TEXTS, batch_size=0)
    with pytest.raises(UsageError, match="the id 260 in text 1"):
        made.embed([[1], [260]])
    with pytest.raises(UsageError, match="text 0 is empty"):
        made.embed([[]])
    with pytest.raises(UsageError, match="no tokenizer"):
        Model(made.network, None, made.config).embed(TEXTS)
    reads = network(family="encoder", input={"kind": "features", "width": 3}, head={"kind": "none"})
    with pytest.raises(UsageError, match="reads features"):
        Model(reads, byte_tokenizer(), Config(model=reads.config)).embed(TEXTS)


def test_texts_as_ids_need_no_tokenizer() -> None:
    made = network(family="encoder")
    found = embed(made, [whole("so good")], "mean")
    np.testing.assert_allclose(found, model(family="encoder").embed(["so good"]), atol=1e-6)

"""qkv computes what the published models compute: the same weights give the same numbers.

Every model is a preset at toy size, filled with the weights of an oracle that others wrote (torch.nn, transformers), or
of a plain one written here. In float32 the promise is 1e-5 of the largest value; float64 tells apart what float32
cannot, such as two values of a norm's eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from qkv import Config, Transformer
from qkv.nn import use_kernel
from qkv.nn.kernels import KernelName

from .parity_weights import (
    Translator,
    bert,
    classic,
    copy_weights,
    gpt2,
    gradients,
    llama,
    randomise,
    torch_transformer,
)

VOCAB, CONTEXT, WIDTH, LAYERS, HEADS, HIDDEN = 61, 40, 32, 3, 4, 56
SMALL = (
    f"model.vocab_size={VOCAB}",
    "tokenizer=null",
    f"model.max_seq_len={CONTEXT}",
    f"model.d_model={WIDTH}",
    f"model.num_layers={LAYERS}",
    f"model.attention.num_heads={HEADS}",
    f"model.feed_forward.d_ff={HIDDEN}",
)
LENGTHS = torch.tensor([11, 4, 8])
REAL = torch.arange(11) < LENGTHS[:, None]
SOURCE_LENGTHS = torch.tensor([5, 9, 1])
SOURCE_REAL = torch.arange(9) < SOURCE_LENGTHS[:, None]
KERNELS: tuple[KernelName, ...] = ("sdpa", "math", "tiled")
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small are ten times slower on two threads of a busy machine than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(ours: Tensor, theirs: Tensor, limit: float) -> None:
    """Equal up to `limit` times the largest value."""
    assert ours.shape == theirs.shape
    assert float((ours - theirs).detach().abs().max()) <= limit * float(theirs.detach().abs().max())


@dataclass
class Case:
    """An oracle, the network with its weights, and one question to both."""

    oracle: nn.Module
    network: Transformer
    translate: Translator
    arguments: dict[str, Any]
    """What the network is called with."""
    ask: Callable[[], Tensor]
    """The oracle's answer to the same."""
    real: Tensor = REAL
    """Where the answers must agree: not at padding."""
    limit64: float = LIMITS[torch.float64]
    read: Callable[[Transformer, Tensor], Tensor] = lambda network, output: output
    """What of the network's output is its answer."""

    def answer(self) -> Tensor:
        return self.read(self.network, self.network(**self.arguments))

    def to(self, dtype: torch.dtype) -> None:
        self.oracle.to(dtype)
        self.network.to(dtype)


def make(preset: str, *overrides: str, oracle: nn.Module, translate: Translator) -> tuple[nn.Module, Transformer]:
    """The oracle with random weights and the preset's network with the same, both for inference."""
    network = Transformer(Config.load(preset, *SMALL, *overrides).model)
    copy_weights(randomise(oracle), network, translate)
    return oracle.eval(), network.eval()


# --- 2017 -------------------------------------------------------------------------------------------------------------


class TorchTransformer(nn.Module):
    """torch.nn's encoder and decoder, with embeddings and the head around them."""

    def __init__(self, norm_first: bool, tied: bool) -> None:
        super().__init__()
        options = {"dropout": 0.0, "layer_norm_eps": 1e-6, "batch_first": True, "norm_first": norm_first}
        norms = [nn.LayerNorm(WIDTH, eps=1e-6) if norm_first else None for _ in range(2)]
        self.encoder_embedding = nn.Parameter(torch.empty(VOCAB, WIDTH))
        self.decoder_embedding = self.encoder_embedding if tied else nn.Parameter(torch.empty(VOCAB, WIDTH))
        self.head = self.encoder_embedding if tied else nn.Parameter(torch.empty(VOCAB, WIDTH))
        encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, activation="relu", **options)
        decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, activation="relu", **options)
        self.encoder = nn.TransformerEncoder(encoder, LAYERS, norms[0], enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, LAYERS, norms[1])

    def forward(self, ids: Tensor, source: Tensor, source_padding: Tensor) -> Tensor:
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        memory = self.encoder(self.embed(source, self.encoder_embedding), src_key_padding_mask=source_padding)
        hidden = self.decoder(
            self.embed(ids, self.decoder_embedding),
            memory,
            tgt_mask=future,
            memory_key_padding_mask=source_padding,
        )
        return hidden @ self.head.T

    @staticmethod
    def embed(ids: Tensor, matrix: Tensor) -> Tensor:
        """Section 3.4 and 3.5 of the paper, one number at a time."""
        signal = torch.tensor(
            [
                [(math.cos if c % 2 else math.sin)(p / 10000 ** ((c - c % 2) / WIDTH)) for c in range(WIDTH)]
                for p in range(ids.shape[1])
            ],
            dtype=torch.float64,
        )
        return matrix[ids] * math.sqrt(WIDTH) + signal.to(matrix.dtype)


def case_2017(norm_first: bool, tied: bool) -> Case:
    translate = torch_transformer("norm_in" if norm_first else "norm_stream")
    oracle, network = make(
        "attention-is-all-you-need",
        "model.attention.bias=true",
        f"model.norm.placement={'pre' if norm_first else 'post'}",
        f"model.tie_embeddings={'all' if tied else 'none'}",
        oracle=TorchTransformer(norm_first, tied),
        translate=translate,
    )
    ids, source = draw_ids(3, 11), draw_ids(3, 9, seed=2)
    arguments = {"ids": ids, "source": source, "lengths": LENGTHS, "source_lengths": SOURCE_LENGTHS}
    return Case(oracle, network, translate, arguments, lambda: oracle(ids, source, ~SOURCE_REAL))


# --- GPT-2, LLaMA, BERT -----------------------------------------------------------------------------------------------


def case_gpt2() -> Case:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=HIDDEN,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    oracle, network = make("gpt2", oracle=GPT2LMHeadModel(config), translate=gpt2)
    ids = draw_ids(3, 11)
    return Case(
        oracle,
        network,
        gpt2,
        {"ids": ids, "lengths": LENGTHS},
        lambda: oracle(ids, attention_mask=REAL.long()).logits,
    )


def case_llama(tied: bool) -> Case:
    """Two query heads per key/value head; heads wider than d_model / num_heads; the tied one has biases as well."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=HIDDEN,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attention_bias=tied,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    oracle, network = make(
        "llama-tiny",
        "model.attention.num_kv_heads=2",
        "model.attention.head_dim=12",
        f"model.attention.bias={'true' if tied else 'false'}",
        "model.norm.eps=1e-3",
        "model.position.theta=500",
        f"model.tie_embeddings={'head' if tied else 'none'}",
        oracle=LlamaForCausalLM(config),
        translate=llama,
    )
    ids = draw_ids(3, 11)
    return Case(
        oracle,
        network,
        llama,
        {"ids": ids, "lengths": LENGTHS},
        lambda: oracle(ids, attention_mask=REAL.long()).logits,
        limit64=1e-6,  # the oracle normalises and turns in float32 even then
    )


def case_bert(kind: type[PreTrainedModel], read: Callable[[Any], Tensor], *overrides: str) -> Case:
    config = BertConfig(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        num_labels=3,
        pad_token_id=None,  # else the row of id 0 would get no gradient
        attn_implementation="eager",
    )
    oracle, network = make("bert-base", *overrides, oracle=kind(config), translate=bert)
    ids, segments = draw_ids(3, 11), torch.arange(11) // torch.tensor([[6], [2], [5]])
    segments = segments.clamp(max=1)
    return Case(
        oracle,
        network,
        bert,
        {"ids": ids, "lengths": LENGTHS, "segments": segments},
        lambda: read(oracle(ids, attention_mask=REAL.long(), token_type_ids=segments)),
    )


def case_bert_masked() -> Case:
    head = ("model.head={kind: masked-language-model}", "model.tie_embeddings=head")
    return case_bert(BertForMaskedLM, lambda output: output.logits, *head)


def case_bert_hidden() -> Case:
    return case_bert(BertModel, lambda output: output.last_hidden_state)


def case_bert_pooled() -> Case:
    case = case_bert(BertModel, lambda output: output.pooler_output)
    case.read = lambda network, hidden: network.head.pooler(hidden[:, 0])
    case.real = torch.ones(3, dtype=torch.bool)
    return case


def case_bert_classifier() -> Case:
    head = "model.head={kind: classifier, num_classes: 3}"
    case = case_bert(BertForSequenceClassification, lambda output: output.logits, head)
    case.real = torch.ones(3, dtype=torch.bool)
    return case


# --- the tutorial GPT -------------------------------------------------------------------------------------------------


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ClassicLayer(nn.Module):
    def __init__(self, dropout: float, output_dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = RootMeanSquare(), RootMeanSquare()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.dropout, self.output_dropout = dropout, output_dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)), self.dropout)
        return x + self.drop(self.drop(self.transform(self.norm2(x)), self.output_dropout), self.dropout)

    def attend(self, x: Tensor) -> Tensor:
        queries, keys, values = self.q(x), self.k(x), self.v(x)
        size = WIDTH // HEADS
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        heads = []
        for start in range(0, WIDTH, size):
            part = slice(start, start + size)
            scores = queries[..., part] @ keys[..., part].mT / math.sqrt(size)
            heads.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ values[..., part])
        return self.o(torch.cat(heads, -1))

    def transform(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))

    def drop(self, x: Tensor, probability: float) -> Tensor:
        return F.dropout(x, probability, self.training)


class ClassicGPT(nn.Module):
    """The tutorial GPT, as plainly as it can be written."""

    def __init__(self, dropout: float, output_dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(ClassicLayer(dropout, output_dropout) for _ in range(LAYERS))
        self.norm = RootMeanSquare()
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        x = F.dropout(self.token(ids) + self.position(positions), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.token.weight.T


def case_classic(dropout: float = 0.0, output_dropout: float = 0.0) -> Case:
    oracle, network = make(
        "gpt-classic",
        f"model.dropout={dropout}",
        f"model.feed_forward.output_dropout={output_dropout}",
        oracle=ClassicGPT(dropout, output_dropout),
        translate=classic,
    )
    ids = draw_ids(3, 11)
    return Case(oracle, network, classic, {"ids": ids}, lambda: oracle(ids), torch.ones_like(REAL))


# --- what holds for all -----------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[], Case]] = {
    "2017-post": partial(case_2017, norm_first=False, tied=True),
    "2017-pre": partial(case_2017, norm_first=True, tied=False),
    "gpt2": case_gpt2,
    "llama-tied": partial(case_llama, tied=True),
    "llama-untied": partial(case_llama, tied=False),
    "bert-masked": case_bert_masked,
    "bert-hidden": case_bert_hidden,
    "bert-pooled": case_bert_pooled,
    "bert-classifier": case_bert_classifier,
    "gpt-classic": case_classic,
}
every_case = pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())


@every_case
@torch.no_grad()
def test_logits_equal_the_oracles_with_every_kernel(build: Callable[[], Case]) -> None:
    case = build()
    theirs = case.ask()[case.real]
    for kernel in KERNELS:
        use_kernel(case.network, kernel)
        assert_same(case.answer()[case.real], theirs, LIMITS[torch.float32])


@every_case
@torch.no_grad()
def test_logits_equal_the_oracles_in_float64(build: Callable[[], Case]) -> None:
    case = build()
    case.to(torch.float64)
    assert_same(case.answer()[case.real], case.ask()[case.real], case.limit64)


@every_case
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_equal_the_oracles_with_every_kernel(build: Callable[[], Case], kernel: KernelName) -> None:
    case = build()
    case.to(torch.float64)
    use_kernel(case.network, kernel)
    theirs = case.ask()[case.real]
    probe = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (theirs * probe).sum().backward()
    (case.answer()[case.real] * probe).sum().backward()
    expected = gradients(case.oracle, case.translate)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, parameter in case.network.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert float((grad - expected[name]).abs().max()) <= case.limit64 * largest, name


# --- decoding ---------------------------------------------------------------------------------------------------------

DECODERS = {name: CASES[name] for name in ("gpt2", "llama-tied", "llama-untied")}


@pytest.mark.parametrize("build", DECODERS.values(), ids=DECODERS.keys())
@pytest.mark.parametrize("capacity", [None, CONTEXT], ids=["growing", "fixed"])
@torch.no_grad()
def test_greedy_decoding_with_a_cache_equals_the_oracles(build: Callable[[], Case], capacity: int | None) -> None:
    """Prompts of unequal length in one right-padded batch, against the oracle's own cache and one prompt at a time."""
    case, count = build(), 20
    prompts, network = case.arguments["ids"], case.network
    cache = network.new_cache(len(prompts), capacity)
    logits = network(prompts, lengths=LENGTHS, cache=cache, logits="last")
    steps = [logits]
    for _ in range(count - 1):
        logits = network(logits.argmax(-1), cache=cache)
        steps.append(logits)
    ours = torch.cat(steps, 1)
    for row, length in enumerate(LENGTHS.tolist()):
        prompt = prompts[row : row + 1, :length]
        whole = case.oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        assert ours[row].argmax(-1).tolist() == whole[0, length:].tolist()
        assert_same(ours[row], case.oracle(whole).logits[0, length - 1 : -1], LIMITS[torch.float32])


@torch.no_grad()
def test_cached_translation_equals_the_oracles_without_a_cache() -> None:
    """The source is read once; then the network goes on from its caches, and the oracle starts anew for every token."""
    case, count = case_2017(norm_first=False, tied=True), 20
    source, begin = case.arguments["source"], draw_ids(3, 1, seed=4)
    cache = case.network.new_cache(len(begin))
    logits = case.network(begin, source=source, source_lengths=SOURCE_LENGTHS, cache=cache)
    whole = begin
    for step in range(count):
        theirs = case.oracle(whole, source, ~SOURCE_REAL)[:, -1:]
        assert_same(logits, theirs, LIMITS[torch.float32])
        assert torch.equal(logits.argmax(-1), theirs.argmax(-1)), step
        whole = torch.cat((whole, theirs.argmax(-1)), 1)
        logits = case.network(whole[:, -1:], cache=cache)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_oracles() -> None:
    """The oracle shifts its labels itself and averages."""
    case = case_gpt2()
    labels = case.arguments["ids"].masked_fill(~REAL, -100)
    theirs = case.oracle(case.arguments["ids"], attention_mask=REAL.long(), labels=labels).loss
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    ours = case.network(**case.arguments, labels=shifted)
    assert int(ours.target_count) == int(LENGTHS.sum()) - len(LENGTHS)
    torch.testing.assert_close(ours.loss_sum / ours.target_count, theirs, rtol=1e-6, atol=0)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_the_tutorial_gpt_drops_where_the_tutorial_drops() -> None:
    """Dropout is called at these places, each with its own probability, and nowhere else."""
    network = case_classic(dropout=0.25, output_dropout=0.5).network.train()
    called: list[tuple[str, float]] = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.register_forward_hook(lambda module, _, __, name=name: called.append((name, module.p)))
    network(draw_ids(2, 7))
    expected = [("decoder_embedding.dropout", 0.25)]
    for layer in range(LAYERS):
        block = f"decoder.blocks.{layer}"
        expected += [
            (f"{block}.self_attention.dropout", 0.25),
            (f"{block}.feed_forward.function.output_dropout", 0.5),
            (f"{block}.feed_forward.dropout", 0.25),
        ]
    assert called == expected


def test_the_tutorial_gpt_in_training_equals_the_plain_one_under_the_same_seed() -> None:
    """The same random numbers in the same order drop the same values: one dropout too many or too few would differ."""
    case = case_classic(dropout=0.25, output_dropout=0.5)
    case.oracle.train()
    case.network.train()
    torch.manual_seed(0)
    ours = case.answer()
    torch.manual_seed(0)
    assert_same(ours, case.ask(), LIMITS[torch.float32])
    assert not torch.equal(ours, case.answer())
    case.network.eval()
    assert torch.equal(case.answer(), case.answer())


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "count", "oracle"),
    [
        ("attention-is-all-you-need", 63_045_632, None),
        ("bert-base", 109_482_240, lambda: BertModel(BertConfig())),
        ("gpt2", 124_439_808, lambda: GPT2LMHeadModel(GPT2Config())),
    ],
)
def test_the_published_models_have_their_published_number_of_parameters(
    preset: str, count: int, oracle: Callable[[], nn.Module] | None
) -> None:
    network = Transformer(Config.load(preset).model, device="meta")
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    if oracle is not None:
        with torch.device("meta"):
            assert sum(parameter.numel() for parameter in oracle().parameters()) == count

"""A pairwise-generated matrix of configurations, and what its tests share: networks, inputs, comparisons.

Every two options of different axes meet in at least one configuration; a seeded random sample comes on top. Rules name
the combinations that the configuration refuses, so that a configuration that is refused unexpectedly fails.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.model import ModelConfig
from qkv.nn import Attention, LatentAttention, RMSNorm, Transformer, use_kernel
from qkv.nn.experts import Experts
from qkv.nn.init import OwnStart
from qkv.nn.kernels import KernelName, TiledKernel
from qkv.nn.score import AdditiveWeight

VOCABULARY = 23
"""Of what is predicted; a source of its own width also has a vocabulary of its own."""
MAX_SEQ_LEN = 24
PREFIX = 3
"""Tokens at the beginning of each row that see each other, of a model with a prefix."""
FEWEST_OF_A_FAMILY = 20
TOLERANCE = 1e-5
"""Largest difference of logits that are equal, as a share of the largest logit, in float32."""

Inputs = dict[str, Any]
"""Keyword arguments of `Transformer.forward`."""

AXES: dict[str, tuple[str, ...]] = {
    "family": ("encoder-decoder", "decoder", "encoder"),
    "source": ("ids", "wide-ids", "features", "images"),
    "memory": ("all-vectors", "learned-queries"),
    "prefix": ("no-prefix", "prefix"),
    "tie": ("untied", "tied-head", "tied-source", "tied-all"),
    "position": (
        "none",
        "sinusoidal",
        "learned",
        "rope-half",
        "rope-interleaved",
        "rope-partial",
        "rope-yarn",
        "rope-dynamic",
        "relative",
        "alibi",
    ),
    "norm": ("layernorm", "rmsnorm", "rmsnorm-offset", "none"),
    "placement": ("pre", "post", "sandwich", "output"),
    "attention": ("standard", "latent", "differential"),
    "heads": ("mha", "gqa", "mqa"),
    "head_dim": ("even-share", "own", "own-2-mod-4"),
    "bias": ("no-bias", "bias", "qkv-bias", "qvo-bias"),
    "qk_norm": ("qk-plain", "qk-per-head", "qk-full"),
    "scores": ("scores", "scaled-scores", "capped-scores", "cosine-scores", "additive-scores"),
    "values": ("own-values", "fixed-values", "learned-values"),
    "feed_forward": ("swiglu", "geglu", "geglu_tanh", "relu", "gelu", "gelu_tanh", "silu", "moe", "moe-groups"),
    "parallel": ("in-turn", "one-norm", "two-norms"),
    "residual": (
        "residual",
        "no-residual",
        "rezero",
        "deepnorm",
        "hyper-connections",
        "mhc",
        "attention-residuals",
        "attention-residuals-block",
    ),
    "window": ("global", "window"),
    "kernel": ("math", "tiled", "sdpa"),
    "embedding": ("bare", "scaled", "normed", "segments", "factorised"),
    "cache": ("growing", "static"),
    "layers": ("uniform", "mixed", "shared"),
    "sinks": ("no-sinks", "sinks"),
    "gate": ("no-gate", "elementwise-gate", "per-head-gate"),
    "cross": ("cross-in-all", "cross-gated", "cross-in-one"),
}
"""Axis -> its options. `source` is what the encoder reads, where there is one, and `memory` what it makes of it. Images
come with a class token and registers."""

VECTORS = ("features", "images")
"""What an encoder reads that is no ids."""

MIXING = ("hyper-connections", "mhc", "attention-residuals", "attention-residuals-block")
"""Residual kinds whose sublayers read a mixture of several states."""

STANDARD_ONLY = {
    "head_dim": "even-share",
    "bias": "no-bias",
    "qk_norm": "qk-plain",
    "scores": "scores",
    "values": "own-values",
    "sinks": "no-sinks",
    "gate": "no-gate",
}
"""What latent attention cannot be told, and what it is where nothing is said."""

RULES: dict[str, Callable[[dict[str, str]], bool]] = {
    "an odd number of channels cannot rotate in pairs": lambda o: (
        o.get("position") == "rope-partial" and o.get("head_dim") == "own-2-mod-4"
    ),
    "one embedding cannot be tied to another": lambda o: (
        o.get("tie") in ("tied-source", "tied-all") and o.get("family") in ("decoder", "encoder")
    ),
    "one matrix cannot serve two vocabularies and widths": lambda o: (
        o.get("tie") in ("tied-source", "tied-all") and o.get("source") == "wide-ids"
    ),
    "features and images cannot share an embedding with ids": lambda o: (
        o.get("tie") in ("tied-source", "tied-all") and o.get("source") in VECTORS
    ),
    "an encoder of features or images has no embedding to share with its head": lambda o: (
        o.get("tie") == "tied-head" and o.get("family") == "encoder" and o.get("source") in VECTORS
    ),
    "features and images have no segments": lambda o: o.get("embedding") == "segments" and o.get("source") in VECTORS,
    "learned queries read for a decoder": lambda o: (
        o.get("memory") == "learned-queries" and o.get("family") in ("decoder", "encoder")
    ),
    "a prefix is the beginning of what a decoder writes on": lambda o: (
        o.get("prefix") == "prefix" and o.get("family") in ("encoder", "encoder-decoder")
    ),
    "a block with a source is not parallel": lambda o: (
        o.get("parallel") in ("one-norm", "two-norms") and o.get("family") == "encoder-decoder"
    ),
    "two norms stand before two functions": lambda o: (
        o.get("parallel") == "two-norms" and o.get("placement") in ("post", "output")
    ),
    "a language model's head reads the stream, not a factorised embedding": lambda o: (
        o.get("embedding") == "factorised"
        and (
            o.get("tie") == "tied-all"
            or (o.get("tie") == "tied-head" and o.get("family") in ("decoder", "encoder-decoder"))
        )
    ),
    "what several states are mixed to is read through a norm that stands before": lambda o: (
        o.get("residual") in MIXING and o.get("placement") in ("post", "output")
    ),
    "what several states are mixed to is read through a norm": lambda o: (
        o.get("residual") in MIXING and o.get("norm") == "none"
    ),
    "only a norm makes up for DeepNorm's alpha": lambda o: o.get("residual") == "deepnorm" and o.get("norm") == "none",
    "DeepNorm's norm stands behind": lambda o: (
        o.get("residual") == "deepnorm" and o.get("placement") in ("pre", "sandwich", "output")
    ),
    "every sublayer has its own weights over depth": lambda o: (
        o.get("residual") in ("attention-residuals", "attention-residuals-block") and o.get("layers") == "shared"
    ),
    "the first layer gives its values, the others mix them": lambda o: (
        o.get("values") in ("fixed-values", "learned-values")
        and o.get("layers") == "shared"
        and o.get("attention") != "latent"
    ),
    "latent attention has no key/value heads to share": lambda o: (
        o.get("attention") == "latent" and o.get("heads") in ("gqa", "mqa")
    ),
    "latent attention has channels of its own that rotate": lambda o: (
        o.get("attention") == "latent" and o.get("position") == "rope-partial"
    ),
    "differential attention has pairs of key/value heads": lambda o: (
        o.get("attention") == "differential" and o.get("heads") == "mqa"
    ),
    "a decoder reads tokens": lambda o: o.get("family") == "decoder" and o.get("source") in VECTORS,
    "a gate stands before a source": lambda o: (
        o.get("cross") == "cross-gated" and o.get("family") in ("decoder", "encoder")
    ),
    "a closed gate needs something else in the stream": lambda o: (
        o.get("cross") == "cross-gated" and o.get("residual") == "no-residual"
    ),
}
"""What the configuration refuses, by why: whether (partial) options break the rule."""


def is_useless(o: dict[str, str]) -> bool:
    """Whether (partial) options are valid and without meaning: with only one stack, none is wider than the other. Or
    nothing is asked of them here: an image of its own has no token that may change, no padding and no neighbour. Or are
    valid nowhere, each meaning another placement of norms."""
    if o.get("residual") == "deepnorm" and o.get("parallel") == "two-norms":
        return True
    bounded = o.get("scores") in ("cosine-scores", "additive-scores")  # no token then tells itself from the others
    alike = o.get("norm") == "none" or o.get("attention") == "differential"
    if bounded and o.get("residual") == "no-residual" and alike:
        return True
    # with nothing beside them, the same narrow matrices again and again: float32 rounds by more than the tolerance
    if o.get("attention") == "latent" and o.get("residual") == "no-residual" and o.get("layers") == "shared":
        return True
    # eight sublayers in a row, each a product of what differs little: likewise
    in_a_row = o.get("family") == "encoder-decoder" and o.get("residual") == "no-residual"
    if in_a_row and o.get("feed_forward") in ("swiglu", "geglu", "geglu_tanh"):
        return True
    if o.get("attention") == "latent" and any(o.get(axis, plain) != plain for axis, plain in STANDARD_ONLY.items()):
        return True
    if o.get("cross") == "cross-in-one" and o.get("layers") == "shared":
        return True
    one = o.get("family") in ("decoder", "encoder")
    return one and (o.get("cross", "cross-in-all") != "cross-in-all" or o.get("source") in ("wide-ids", "images"))


def broken_rules(options: dict[str, str]) -> list[str]:
    """Why the configuration refuses these options."""
    return [why for why, breaks in RULES.items() if breaks(options)]


def is_meant(options: dict[str, str]) -> bool:
    """Whether (partial) options are valid and mean something."""
    return not broken_rules(options) and not is_useless(options)


@dataclass(frozen=True)
class Case:
    """One configuration of the matrix."""

    name: str
    options: dict[str, str] = field(hash=False, compare=False)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{self.name}: {' '.join(self.options.values())}"

    @property
    def family(self) -> str:
        return self.options["family"]

    @property
    def causal(self) -> bool:
        return self.family != "encoder"

    @property
    def has_source(self) -> bool:
        return self.family == "encoder-decoder"

    @property
    def reads_features(self) -> bool:
        """Whether its encoder reads vectors instead of ids."""
        return self.options["source"] == "features"

    @property
    def reads_images(self) -> bool:
        """Whether its source is an image, which is read whole."""
        return self.options["source"] == "images"

    @property
    def prefix(self) -> int:
        """How many tokens at the beginning of each row see each other."""
        return PREFIX if self.options["prefix"] == "prefix" else 0

    @property
    def packs(self) -> bool:
        """Whether several documents may share a row."""
        return not (self.prefix or self.reads_images or self.options["memory"] == "learned-queries")

    @property
    def segments(self) -> bool:
        return self.options["embedding"] == "segments"

    @property
    def mixes_experts(self) -> bool:
        """Whether tokens are multiplied together with those that chose the same expert: how many these are changes what
        is rounded."""
        return self.options["feed_forward"].startswith("moe")

    @property
    def tree(self) -> dict[str, Any]:
        """The configuration as the user would write it."""
        return tree_of(self.options)


def tree_of(options: dict[str, str]) -> dict[str, Any]:
    """The configuration of (valid or invalid) options."""
    position: dict[str, Any] = {"kind": options["position"].split("-")[0]}
    if options["position"] == "rope-interleaved":
        position["layout"] = "interleaved"
    if options["position"] == "rope-partial":
        position["fraction"] = 0.5
    if options["position"] == "rope-yarn":
        position["scaling"] = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 6}
    if options["position"] == "rope-dynamic":
        position["scaling"] = {"kind": "dynamic", "factor": 4.0, "original_max_seq_len": MAX_SEQ_LEN}
    if options["position"] == "learned":
        position["offset"] = 2
    norm: dict[str, Any] = {"kind": options["norm"].split("-")[0], "placement": options["placement"]}
    if options["norm"] == "rmsnorm-offset":
        norm |= {"unit_offset": True, "rounding": "after-weight"}
    residual: dict[str, Any] = {
        "residual": {"kind": "plain"},
        "no-residual": {"kind": "none"},
        "hyper-connections": {"kind": "hyper-connections", "streams": 2, "fractions": 2},
        "mhc": {"kind": "mhc", "streams": 2, "exit": "learned"},
        "attention-residuals-block": {"kind": "attention-residuals", "block_size": 1},
    }
    score = options["scores"].removesuffix("-scores")
    embedding = {
        "bare": {},
        "scaled": {"scale": "sqrt-d-model"},
        "normed": {"norm": True},
        "segments": {"num_segments": 2},
        "factorised": {"width": 12},
    }
    tree: dict[str, Any] = {
        "family": options["family"],
        "prefix": options["prefix"] == "prefix",
        "vocab_size": VOCABULARY,
        "max_seq_len": MAX_SEQ_LEN,
        "d_model": 16,
        "num_layers": 2,
        "position": position,
        "norm": norm,
        "attention": {
            "num_heads": 4,
            "num_kv_heads": {"mha": 4, "gqa": 2, "mqa": 1}[options["heads"]],
            "head_dim": {"even-share": None, "own": 8, "own-2-mod-4": 6}[options["head_dim"]],
            "bias": {"no-bias": False, "bias": True, "qkv-bias": "qkv", "qvo-bias": "qvo"}[options["bias"]],
            "scale": 0.4 if options["scores"] == "scaled-scores" else None,
            "softcap": 2.0 if options["scores"] == "capped-scores" else None,
            "score": score if score in ("cosine", "additive") else "scaled-dot",
            "value_residual": options["values"].removesuffix("-values").replace("own", "none"),
            "qk_norm": options["qk_norm"].removeprefix("qk-").replace("plain", "none"),
            "window": 3 if options["window"] == "window" else None,
            "sinks": options["sinks"] == "sinks",
            "gate": options["gate"].removesuffix("-gate").replace("no", "none"),
        },
        "feed_forward": _feed_forward(options["feed_forward"], bias=options["bias"] == "bias"),
        "cross_gate": options["cross"] == "cross-gated",
        "parallel": options["parallel"].replace("in-turn", "none"),
        "residual": residual.get(options["residual"], {"kind": options["residual"]}),
        "share_layers": options["layers"] == "shared",
        "embedding": embedding[options["embedding"]],
        "tie_embeddings": {
            "untied": "none",
            "tied-head": "head",
            "tied-source": "source-target",
            "tied-all": "all",
        }[options["tie"]],
    }
    if options["attention"] == "differential":
        tree["attention"]["kind"] = "differential"
    if options["attention"] == "latent":
        ranks = {"q_rank": 8, "kv_rank": 10, "nope_dim": 4, "rope_dim": 4, "value_dim": 6}
        shared = {} if options["heads"] == "mha" else {"num_kv_heads": tree["attention"]["num_kv_heads"]}
        window = tree["attention"]["window"]
        tree["attention"] = {"kind": "latent", "num_heads": 4, "window": window, **ranks, **shared}
    if options["layers"] == "mixed":
        tree["layers"] = [
            {"attention": {"window": 2}},
            {"position": {"kind": "none"}, "attention": {"window": None}, "feed_forward": {"d_ff": 12}},
        ]
    if options["scores"] == "capped-scores" and options["family"] != "encoder":
        tree["head"] = {"kind": "language-model", "scale": "rsqrt-d-model", "softcap": 9.0}
    inputs: dict[str, dict[str, Any]] = {
        "features": {"input": {"kind": "features", "width": 5}},
        "images": {"input": {"kind": "patches", "image_size": 4, "patch_size": 2, "num_registers": 2}},
    }
    read = inputs.get(options["source"], {})
    queries: dict[str, Any] = {}
    if options["memory"] == "learned-queries":
        queries = {"num_queries": 3, "layers": None, "attention": {"window": None}}
        if options["position"] not in ("sinusoidal", "learned"):
            queries["position"] = {"kind": "none"}
    if options["family"] == "encoder-decoder":
        encoder: dict[str, Any] = {"num_layers": 1} if options["residual"] == "no-residual" else {}
        if options["source"] == "wide-ids":
            encoder |= {"d_model": 32, "vocab_size": VOCABULARY - 4}
        if read:
            encoder |= read | {"d_model": 32}
        tree["encoder"] = encoder | queries
        if options["cross"] == "cross-in-one":
            first, second = tree.get("layers", [{}, {}])
            tree["decoder"] = {"layers": [{**first, "cross_attention": None}, second]}
    else:
        tree |= read | queries
    return tree


def _feed_forward(option: str, *, bias: bool) -> dict[str, Any]:
    if not option.startswith("moe"):
        return {"kind": option, "d_ff": 20, "bias": bias}
    tree: dict[str, Any] = {"kind": "moe", "num_experts": 4, "d_ff": 20, "expert": {"bias": bias}}
    if option == "moe-groups":
        groups = {"num_groups": 2, "top_groups": 1, "group_score": "top-2-sum"}
        tree |= {"router": {"score": "sigmoid", "scale": 1.5, "bias": bias, **groups}, "shared": {"d_ff": 12}}
    return tree


def _cases() -> list[Case]:
    names = list(AXES)

    def is_partly_meant(row: Sequence[str]) -> bool:
        return is_meant(dict(zip(names, row, strict=False)))

    pairwise = AllPairs(list(AXES.values()), filter_func=is_partly_meant, n=2)
    rows = [dict(zip(names, row, strict=True)) for row in pairwise]
    draw = random.Random(2017)

    def add(**fixed: str) -> None:
        while True:
            row = {axis: draw.choice(options) for axis, options in AXES.items()} | fixed
            if is_meant(row) and row not in rows:
                rows.append(row)
                return

    # the generator is greedy and ends in dead ends where rules meet
    for (a, x), (b, y) in sorted(possible_pairs()):
        if not any(row[a] == x and row[b] == y for row in rows):
            add(**{a: x, b: y})
    for family in AXES["family"]:
        while sum(row["family"] == family for row in rows) < FEWEST_OF_A_FAMILY:
            add(family=family)
    short = {"decoder": "dec", "encoder": "enc", "encoder-decoder": "encdec"}
    told = ("position", "norm", "placement", "heads", "kernel")
    rows.sort(key=lambda row: AXES["family"].index(row["family"]))
    return [
        Case("-".join([f"{short[row['family']]}{index:02}", *(row[axis] for axis in told)]), row)
        for index, row in enumerate(rows)
    ]


def possible_pairs() -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Every two options of two axes that can be meant together, in some family."""
    return {
        ((a, x), (b, y))
        for a, b in itertools.combinations(AXES, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
        if any(is_meant({"family": family, a: x, b: y}) for family in AXES["family"])
    }


CASES = _cases()
CAUSAL = [case for case in CASES if case.causal]
FEATURES = [case for case in CASES if case.reads_features]


# --- networks ---------------------------------------------------------------------------------------------------------


def redraw(network: Transformer, inputs: Inputs, seed: int = 0) -> None:
    """Draw all parameters so that every one matters: biases are not 0, norms do not multiply by 1, attention is sharp,
    and each matrix ignores what all tokens of these inputs share and gives them a spread of about 1, however deep it
    stands and whatever is absent. (Without residual connections, all tokens would soon be one vector.)
    """
    generator = torch.Generator().manual_seed(seed)
    from_0 = {module.weight for module in network.modules() if isinstance(module, RMSNorm) and module.unit_offset}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.normal_(0.0, 1.0 if parameter.dim() > 1 else 0.3, generator=generator)
            if parameter.dim() == 1 and not name.endswith("bias") and parameter not in from_0:
                parameter.add_(1.0)
        for module in network.modules():
            for matrices in module.matrices if isinstance(module, Experts) else ():
                matrices.mul_(matrices.shape[-1] ** -0.5)
            if isinstance(module, OwnStart):
                module.start(generator)
                spread = 2.0 if isinstance(module, AdditiveWeight) else 0.3  # its scores are bounded by it
                for parameter in module.parameters(recurse=False):
                    parameter.add_(torch.empty_like(parameter).normal_(0.0, spread, generator=generator))

    def calibrate(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert isinstance(module, nn.Linear)
        tokens = args[0].flatten(0, -2)
        shared = F.normalize(tokens.mean(0), dim=0)
        module.weight.sub_(torch.outer(module.weight @ shared, shared))
        spread = F.linear(tokens, module.weight).std(0).square().mean().sqrt()
        module.weight.mul_(gains.get(module, 1.0) / spread)
        return F.linear(args[0], module.weight, module.bias)

    def calibrate_experts(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert isinstance(module, Experts)
        size = out.square().mean().sqrt()
        for part in (module.down, module.down_bias):
            if part is not None:
                part.div_(size)
        return out / size

    gains = {module.query: 1.5 for module in network.modules() if isinstance(module, Attention)}
    gains |= {module.query_up: 1.5 for module in network.modules() if isinstance(module, LatentAttention)}
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    experts = [module for module in network.modules() if isinstance(module, Experts)]
    handles = [module.register_forward_hook(calibrate) for module in linear]
    handles += [module.register_forward_hook(calibrate_experts) for module in experts]
    with torch.no_grad():
        network(**inputs)
    for handle in handles:
        handle.remove()


def variation(logits: Tensor) -> float:
    """By how much neighbouring tokens differ in their logits (the median), as a share of the largest logit."""
    steps = (logits[:, 1:] - logits[:, :-1]).abs().amax(2)
    return float(steps.median() / logits.abs().max())


def set_kernel(network: nn.Module, name: KernelName) -> None:
    """Use this kernel; tiles are small, so that test-size inputs have several, and none divides them evenly."""
    use_kernel(network, name)
    for module in network.modules():
        if isinstance(module, TiledKernel):
            module.tile = 4


@cache
def network_of(case: Case) -> Transformer:
    """The case's network, in eval mode and float32, shared by all tests: copy it to change it.

    Its weights are the first random ones that make every comparison mean something: logits vary from token to token,
    and float32 rounds them by a small part of the tolerance (without residual connections or norms it may be more).
    """
    network = Transformer(ModelConfig.model_validate(case.tree)).eval().requires_grad_(False)
    set_kernel(network, case.options["kernel"])  # type: ignore[arg-type]
    inputs = draw_inputs(case, 4, 12)
    for seed in range(100):
        redraw(network, inputs, seed)
        logits = network(**inputs)
        exact = copy.deepcopy(network).double()(**in_float64(inputs))
        if variation(logits) > 0.05 and difference(logits, exact) < TOLERANCE / 3:
            return network
    raise AssertionError(f"no weights make the logits vary and round well: {case!r}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks of this size are many times faster on one thread. Import this fixture to use it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- inputs -----------------------------------------------------------------------------------------------------------


def draw_tokens(case: Case, rows: int, length: int, seed: int, *, source: bool = False) -> Tensor:
    """Ids [rows, length] of the last stack or of the source; or features [rows, length, 5] or images [rows, 3, 4, 4],
    where those are read."""
    generator = torch.Generator().manual_seed(seed)
    if case.reads_images and source:
        return torch.randn(rows, 3, 4, 4, generator=generator)
    if case.reads_features and (source or case.family == "encoder"):
        return torch.randn(rows, length, 5, generator=generator)
    high = VOCABULARY - 4 if source and case.options["source"] == "wide-ids" else VOCABULARY
    return torch.randint(0, high, (rows, length), generator=generator)


def draw_inputs(case: Case, rows: int, length: int, source_length: int = 7, seed: int = 0) -> Inputs:
    """What the case reads: ids, and where it reads them, segments, a source and the length of a prefix."""
    inputs: Inputs = {"ids": draw_tokens(case, rows, length, seed)}
    if case.segments:
        generator = torch.Generator().manual_seed(seed + 2)
        inputs["segments"] = torch.randint(0, 2, (rows, length), generator=generator)
    if case.has_source:
        inputs["source"] = draw_tokens(case, rows, source_length, seed + 1, source=True)
    if case.prefix:
        inputs["prefix_lengths"] = torch.full((rows,), case.prefix)
    return inputs


def in_float64(inputs: Inputs) -> Inputs:
    """The same with features in float64."""
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


def other_tokens(tokens: Tensor) -> Tensor:
    """Tokens that differ from these in every place."""
    return tokens + 1.5 if tokens.is_floating_point() else (tokens + 1) % (VOCABULARY - 4)


def slots(inputs: Inputs, part: slice) -> Inputs:
    """Only these slots of the last stack's input."""
    return {key: value[:, part] if key in ("ids", "segments") else value for key, value in inputs.items()}


def row(inputs: Inputs, index: int) -> Inputs:
    """One row of the batch."""
    return {key: value[index : index + 1] for key, value in inputs.items()}


# --- comparisons ------------------------------------------------------------------------------------------------------


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert expected.isfinite().all()
    assert actual.isfinite().all()
    return float((actual - expected).abs().max() / expected.abs().max())


def assert_same(case: Case, actual: Tensor, expected: Tensor) -> None:
    """Bit for bit, but for mixtures of experts equal."""
    if case.mixes_experts:
        assert_equal(actual, expected)
    else:
        assert torch.equal(actual, expected)


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal as the design defines it, between logits that vary enough to tell."""
    share = difference(actual, expected)
    assert share <= tolerance, f"differs by {share:.2e} of the largest value"

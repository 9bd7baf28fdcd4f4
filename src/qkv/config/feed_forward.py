"""The feed-forward kinds."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from qkv.config.base import Kinds, Node, Part, contradiction
from qkv.config.numbers import HiddenWidth, Positive, Probability

Dense = Literal["swiglu", "geglu", "geglu_tanh", "swiglu_oss", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]
GATED: tuple[Dense, ...] = ("swiglu", "geglu", "geglu_tanh", "swiglu_oss")
"""The kinds of three matrices."""

Experts = Annotated[int, Field(ge=1, le=2**13)]


class FeedForwardConfig(Part):
    """Base of the feed-forward kinds."""

    def complete(self, d_model: int) -> FeedForwardConfig:
        """The same with every derived value filled in."""
        return self


class DenseFeedForwardConfig(FeedForwardConfig):
    """relu, gelu (erf), gelu_tanh, quick_gelu, silu: two matrices, d_ff = 4 d_model. swiglu, geglu, geglu_tanh,
    swiglu_oss (gpt-oss's): three, d_ff = 8/3 d_model rounded up to a multiple of 64. `limit` of these bounds the gate's
    projection from above and the other one on both sides. `dropout` acts on the hidden activations, `output_dropout`
    on the result."""

    kind: Dense = "swiglu"
    d_ff: HiddenWidth | None = None
    bias: bool = False
    limit: Positive | None = None
    dropout: Probability = 0.0
    output_dropout: Probability = 0.0

    @property
    def gated(self) -> bool:
        return self.kind in GATED

    def complete(self, d_model: int) -> DenseFeedForwardConfig:
        if self.limit is not None and not self.gated:
            raise contradiction(
                "feed_forward.limit",
                "feed_forward.kind",
                f"{self.kind} has no gate to bound",
                f"feed_forward.kind={' or '.join(GATED)}",
            )
        default = math.ceil(8 * d_model / 3 / 64) * 64 if self.gated else 4 * d_model
        return self.model_copy(update={"d_ff": self.d_ff or default})


class ExpertConfig(Node):
    """What every expert is: a dense feed-forward, its keys meaning the same as there."""

    kind: Dense = "swiglu"
    bias: bool = False
    limit: Positive | None = None

    def of_width(self, d_ff: int | None) -> DenseFeedForwardConfig:
        """Such an expert as a feed-forward by itself."""
        return DenseFeedForwardConfig(kind=self.kind, d_ff=d_ff, bias=self.bias, limit=self.limit)


class SharedExpertConfig(Node):
    """An expert that every token goes through; several are one of their widths' sum. `gated`: its result is multiplied
    by the sigmoid of a learned product with the token (Qwen2-MoE)."""

    d_ff: HiddenWidth
    gated: bool = False


class RouterConfig(Node):
    """Which experts a token goes to, and what each counts.

    `score`: of all experts, from logits W x (+ b with `bias`). The `top_k` best are chosen; what they count is their
    score, divided by the sum of the chosen ones' with `normalise` (of softmax scores that is a softmax over the chosen
    logits), times `scale`. It multiplies an expert's output or its input (Llama 4).

    With `num_groups`, experts are chosen from the `top_groups` best groups only, a group being as good as its best
    expert (max), or as its best two (top-2-sum). `correction_bias`: a bias per expert, added to the score for the
    choice alone; after each step of training it rises by `correction_rate` for experts that had fewer tokens than the
    mean, and falls for the others. `balance_loss`: the weight of the load-balance loss.
    """

    score: Literal["softmax", "sigmoid", "sqrt-softplus"] = "softmax"
    bias: bool = False
    normalise: bool = True
    scale: Positive = 1.0
    multiplies: Literal["output", "input"] = "output"
    num_groups: Experts = 1
    top_groups: Experts = 1
    group_score: Literal["max", "top-2-sum"] = "max"
    correction_bias: bool = False
    correction_rate: float = Field(1e-3, ge=0)
    balance_loss: float = Field(0.0, ge=0)


class MixtureOfExpertsConfig(FeedForwardConfig):
    """Each token goes through `top_k` of `num_experts` feed-forwards of width `d_ff`; no token is dropped."""

    kind: Literal["moe"] = "moe"
    num_experts: Experts = 8
    top_k: Experts = 2
    d_ff: HiddenWidth | None = None
    expert: ExpertConfig = ExpertConfig()
    shared: SharedExpertConfig | None = None
    router: RouterConfig = RouterConfig()

    def complete(self, d_model: int) -> MixtureOfExpertsConfig:
        groups, kept = self.router.num_groups, self.router.top_groups
        if self.num_experts % groups:
            raise contradiction(
                "feed_forward.router.num_groups",
                "feed_forward.num_experts",
                f"{self.num_experts} experts do not divide into {groups} groups",
                "a num_groups that divides num_experts",
            )
        size = self.num_experts // groups
        if kept > groups:
            raise contradiction(
                "feed_forward.router.top_groups",
                "feed_forward.router.num_groups",
                f"there are no {kept} groups to choose",
                f"top_groups={groups} or fewer",
            )
        if self.top_k > kept * size:
            raise contradiction(
                "feed_forward.top_k",
                "feed_forward.num_experts" if groups == 1 else "feed_forward.router.top_groups",
                f"{self.top_k} experts are chosen from {kept * size}",
                f"top_k={kept * size} or fewer",
            )
        if groups > 1 and self.router.group_score == "top-2-sum" and size < 2:
            raise contradiction(
                "feed_forward.router.group_score",
                "feed_forward.router.num_groups",
                "a group of one expert has no best two",
                "group_score=max, or fewer groups",
            )
        return self.model_copy(update={"d_ff": self.expert.of_width(self.d_ff).complete(d_model).d_ff})


FeedForward = Annotated[FeedForwardConfig, Kinds(DenseFeedForwardConfig, MixtureOfExpertsConfig)]

"""Mixtures of experts: many feed-forwards, of which each token goes through a few.

Shapes: B batch, T tokens, N all tokens, M model width, F an expert's width, E experts, K chosen per token, R = N K
visits of tokens to experts, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.feed_forward import MixtureOfExpertsConfig
from qkv.nn.build import Dims, build
from qkv.nn.feed_forward import hidden_activations

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt-softplus": lambda logits: F.softplus(logits).sqrt(),
}
"""Logits of all experts, [..., E], to their scores."""

TINY = 1e-20
"""Added to a sum of scores before dividing by it: sigmoids may all be 0."""


@dataclass(frozen=True)
class Routing:
    """One call of a router: the scores of all experts, and the numbers of those chosen."""

    scores_BTE: Tensor
    chosen_BTK: Tensor


class Router(nn.Module):
    """Chooses each token's experts, in float32 at least (Shazeer et al. 2017, arXiv 1701.06538). The kinds are those of
    Mixtral (arXiv 2401.04088), DeepSeek (arXiv 2405.04434, 2412.19437), Qwen, gpt-oss and Llama 4.

    record: where it is a list, calls are noted there, for `balance`. load_E: the tokens that each expert had since the
    last step of training.
    """

    float32 = ("correction_bias",)

    def __init__(self, config: MixtureOfExpertsConfig, dims: Dims) -> None:
        super().__init__()
        self.config, self.top_k = config.router, config.top_k
        self.weight = nn.Parameter(torch.empty(config.num_experts, dims.d_model))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router.bias else None
        corrected = config.router.correction_bias
        self.correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False) if corrected else None
        self.record: list[Routing] | None = None
        self.load_E: Tensor | None = None

    def forward(self, x_BTM: Tensor) -> tuple[Tensor, Tensor]:
        """What the chosen experts count, [B, T, K], and their numbers, [B, T, K]."""
        wide = torch.promote_types(x_BTM.dtype, torch.float32)
        with torch.autocast(x_BTM.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            scores_BTE = SCORES[self.config.score](F.linear(x_BTM.to(wide), self.weight.to(wide), bias))
        chosen_BTK = self.choose(scores_BTE.detach())
        if self.record is not None:
            self.record.append(Routing(scores_BTE, chosen_BTK))
        weights_BTK = scores_BTE.gather(-1, chosen_BTK)
        if self.config.normalise:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + TINY)
        return weights_BTK * self.config.scale, chosen_BTK

    def choose(self, scores_BTE: Tensor) -> Tensor:
        """The numbers of the chosen experts, [B, T, K]."""
        if self.correction_bias is not None:
            scores_BTE = scores_BTE + self.correction_bias
        if self.config.num_groups > 1:
            scores_BTGE = scores_BTE.view(*scores_BTE.shape[:-1], self.config.num_groups, -1)
            best = scores_BTGE.topk(1 if self.config.group_score == "max" else 2, dim=-1).values.sum(-1)
            left_out = torch.ones_like(best, dtype=torch.bool)
            left_out = left_out.scatter(-1, best.topk(self.config.top_groups, dim=-1).indices, False)
            scores_BTE = scores_BTGE.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
        return scores_BTE.topk(self.top_k, dim=-1).indices

    def extra_repr(self) -> str:
        return f"{self.top_k} of {len(self.weight)} experts by {self.config.score}"


class Experts(nn.Module):
    """Feed-forwards side by side: gate, up [E, F, M], down [E, M, F] and their biases, absent where unused. Muon
    takes each matrix by itself."""

    undecayed = ("gate_bias", "up_bias", "down_bias")

    def __init__(self, config: MixtureOfExpertsConfig, dims: Dims) -> None:
        super().__init__()
        expert, count = config.expert, config.num_experts
        dense = expert.of_width(config.d_ff).complete(dims.d_model)
        assert dense.d_ff is not None
        self.kind, self.limit, self.top_k = expert.kind, expert.limit, config.top_k
        inner, outer = (count, dense.d_ff), (count, dims.d_model)
        self.gate = nn.Parameter(torch.empty(*inner, dims.d_model)) if dense.gated else None
        self.up = nn.Parameter(torch.empty(*inner, dims.d_model))
        self.down = nn.Parameter(torch.empty(*outer, dense.d_ff))
        self.gate_bias = nn.Parameter(torch.zeros(inner)) if expert.bias and dense.gated else None
        self.up_bias = nn.Parameter(torch.zeros(inner)) if expert.bias else None
        self.down_bias = nn.Parameter(torch.zeros(outer)) if expert.bias else None
        # how many tokens an expert has differs from batch to batch: compiled, each number would be another graph.
        # Asking for this at import would load the compiler, for a second
        self._outside_graphs = torch.compiler.disable(_one_by_one)  # type: ignore[no-untyped-call]

    @property
    def matrices(self) -> list[nn.Parameter]:
        """What is multiplied with, each [E, out, in]."""
        return [part for part in (self.gate, self.up, self.down) if part is not None]

    def forward(self, x_RM: Tensor, expert_R: Tensor) -> Tensor:
        """[R, M] -> [R, M]: each row through the expert of its number; `expert_R` is in rising order."""
        out_RM: Tensor = self._outside_graphs(self, x_RM, expert_R)
        return out_RM

    def extra_repr(self) -> str:
        count, width, d_model = self.up.shape
        return f"{count} of {d_model} -> {width}, {self.kind}"


def _one_by_one(experts: Experts, x_RM: Tensor, expert_R: Tensor) -> Tensor:
    ups, downs = _each(experts.up, experts.up_bias), _each(experts.down, experts.down_bias)
    gates = None if experts.gate is None else _each(experts.gate, experts.gate_bias)
    results = []
    for e, x in enumerate(torch.split(x_RM, expert_R.bincount(minlength=len(ups)).tolist())):
        if len(x):
            gate = None if gates is None else F.linear(x, *gates[e])
            hidden = hidden_activations(experts.kind, F.linear(x, *ups[e]), gate, experts.limit)
            results.append(F.linear(hidden, *downs[e]))
    return torch.cat(results)


def _each(weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """The matrix [out, in] and bias [out] of each expert."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    return list(zip(weight.unbind(), biases, strict=True))


class MixtureOfExperts(nn.Module):
    """The sum of what a token's experts make of it, each times its weight, and of a shared expert that all tokens go
    through (Dai et al. 2024, arXiv 2401.06066). No expert has a capacity, so no token is dropped."""

    def __init__(self, config: MixtureOfExpertsConfig, dims: Dims) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weighs_input = config.router.multiplies == "input"
        self.router = Router(config, dims)
        self.experts = Experts(config, dims)
        shared = config.shared
        self.shared: nn.Module | None = build(config.expert.of_width(shared.d_ff), dims) if shared else None
        self.shared_gate = nn.Linear(dims.d_model, 1, bias=False) if shared and shared.gated else None

    def forward(self, x_BTM: Tensor) -> Tensor:
        """[B, T, M] -> [B, T, M]."""
        weights_BTK, chosen_BTK = self.router(x_BTM)
        x_NM, chosen_R, weights_R1 = x_BTM.flatten(0, -2), chosen_BTK.flatten(), weights_BTK.flatten()[:, None]
        order_R = chosen_R.argsort(stable=True)  # expert by expert
        x_RM, weights_R1 = x_NM[order_R // self.top_k], weights_R1[order_R]
        if self.weighs_input:
            y_RM = self.experts(x_RM * weights_R1.to(x_RM.dtype), chosen_R[order_R])
        else:
            y_RM = self.experts(x_RM, chosen_R[order_R])
            y_RM = y_RM * weights_R1.to(y_RM.dtype)
        out: Tensor = y_RM[order_R.argsort()].view(len(x_NM), self.top_k, -1).sum(1).view(x_BTM.shape)
        if self.shared is None:
            return out
        y_BTM: Tensor = self.shared(x_BTM)
        return out + (y_BTM if self.shared_gate is None else torch.sigmoid(self.shared_gate(x_BTM)) * y_BTM)


# --- balance ----------------------------------------------------------------------------------------------------------


def routers_of(network: nn.Module) -> list[Router]:
    """Every router, in the order data walks."""
    return [module for module in network.modules() if isinstance(module, Router)]


def record_routing(network: nn.Module) -> None:
    """Have every router note what it chooses, until `balance` takes it."""
    for router in routers_of(network):
        router.record = []


def balance(stack: nn.Module, lengths_B: Tensor | None) -> Tensor | None:
    """The load-balance loss of what the stack's routers noted, and their loads; None where none has such a loss.

    For each row, of its real tokens: E / K sum_e f_e P_e, f_e being how often a token chose the expert and P_e the mean
    of its share of all scores; 1 where all experts are alike (Fedus et al. 2021, arXiv 2101.03961, eq. 4; row by row as
    in DeepSeek-V3, arXiv 2412.19437, eq. 17). Summed over rows, and over layers times their `balance_loss`: it does not
    depend on how the rows of a step are split.
    """
    total: Tensor | None = None
    for router in routers_of(stack):
        noted, router.record = router.record or [], None
        for routing in noted:
            count = routing.scores_BTE.shape[-1]
            real_BT = torch.ones(routing.chosen_BTK.shape[:2], device=routing.chosen_BTK.device)
            if lengths_B is not None:
                real_BT = (real_BT.cumsum(1) <= lengths_B[:, None]).float()
            chosen_BTE = F.one_hot(routing.chosen_BTK, count).sum(2) * real_BT[..., None]
            if router.correction_bias is not None:
                load_E = chosen_BTE.sum((0, 1))
                router.load_E = load_E if router.load_E is None else router.load_E + load_E
            if router.config.balance_loss:
                shares_BTE = routing.scores_BTE / (routing.scores_BTE.sum(-1, keepdim=True) + TINY)
                tokens_B1 = real_BT.sum(1, keepdim=True).clamp(min=1.0)
                f_BE = chosen_BTE.sum(1) / tokens_B1
                p_BE = (shares_BTE * real_BT[..., None]).sum(1) / tokens_B1
                loss = router.config.balance_loss * count / router.top_k * (f_BE * p_BE).sum()
                total = loss if total is None else total + loss
    return total


@torch.no_grad()
def correct_biases(network: nn.Module) -> None:
    """After a step of training: raise the correction bias of experts that had fewer tokens than the mean, lower the
    others' (Wang et al. 2024, arXiv 2408.15664, algorithm 1)."""
    for router in routers_of(network):
        if router.correction_bias is not None and router.load_E is not None:
            lack_E = router.load_E.mean() - router.load_E
            router.correction_bias.add_(lack_E.sign(), alpha=router.config.correction_rate)
            router.load_E = None


def forget_loads(network: nn.Module) -> None:
    """The tokens counted since the last step belong to one that is not taken."""
    for router in routers_of(network):
        router.load_E = None


build.register(MixtureOfExpertsConfig, MixtureOfExperts)

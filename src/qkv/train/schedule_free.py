"""Schedule-free AdamW (Defazio et al. 2024, "The Road Less Scheduled", arXiv 2405.15682).

Of each weight there are three: z takes the steps, x is an average of z and what is evaluated, and the gradient is found
at y = (1 - b) z + b x, with b the first beta. As in the authors' package, the parameter holds y, and x follows from it:

    g = gradient at y, divided as Adam does by the root of the mean of its squares, + weight_decay y
    z <- z - lr g;   x <- (1 - c) x + c z;   c = lr_max^2 / (sum of lr_max^2 of all steps until now)

where lr_max is the largest learning rate until now, so that the steps of a warm-up count little.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """AdamW that needs no falling learning rate. The weights to evaluate are those of `average`."""

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, y: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        state = self.state[y]
        if not state:
            state.update(step=0, lr_max=0.0, weight_sum=0.0, exp_avg_sq=torch.zeros_like(y), z=y.clone())
        state["step"] += 1
        state["lr_max"] = max(float(state["lr_max"]), lr)
        state["weight_sum"] += state["lr_max"] ** 2
        share = float(state["lr_max"] ** 2 / state["weight_sum"])
        mean_square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction = 1 - beta2 ** float(state["step"])
        direction = gradient / (mean_square / correction).sqrt_().add_(group["eps"])
        direction.add_(y, alpha=group["weight_decay"])
        y.lerp_(state["z"], share).add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
        state["z"].sub_(direction, alpha=lr)

    def average(self, parameter: Tensor) -> Tensor:
        """x of a parameter: the weights to evaluate."""
        state = self.state.get(parameter)
        if not state:
            return parameter.detach().clone()
        beta1: float = self.defaults["betas"][0]
        return parameter.detach().lerp(state["z"], 1 - 1 / beta1)

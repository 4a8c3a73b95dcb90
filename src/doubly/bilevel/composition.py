"""The outer function f over the mean of the g_i, and the running estimate u of that mean (eq. 10).

`update(values, all_values, state)` refreshes u with the global batch and returns the cotangents c_i of this rank's
samples: mean_i c_i * (gradient of value_i) is the estimate of the gradient of f(mean g).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class Composition(Protocol):
    def update(self, values: Tensor, all_values: Tensor, state: State) -> tuple[Tensor, State]: ...


@dataclass(frozen=True)
class RunningMean:
    """u <- (1 - eta) u + eta * batch mean, seeded by the first batch; c_i = f'(u). Any smooth f, g of any width."""

    f: Callable[[Tensor], Tensor]
    eta: float = 0.9

    def update(self, values: Tensor, all_values: Tensor, state: State) -> tuple[Tensor, State]:
        mean = all_values.mean(0)
        u = torch.lerp(state["u"], mean, self.eta) if state else mean
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.f(u), u)
        return slope.expand_as(values), {"u": u.detach()}


@dataclass(frozen=True)
class LogMeanExp:
    """f(mean g) = r log mean exp(loss / r), KL-regularised DRO, of losses; the cotangents are the paper's weights.

    It keeps nu = log u, in float64: exp(loss / r) itself overflows (docs/numerics.md). u belongs to the r that it
    was gathered under, so it starts anew when r changes. With `cap` the density ratio is bounded: no weight exceeds it.
    """

    r: float = 1.0
    eta: float = 0.9
    cap: float | None = None
    mean_weight_limit: float | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in [
            ("r", self.r, self.r > 0),
            ("eta", self.eta, 0 < self.eta <= 1),
            ("cap", self.cap, self.cap is None or self.cap >= 1),
            (
                "mean_weight_limit",
                self.mean_weight_limit,
                self.mean_weight_limit is None or self.mean_weight_limit >= 1,
            ),
        ]:
            if not allowed:
                raise ValueError(
                    f"{name}={value} is not allowed: r > 0, 0 < eta <= 1, cap >= 1, mean_weight_limit >= 1"
                )
        if self.cap is not None and self.mean_weight_limit is not None:
            raise ValueError("cap and mean_weight_limit exclude each other: a cap already bounds the mean weight")

    def batch_value(self, scaled: Tensor) -> Tensor:
        """nu_b of losses / r: log mean exp; with a cap, the solution of mean min(cap, exp(scaled - nu_b)) = 1."""
        if self.cap is None:
            return scaled.logsumexp(0) - log(scaled.shape[0])
        if self.cap == 1:  # every weight is 1, whatever the losses and whatever came before
            return torch.full_like(scaled[0], -torch.inf)
        ordered = scaled.sort(descending=True).values
        capped = torch.arange(
            len(ordered), device=ordered.device, dtype=ordered.dtype
        )  # k: the k largest are at the cap
        mass_left = len(ordered) - capped * self.cap
        rest = ordered.flip(0).logcumsumexp(0).flip(0)
        candidates = rest - mass_left.clamp_min(torch.finfo(ordered.dtype).tiny).log()
        # The smallest k whose largest uncapped sample stays below the cap; k * cap = B leaves no mass for the others.
        fits = (mass_left > 0) & (ordered - candidates <= log(self.cap))
        largest_k = (mass_left > 0).sum() - 1
        return candidates[torch.where(fits.any(), fits.int().argmax(), largest_k)]

    def update(self, values: Tensor, all_values: Tensor, state: State) -> tuple[Tensor, State]:
        r = torch.tensor(self.r, dtype=torch.float64)
        nu_batch = nu = self.batch_value(all_values.double() / self.r)
        if state and state["r"] == r and self.eta < 1:
            nu = torch.logaddexp(state["nu"].to(nu) + log(1 - self.eta), nu_batch + log(self.eta))
        log_weights = values.double() / self.r - nu
        if self.mean_weight_limit is not None:
            excess = nu_batch - nu
            log_weights += excess.clamp(-log(self.mean_weight_limit), log(self.mean_weight_limit)) - excess
        if self.cap is not None:
            log_weights = log_weights.clamp_max(log(self.cap))
        return log_weights.exp().to(values.dtype), {"nu": nu, "r": r}

"""The outer function f over the mean of the g_i, and the running estimate u of that mean (eq. 10).

`update(values, all_values, state)` refreshes u with the global batch and returns the cotangents c_i of this rank's
samples: mean_i c_i * (gradient of value_i) is the estimate of the gradient of f(mean g). With `all_previous`, the same
samples' g at the previous theta, u follows STORM instead: what theta did to this batch is added to the old u first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from doubly.bilevel.inner import identity

State = dict[str, Tensor]


class Composition(Protocol):
    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]: ...

    def value(self, values: Tensor) -> Tensor:
        """f(mean g) of these samples, as they are."""
        ...

    def estimate(self, state: State) -> Tensor:
        """The current u."""
        ...


def check_losses(values: Tensor, name: str) -> None:
    if values.dim() != 1:
        raise ValueError(
            f"outer must hold one loss per sample, (B,), for {name}, got shape {tuple(values.shape)}: "
            "RunningMean takes vectors"
        )


def require(allowed: bool, name: str, value: object, rule: str) -> None:
    if not allowed:
        raise ValueError(f"{name}={value} is not allowed: {rule}")


@dataclass(frozen=True)
class RunningMean:
    """u <- (1 - eta) u + eta * batch mean, seeded by the first batch; c_i = f'(u). Any smooth f, g of any width."""

    f: Callable[[Tensor], Tensor] = identity
    eta: float = 0.9

    def __post_init__(self) -> None:
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")

    def _outer(self, u: Tensor) -> Tensor:
        found = self.f(u)
        if not isinstance(found, Tensor) or (torch.is_grad_enabled() and u.requires_grad and not found.requires_grad):
            raise ValueError("f must be a differentiable function of u: compute it from u with torch")
        if found.numel() != 1:
            raise ValueError(
                f"f must return one number, got shape {tuple(found.shape)} from u of shape {tuple(u.shape)}: "
                "reduce it, by a sum for instance"
            )
        return found.squeeze()

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        u = all_values.mean(0)
        if state:
            old = state["u"] if all_previous is None else state["u"] + u - all_previous.mean(0)
            u = torch.lerp(old, u, self.eta)
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self._outer(u), u)
        return slope.expand_as(values), {"u": u.detach()}

    def value(self, values: Tensor) -> Tensor:
        return self._outer(values.mean(0))

    def estimate(self, state: State) -> Tensor:
        return state["u"]


@dataclass(frozen=True)
class LogMeanExp:
    """f(mean g) = r log mean exp(loss / r), KL-regularized DRO, of losses; the cotangents are the paper's weights.

    It keeps nu = log u, in float64: exp(loss / r) itself overflows (docs/numerics.md). u belongs to the r that it
    was gathered under, so it starts anew when r changes. With `cap` the density ratio is bounded: no weight exceeds it.
    """

    r: float = 1.0
    eta: float = 0.9
    cap: float | None = None
    mean_weight_limit: float | None = None

    def __post_init__(self) -> None:
        require(self.r > 0, "r", self.r, "r > 0")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")
        require(self.cap is None or self.cap >= 1, "cap", self.cap, "cap >= 1, or None for no bound")
        limit = self.mean_weight_limit
        require(limit is None or limit >= 1, "mean_weight_limit", limit, "mean_weight_limit >= 1")
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

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        check_losses(values, "LogMeanExp")
        r = torch.tensor(self.r, dtype=torch.float64)
        nu_batch = nu = self.batch_value(all_values.double() / self.r)
        if state and state["r"] == r and self.eta < 1 and self.cap != 1:
            old = state["nu"].to(nu)
            nu = torch.logaddexp(old + log(1 - self.eta), nu_batch + log(self.eta))
            if all_previous is not None:
                nu = self._corrected(old, nu_batch, self.batch_value(all_previous.double() / self.r))
        log_weights = values.double() / self.r - nu
        if self.mean_weight_limit is not None:
            excess = nu_batch - nu
            log_weights += excess.clamp(-log(self.mean_weight_limit), log(self.mean_weight_limit)) - excess
        if self.cap is not None:
            log_weights = log_weights.clamp_max(log(self.cap))
        return log_weights.exp().to(values.dtype), {"nu": nu, "r": r}

    def _corrected(self, old: Tensor, nu_batch: Tensor, nu_previous: Tensor) -> Tensor:
        """log of STORM's u_batch + (1 - eta) (u - u_previous), but never below the batch's share in the plain average:
        the difference can be negative, u cannot."""
        largest = torch.stack([old, nu_batch, nu_previous]).amax(0)
        difference = (old - largest).exp() - (nu_previous - largest).exp()
        total = (nu_batch - largest).exp() + (1 - self.eta) * difference
        return torch.maximum(largest + total.clamp_min(0).log(), nu_batch + log(self.eta))

    def value(self, values: Tensor) -> Tensor:
        scaled = values.double() / self.r
        nu = self.batch_value(scaled)
        if self.cap is None:
            return (self.r * nu).to(values.dtype)
        log_weights = (scaled - nu).clamp_max(log(self.cap)).detach()  # the maximum's slope is that of its weights
        weights = log_weights.exp()
        return (self.r * (weights * (scaled - log_weights)).mean()).to(values.dtype)

    def estimate(self, state: State) -> Tensor:
        return state["nu"].exp()

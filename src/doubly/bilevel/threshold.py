"""Distributionally robust means whose weights have a threshold: chi-square DRO and CVaR of losses.

Both are max over weights w >= 0 of mean 1 of mean(w * loss) minus a penalty, and by duality

    min over t of  t + mean penalty*(loss - t) ,

so they carry one more variable than a mean, the threshold t. A step moves it by a proximal step on the batch's dual:
at eta = 1 to the batch's own threshold; at smaller eta less far, so that its fixed point is that of all samples and not
the average of what small batches say.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from doubly.bilevel.composition import State, check_losses, require

POINTS, ROUNDS = 64, 12  # each round of the search shortens the bracket 63-fold: 12 exhaust float64


def crossing(excess: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The bracket, one rounding error wide, in which a falling function of t (n,) -> (n,) passes 0."""
    fractions = torch.linspace(0, 1, POINTS, dtype=low.dtype, device=low.device)
    for _ in range(ROUNDS):
        points = torch.lerp(low, high, fractions)  # which is exact at both ends
        last = ((excess(points) >= 0).sum() - 1).clamp(0, POINTS - 2)
        low, high = points[last], points[last + 1]
    return low, high


@dataclass(frozen=True)
class MeanVariance:
    """f(mean g) = mean + variance / (2 r) of losses, with g = (loss, loss^2): chi-square DRO if no weight is clipped.

    The weight of a sample is 1 + (loss - mean) / r, so it is negative for losses more than r below the mean.
    """

    r: float = 1.0
    eta: float = 0.9

    def __post_init__(self) -> None:
        require(self.r > 0, "r", self.r, "r > 0")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        check_losses(values, "MeanVariance")
        u = _moments(all_values)
        if state:
            old = state["u"].to(u) if all_previous is None else state["u"].to(u) + u - _moments(all_previous)
            u = torch.lerp(old, u, self.eta)
        return (1 + (values.double() - u[0]) / self.r).to(values.dtype), {"u": u}

    def value(self, values: Tensor) -> Tensor:
        return values.mean() + values.var(correction=0) / (2 * self.r)

    def estimate(self, state: State) -> Tensor:
        return state["u"]


def _moments(losses: Tensor) -> Tensor:
    return torch.stack([losses.double().mean(), losses.double().square().mean()])


@dataclass(frozen=True)
class ChiSquare:
    """max over 0 <= w <= cap of mean(w * loss) - r/2 mean (w - 1)^2: chi-square DRO of losses.

    w = clip(1 + (loss - t) / r, 0, cap). As long as nothing is clipped, t is the running mean of eq. 10.
    """

    r: float = 1.0
    eta: float = 0.9
    cap: float | None = None

    def __post_init__(self) -> None:
        require(self.r > 0, "r", self.r, "r > 0")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")
        require(self.cap is None or self.cap >= 1, "cap", self.cap, "cap >= 1, or None for no bound")

    def _weights(self, losses: Tensor, threshold: Tensor) -> Tensor:
        return (1 + (losses - threshold) / self.r).clamp(0, self.cap)

    def _threshold(self, losses: Tensor, state: State) -> Tensor:
        if self.cap == 1:  # every weight is 1, whatever came before
            return losses.min()
        old = state["threshold"].to(losses) if state else losses.mean()
        pull = (1 - self.eta) / self.eta / self.r if state else 0.0

        def excess(thresholds: Tensor) -> Tensor:
            return self._weights(losses[:, None], thresholds).mean(0) - 1 - pull * (thresholds - old)

        low, high = crossing(excess, torch.minimum(losses.min(), old), torch.maximum(losses.max(), old))
        return (low + high) / 2

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        check_losses(values, "ChiSquare")
        _refuse(all_previous, "ChiSquare")
        r = torch.tensor(self.r, dtype=torch.float64)
        known = state if state and state["r"] == r else {}  # as u, the threshold belongs to one r
        threshold = self._threshold(all_values.double(), known)
        return self._weights(values.double(), threshold).to(values.dtype), {"threshold": threshold, "r": r}

    def value(self, values: Tensor) -> Tensor:
        losses = values.double()
        threshold = self._threshold(losses, {}).detach()
        weights = self._weights(losses, threshold).detach()  # the maximum's slope is theirs
        # From the threshold on, so that a large common part of the losses costs no digits; the weights have mean 1.
        rest = weights * (losses - threshold) - self.r / 2 * (weights - 1).square()
        return (threshold + rest.mean()).to(values.dtype)

    def estimate(self, state: State) -> Tensor:
        return state["threshold"]


@dataclass(frozen=True)
class CVaR:
    """max over 0 <= w <= 1/alpha of mean(w * loss): the mean of the worst share alpha of the losses.

    w is 1/alpha above the threshold and 0 below; samples on it share what is left. 1 is the plain mean.
    """

    alpha: float = 0.5
    eta: float = 0.9

    def __post_init__(self) -> None:
        require(0 < self.alpha <= 1, "alpha", self.alpha, "0 < alpha <= 1, the share of samples that counts")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")

    def _bracket(self, losses: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The threshold between its two neighbors in float64, and the weight of the samples there."""
        if self.alpha == 1:  # every weight is 1, whatever came before
            return losses.min() - 1, losses.min() - 1, torch.ones_like(losses[0])
        old = state["threshold"].to(losses) if state else losses.mean()
        # In units of the spread before this batch: one that depended on the batch would bias the fixed point.
        pull = (1 - self.eta) / self.eta / state["scale"].to(losses) if state else torch.zeros_like(old)

        def excess(thresholds: Tensor) -> Tensor:
            above = (losses[:, None] > thresholds).to(losses.dtype).mean(0)
            return above / self.alpha - 1 - pull * (thresholds - old)

        room = losses.max() - losses.min() + 1e-6 * (1 + losses.abs().max())  # the lowest loss itself may be on it
        low = torch.minimum(losses.min(), old) - room
        low, high = crossing(excess, low, torch.maximum(losses.max(), old))
        above, on = (part.to(losses).sum() for part in (losses > high, (losses > low) & (losses <= high)))
        left = len(losses) * (1 + pull * (high - old)) - above / self.alpha
        return low, high, (left / on.clamp_min(1)).clamp(0, 1 / self.alpha)

    def _weights(self, losses: Tensor, low: Tensor, high: Tensor, on: Tensor) -> Tensor:
        return (losses > high).to(losses) / self.alpha + ((losses > low) & (losses <= high)) * on

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        check_losses(values, "CVaR")
        _refuse(all_previous, "CVaR")
        losses, alpha = all_values.double(), torch.tensor(self.alpha, dtype=torch.float64)
        known = state if state and state["alpha"] == alpha else {}
        low, high, on = self._bracket(losses, known)
        spread = (losses - high).abs().mean().clamp_min(torch.finfo(losses.dtype).eps * (1 + high.abs()))
        scale = torch.lerp(known["scale"].to(spread), spread, self.eta) if known else spread
        weights = self._weights(values.double(), low, high, on).to(values.dtype)
        return weights, {"threshold": high, "scale": scale, "alpha": alpha}

    def value(self, values: Tensor) -> Tensor:
        losses = values.double()
        return (self._weights(losses, *self._bracket(losses, {})).detach() * losses).mean().to(values.dtype)

    def estimate(self, state: State) -> Tensor:
        return state["threshold"]


def _refuse(all_previous: Tensor | None, name: str) -> None:
    if all_previous is not None:
        raise ValueError(f"storm corrects a running mean, and {name} keeps a threshold: leave storm off")

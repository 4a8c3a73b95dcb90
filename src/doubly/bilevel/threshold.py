"""Distributionally robust means of losses: mean plus variance, chi-square DRO, and CVaR.

The last two maximize mean(w * loss) minus a penalty over weights w >= 0 of mean 1. By duality that equals

    min over t of  t + mean(conjugate of the penalty at loss - t) ,

so these compositions keep a threshold t instead of a mean. A batch moves it by a proximal step on the batch's dual: at
eta = 1 to the threshold of the batch itself, at smaller eta less far. The fixed point of these steps is the threshold
of all samples, which the average of the thresholds of small batches is not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, explained
from doubly.bilevel.coarse import COARSE, around_pivot, check_overflow, is_coarse, is_positive, refuse_running
from doubly.bilevel.composition import State, check_losses, require

POINTS, ROUNDS = 64, 12  # each round of the search shortens the bracket 63-fold, so 12 rounds exhaust float64


def zero_bracket(excess: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Find where a decreasing function crosses 0.

    Args:
        excess: The function, evaluated at several points at once, (n,) -> (n,).
        low: A point at which the function is not negative, ().
        high: A point at which it is not positive, ().

    Returns:
        The ends of a bracket that is one rounding error wide.
    """
    fractions = torch.linspace(0, 1, POINTS, dtype=low.dtype, device=low.device)
    wide = bool(high - low > COARSE)  # then the ends are further apart than twelve rounds can close
    for _ in range(4 * ROUNDS if wide else ROUNDS):
        points = torch.lerp(low, high, fractions)  # exact at both ends
        last = ((excess(points) >= 0).sum() - 1).clamp(0, POINTS - 2)
        low, high = points[last], points[last + 1]
    return low, high


@dataclass(frozen=True)
class MeanVariance(Checked):
    """Mean plus variance / (2 r) of losses: chi-square DRO without bounds on the weights.

    The weight of a sample is 1 + (loss - mean) / r, which is negative for losses more than r below the mean. It is the
    composition f(u) = u_1 + (u_2 - u_1^2) / (2 r) of g = (loss, loss^2).

    Args:
        r: Temperature: small values give the variance more weight.
        eta: Weight of the newest batch, 0 < eta <= 1.

    Raises:
        ValueError: If a number is out of range.
    """

    r: float = 1.0
    eta: float = 0.9

    def __post_init__(self) -> None:
        require(is_positive(self.r), "r", self.r, "r > 0")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")

    @explained
    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Refresh the moments and return (weights, new state); see `Composition.update`."""
        check_losses(values, "MeanVariance")
        check_losses(all_values, "MeanVariance")
        u = _moments(all_values)
        if state:
            old = state["u"].to(u) if all_previous is None else state["u"].to(u) + u - _moments(all_previous)
            u = torch.lerp(old, u, self.eta)
        check_overflow(u, "MeanVariance")
        weights = (1 + (values.double() - u[0]) / self.r).to(values.dtype)
        return check_overflow(weights, "MeanVariance"), {"u": u}

    @explained
    def value(self, values: Tensor) -> Tensor:
        """Return mean + variance / (2 r) of these losses, (); see `Composition.value`."""
        check_losses(values, "MeanVariance")
        return check_overflow(values.mean() + values.var(correction=0) / (2 * self.r), "MeanVariance")

    def estimate(self, state: State) -> Tensor:
        """Return the running means of loss and loss^2, (2,); see `Composition.estimate`."""
        return state["u"]


def _moments(losses: Tensor) -> Tensor:
    """Return the means of the losses and of their squares, (2,)."""
    return torch.stack([losses.double().mean(), losses.double().square().mean()])


@dataclass(frozen=True)
class ChiSquare(Checked):
    """Chi-square DRO of losses: the maximum over weights 0 <= w <= cap of mean(w * loss) - r/2 mean((w - 1)^2).

    The weights are clip(1 + (loss - t) / r, 0, cap). While no weight is clipped, the threshold t is the running mean of
    the losses. A change of r starts it anew.

    Args:
        r: Temperature: small values give the largest losses more weight.
        eta: Weight of the newest batch, 0 < eta <= 1.
        cap: Upper bound of every weight; None for no bound.

    Raises:
        ValueError: If a number is out of range.
    """

    r: float = 1.0
    eta: float = 0.9
    cap: float | None = None

    def __post_init__(self) -> None:
        require(is_positive(self.r), "r", self.r, "r > 0")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")
        require(self.cap is None or 1 <= self.cap < inf, "cap", self.cap, "cap >= 1, or None for no bound")

    def _weights(self, losses: Tensor, threshold: Tensor) -> Tensor:
        return (1 + (losses - threshold) / self.r).clamp(0, self.cap)

    def _threshold(self, losses: Tensor, state: State) -> Tensor:
        """Return the threshold after a proximal step from the one in `state`, or the batch's own without a state."""
        if self.cap == 1:  # every weight is 1
            return losses.min()
        old = state["threshold"].to(losses) if state else losses.mean()
        pull = (1 - self.eta) / self.eta / self.r if state else 0.0

        def excess(thresholds: Tensor) -> Tensor:
            return self._weights(losses[:, None], thresholds).mean(0) - 1 - pull * (thresholds - old)

        low, high = zero_bracket(excess, torch.minimum(losses.min(), old), torch.maximum(losses.max(), old))
        return (low + high) / 2

    def _coarse_weights(self, losses: Tensor, all_losses: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the threshold of one batch of losses that are large beside r."""
        unit, reach = ChiSquare(1.0, 1.0, self.cap), 4.0 * len(all_losses) + 4
        scaled, pivot = around_pivot(all_losses, self.r, self.cap, reach)
        threshold = unit._threshold(scaled, {})
        weights = unit._weights(((losses - pivot) / self.r).clamp(-reach, reach), threshold)
        return weights, pivot + self.r * threshold

    @explained
    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Refresh the threshold and return (weights, new state); see `Composition.update`.

        Raises:
            ValueError: If `all_previous` is given, since STORM corrects a running mean only.
        """
        check_losses(values, "ChiSquare")
        check_losses(all_values, "ChiSquare")
        _refuse_storm(all_previous, "ChiSquare")
        r = torch.tensor(self.r, dtype=torch.float64)
        state = state if state and state["r"] == r else {}  # a threshold belongs to one r
        losses = all_values.double()
        if self.cap != 1 and (is_coarse(losses, self.r) or (state and is_coarse(state["threshold"], self.r))):
            if state and self.eta < 1:
                refuse_running("ChiSquare", losses, self.r)
            weights, threshold = self._coarse_weights(values.double(), losses)
            return weights.to(values.dtype), {"threshold": threshold, "r": r}
        threshold = self._threshold(losses, state)
        return self._weights(values.double(), threshold).to(values.dtype), {"threshold": threshold, "r": r}

    @explained
    def value(self, values: Tensor) -> Tensor:
        """Return the maximum over the weights of these losses, (); see `Composition.value`."""
        check_losses(values, "ChiSquare")
        losses = values.double()
        if self.cap != 1 and is_coarse(losses, self.r):
            weights, threshold = (part.detach() for part in self._coarse_weights(losses.detach(), losses.detach()))
            excess = weights * (losses - threshold) - self.r / 2 * (weights - 1).square()
            return (threshold + excess.mean()).to(values.dtype)
        threshold = self._threshold(losses, {}).detach()
        # Detached: the gradient of a maximum is that at its maximizer, held fixed.
        weights = self._weights(losses, threshold).detach()
        # The weights have mean 1, so the threshold can be added last: a common part of the losses costs no digits.
        excess = weights * (losses - threshold) - self.r / 2 * (weights - 1).square()
        return (threshold + excess.mean()).to(values.dtype)

    def estimate(self, state: State) -> Tensor:
        """Return the threshold t, (); see `Composition.estimate`."""
        return state["threshold"]


@dataclass(frozen=True)
class CVaR(Checked):
    """Conditional value at risk: the mean of the share `alpha` of the samples with the largest losses.

    It is the maximum over weights 0 <= w <= 1 / alpha of mean(w * loss). A weight is 1 / alpha above the threshold and
    0 below; samples on the threshold share what is left. A change of alpha starts the threshold anew.

    Args:
        alpha: Share of the samples that count, 0 < alpha <= 1; 1 gives the plain mean.
        eta: Weight of the newest batch, 0 < eta <= 1.

    Raises:
        ValueError: If a number is out of range.
    """

    alpha: float = 0.5
    eta: float = 0.9

    def __post_init__(self) -> None:
        require(0 < self.alpha <= 1, "alpha", self.alpha, "0 < alpha <= 1, the share of samples that counts")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")

    def _bracket(self, losses: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Return a bracket of the threshold, one rounding error wide, and the weight of the samples inside it."""
        if self.alpha == 1:  # every weight is 1
            lowest = losses.min()
            below = torch.minimum(lowest - 1, lowest.nextafter(torch.full_like(lowest, -inf)))  # 1e30 - 1 is 1e30
            return below, below, torch.ones_like(lowest)
        old = state["threshold"].to(losses) if state else losses.mean()
        # In units of the spread of earlier batches: a unit that depended on this batch would bias the fixed point.
        pull = (1 - self.eta) / self.eta / state["scale"].to(losses) if state else torch.zeros_like(old)

        def excess(thresholds: Tensor) -> Tensor:
            above = (losses[:, None] > thresholds).to(losses.dtype).mean(0)
            return above / self.alpha - 1 - pull * (thresholds - old)

        margin = losses.max() - losses.min() + 1e-6 * (1 + losses.abs().max())  # the threshold can be the lowest loss
        low = torch.minimum(losses.min(), old) - margin
        low, high = zero_bracket(excess, low, torch.maximum(losses.max(), old))
        above, inside = (part.to(losses).sum() for part in (losses > high, (losses > low) & (losses <= high)))
        mass_left = len(losses) * (1 + pull * (high - old)) - above / self.alpha
        return low, high, (mass_left / inside.clamp_min(1)).clamp(0, 1 / self.alpha)

    def _weights(self, losses: Tensor, low: Tensor, high: Tensor, weight_inside: Tensor) -> Tensor:
        return (losses > high).to(losses) / self.alpha + ((losses > low) & (losses <= high)) * weight_inside

    @explained
    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Refresh the threshold and return (weights, new state); see `Composition.update`.

        Raises:
            ValueError: If `all_previous` is given, since STORM corrects a running mean only.
        """
        check_losses(values, "CVaR")
        check_losses(all_values, "CVaR")
        _refuse_storm(all_previous, "CVaR")
        losses, alpha = all_values.double(), torch.tensor(self.alpha, dtype=torch.float64)
        state = state if state and state["alpha"] == alpha else {}  # a threshold belongs to one alpha
        low, high, weight_inside = self._bracket(losses, state)
        spread = (losses - high).abs().mean().clamp_min(torch.finfo(losses.dtype).eps * (1 + high.abs()))
        scale = torch.lerp(state["scale"].to(spread), spread, self.eta) if state else spread
        weights = self._weights(values.double(), low, high, weight_inside).to(values.dtype)
        return weights, {"threshold": high, "scale": scale, "alpha": alpha}

    @explained
    def value(self, values: Tensor) -> Tensor:
        """Return the mean of the worst share `alpha` of these losses, (); see `Composition.value`."""
        check_losses(values, "CVaR")
        losses = values.double()
        return (self._weights(losses, *self._bracket(losses, {})).detach() * losses).mean().to(values.dtype)

    def estimate(self, state: State) -> Tensor:
        """Return the threshold t, (); see `Composition.estimate`."""
        return state["threshold"]


def _refuse_storm(all_previous: Tensor | None, name: str) -> None:
    """Raise a ValueError if there are values at the previous theta: STORM needs a running mean."""
    if all_previous is not None:
        raise ValueError(f"storm corrects a running mean, and {name} keeps a threshold: leave storm off")

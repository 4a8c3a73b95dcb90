"""The outer function f of the mean of the g_i, with a running estimate u of that mean (eq. 10 of the paper).

A composition refreshes u with every batch and returns the cotangents c_i: the mean over the samples of c_i times the
gradient of g_i is the estimate of the gradient of f(mean g).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, check_arguments, check_rows, explained
from doubly.bilevel.coarse import COARSE, around_pivot, check_overflow, is_coarse, is_positive, refuse_running
from doubly.bilevel.inner import identity

REACH = 800.0  # of exponents: exp(-800) is 0 in float64
State = dict[str, Tensor]  # what a composition remembers from batch to batch; empty before the first


@runtime_checkable
class Composition(Protocol):
    """An outer function f with its estimate of the mean of g; an object with these members can be passed as one.

    Attributes:
        eta: Weight of the newest batch in the estimate; NaN if there is no such weight. `minimize(eta=...)` replaces
            it, for which the composition must be a dataclass.
    """

    @property
    def eta(self) -> float:
        """Weight of the newest batch in the estimate."""
        ...

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Refresh the estimate with a batch.

        Args:
            values: g_i of this process's samples, (B,) or (B, m), detached.
            all_values: g_i of the whole batch, over all processes.
            state: What the previous call returned, or {} for the first batch.
            all_previous: g_i of the same samples as `all_values` at the previous theta. With it the estimate follows
                STORM: the change of this batch's values is added to the old estimate first.

        Returns:
            The cotangents c_i, of the shape of `values`, and the new state.
        """
        ...

    def value(self, values: Tensor) -> Tensor:
        """Compute f(mean g) of these samples alone.

        Args:
            values: g_i, (B,) or (B, m).

        Returns:
            The value, ().
        """
        ...

    def estimate(self, state: State) -> Tensor:
        """Read the current estimate u.

        Args:
            state: What `update` returned.

        Returns:
            The estimate, in the composition's own form.
        """
        ...


def check_losses(values: Tensor, name: str) -> None:
    """Check that there is one finite loss per sample, and at least one.

    Args:
        values: g_i, as the problem returned them.
        name: The composition, for the message.

    Raises:
        TypeError: If `values` is no tensor of floating-point numbers.
        ValueError: If `values` is not of shape (B,).
        ArithmeticError: If a loss is NaN or infinite: its weight would be, too.
    """
    check_rows(values, "outer")
    if values.dim() != 1:
        raise ValueError(
            f"outer must hold one loss per sample, (B,), for {name}, got shape {tuple(values.shape)}: "
            "RunningMean takes vectors"
        )
    check_finite_losses(values, name)


def check_finite_losses(losses: Tensor, name: str) -> None:
    """Raise an ArithmeticError if a loss is NaN or infinite."""
    if not torch.isfinite(losses).all():
        bad = int((~torch.isfinite(losses)).sum())
        raise ArithmeticError(
            f"{name} got {bad} of {len(losses)} losses that are NaN or infinite, for which there is no weight: take "
            "smaller steps, or look for what overflows in the problem"
        )


def require(allowed: bool, name: str, value: object, rule: str) -> None:
    """Raise a ValueError that names an argument, its value and what is allowed, unless `allowed`."""
    if not allowed:
        raise ValueError(f"{name}={value} is not allowed: {rule}")


@explained
def _moved(state: State, u: Tensor, all_previous: Tensor | None, eta: float) -> Tensor:
    """Return the estimate of u, moved towards that of a batch."""
    old = state["u"] if all_previous is None else state["u"] + u - all_previous.mean(0)
    return torch.lerp(old, u, eta)


@dataclass(frozen=True)
class RunningMean(Checked):
    """A function f of a running mean u <- (1 - eta) u + eta * (mean of the batch), which the first batch initializes.

    The cotangents are c_i = f'(u). g may have any width.

    Args:
        f: Differentiable function of u that returns one number; the identity makes F the plain mean of g.
        eta: Weight of the newest batch, 0 < eta <= 1.

    Raises:
        ValueError: If `eta` is out of range.
    """

    f: Callable[[Tensor], Tensor] = identity
    eta: float = 0.9

    def __post_init__(self) -> None:
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")

    def _f(self, u: Tensor) -> Tensor:
        """Return f(u), checked to be one number that depends on u."""
        result = self.f(u)
        if not isinstance(result, Tensor) or (torch.is_grad_enabled() and u.requires_grad and not result.requires_grad):
            raise ValueError("f must be a differentiable function of u: compute it from u with torch")
        if result.numel() != 1:
            raise ValueError(
                f"f must return one number, got shape {tuple(result.shape)} from u of shape {tuple(u.shape)}: "
                "reduce it, by a sum for instance"
            )
        return result.squeeze()

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Refresh u and return (cotangents, new state); see `Composition.update`."""
        check_rows(values, "outer")
        check_rows(all_values, "outer of the whole batch")
        check_arguments(self.update, {"state": state, "all_previous": all_previous})
        u = all_values.mean(0)
        if state:
            u = _moved(state, u, all_previous, self.eta)
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self._f(u), u)
        return slope.expand_as(values), {"u": u.detach()}

    def value(self, values: Tensor) -> Tensor:
        """Return f(mean g) of these samples, (); see `Composition.value`."""
        check_rows(values, "outer")
        return self._f(values.mean(0))

    def estimate(self, state: State) -> Tensor:
        """Return u, of the shape of g_i; see `Composition.estimate`."""
        return state["u"]


@dataclass(frozen=True)
class LogMeanExp(Checked):
    """KL-regularized DRO of losses: f(mean g) = r log mean exp(loss / r); the cotangents are the paper's weights.

    The state holds nu = log u in float64, because exp(loss / r) itself overflows (docs/numerics.md). An estimate made
    with another r says nothing about this one, so a change of r starts it anew. `limited` is 1 where a limit acted.

    Args:
        r: Temperature: small values give the largest losses more weight.
        eta: Weight of the newest batch, 0 < eta <= 1.
        cap: Upper bound of every weight, that is of the density ratio; None for no bound.
        mean_weight_limit: Bounds the mean weight of a batch to [1 / limit, limit]; None for no bound.

    Raises:
        ValueError: If a number is out of range, or both `cap` and `mean_weight_limit` are given.
    """

    r: float = 1.0
    eta: float = 0.9
    cap: float | None = None
    mean_weight_limit: float | None = None

    def __post_init__(self) -> None:
        require(is_positive(self.r), "r", self.r, "r > 0")
        require(0 < self.eta <= 1, "eta", self.eta, "0 < eta <= 1")
        require(self.cap is None or 1 <= self.cap < inf, "cap", self.cap, "cap >= 1, or None for no bound")
        limit = self.mean_weight_limit
        require(limit is None or limit >= 1, "mean_weight_limit", limit, "mean_weight_limit >= 1")
        if self.cap is not None and self.mean_weight_limit is not None:
            raise ValueError("cap and mean_weight_limit exclude each other: a cap already bounds the mean weight")

    def batch_value(self, scaled: Tensor) -> Tensor:
        """Return nu of one batch, ().

        Without a cap it is log mean exp(scaled), with one the solution of mean min(cap, exp(scaled - nu)) = 1.

        Args:
            scaled: Losses divided by r, (B,).
        """
        if self.cap is None:
            return scaled.logsumexp(0) - log(scaled.shape[0])
        if self.cap == 1:  # every weight is 1
            return torch.full_like(scaled[0], -torch.inf)
        ordered = scaled.sort(descending=True).values
        counts = torch.arange(len(ordered), device=ordered.device, dtype=ordered.dtype)  # k, at the cap
        mass_left = len(ordered) - counts * self.cap
        uncapped = ordered.flip(0).logcumsumexp(0).flip(0)
        candidates = uncapped - mass_left.clamp_min(torch.finfo(ordered.dtype).tiny).log()
        # The smallest k whose largest uncapped sample stays below the cap. At k * cap = B the others have no mass left.
        fits = (mass_left > 0) & (ordered - candidates <= log(self.cap))
        largest_k = (mass_left > 0).sum() - 1
        return candidates[torch.where(fits.any(), fits.int().argmax(), largest_k)]

    @explained
    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Refresh u and return (weights, new state); see `Composition.update`."""
        check_losses(values, "LogMeanExp")
        check_losses(all_values, "LogMeanExp")
        r = torch.tensor(self.r, dtype=torch.float64)
        continues = bool(state) and bool(state["r"] == r) and self.eta < 1 and self.cap != 1
        if is_coarse(all_values.double(), self.r) or (continues and bool(state["nu"].abs() > COARSE)):
            if continues:
                refuse_running("LogMeanExp", all_values, self.r)
            return self._coarse_update(values.double(), all_values.double(), r, values.dtype)
        nu_batch = nu = self.batch_value(all_values.double() / self.r)
        if continues:
            old = state["nu"].to(nu)
            nu = torch.logaddexp(old + log(1 - self.eta), nu_batch + log(self.eta))
            if all_previous is not None:
                nu = self._storm(old, nu_batch, self.batch_value(all_previous.double() / self.r))
        log_weights = values.double() / self.r - nu
        new_state = {"nu": nu, "r": r}
        if self.mean_weight_limit is not None:
            excess = nu_batch - nu  # logarithm of the mean weight
            change = excess.clamp(-log(self.mean_weight_limit), log(self.mean_weight_limit)) - excess
            log_weights, new_state["limited"] = log_weights + change, (change != 0).double()
        if self.cap is not None:
            log_weights = log_weights.clamp_max(log(self.cap))
        return log_weights.exp().to(values.dtype), new_state

    def _coarse_update(self, losses: Tensor, all_losses: Tensor, r: Tensor, dtype: torch.dtype) -> tuple[Tensor, State]:
        """Return what `update` does, for one batch of losses that are large beside r."""
        scaled, pivot = around_pivot(all_losses, self.r, self.cap, REACH)
        nu = self.batch_value(scaled)
        log_weights = ((losses - pivot) / self.r).clamp(-REACH, REACH) - nu
        if self.cap is not None:
            log_weights = log_weights.clamp_max(log(self.cap))
        state = {"nu": nu + pivot / self.r, "r": r}
        if self.mean_weight_limit is not None:
            state["limited"] = torch.zeros_like(nu)  # the mean weight of a batch alone is 1
        return log_weights.exp().to(dtype), state

    def _storm(self, old: Tensor, nu_batch: Tensor, nu_previous: Tensor) -> Tensor:
        """Return the logarithm of STORM's estimate u_batch + (1 - eta) (u - u_previous).

        The difference can be so negative that the estimate would be; eta * u_batch, which a moving average contains as
        well, is therefore its lower bound.
        """
        largest = torch.stack([old, nu_batch, nu_previous]).amax(0)
        difference = (old - largest).exp() - (nu_previous - largest).exp()
        total = (nu_batch - largest).exp() + (1 - self.eta) * difference
        return torch.maximum(largest + total.clamp_min(0).log(), nu_batch + log(self.eta))

    @explained
    def value(self, values: Tensor) -> Tensor:
        """Return r log mean exp(loss / r) of these losses, (), or the capped objective; see `Composition.value`."""
        check_losses(values, "LogMeanExp")
        losses, offset = values.double(), torch.zeros((), dtype=torch.float64, device=values.device)
        if is_coarse(losses, self.r):
            offset = around_pivot(losses, self.r, self.cap, REACH)[1].detach()
            # Below, losses without weight only have to stay finite; above, the capped ones keep their own.
            losses = (losses - offset).clamp_min(-REACH * self.r)
        scaled = losses / self.r
        nu = self.batch_value(scaled.clamp_max(REACH) if offset else scaled)
        if self.cap is None:
            return (offset + self.r * nu).to(values.dtype)
        # Detached: the gradient of a maximum is that at its maximizer, held fixed.
        log_weights = (scaled - nu).clamp_max(log(self.cap)).detach()
        weights = log_weights.exp()
        value = offset + self.r * (weights * (scaled - log_weights)).mean()
        return check_overflow(value.to(values.dtype), "LogMeanExp")

    def estimate(self, state: State) -> Tensor:
        """Return u, the running mean of exp(loss / r), (); see `Composition.estimate`."""
        return state["nu"].exp()

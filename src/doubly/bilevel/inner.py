"""The one inner loop: K projected steps on h_i(delta), all samples at once (Algorithm 1, lines 4-7)."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Inner = Callable[[Tensor], Tensor]  # delta (B, ...) -> h_i (B,)


@runtime_checkable
class Constraint(Protocol):
    """A convex set per sample."""

    def project(self, delta: Tensor) -> Tensor: ...

    def at(self, fraction: Tensor) -> Tensor:
        """A point of the set from uniform draws in [0,1], one per coordinate."""
        ...


@runtime_checkable
class StepRule(Protocol):
    """Turns a gradient into an increment. The constraint is handed in for steps that are preconditioned by it."""

    def init(self, delta: Tensor) -> dict[str, Tensor]: ...

    def step(
        self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def projected_descent(inner: Inner, start: Tensor, constraint: Constraint, rule: StepRule, steps: int) -> Tensor:
    """delta after `steps` steps of `rule`, detached. One backward pass per step, with respect to delta alone."""
    delta = constraint.project(start.detach())
    state = rule.init(delta)
    health = torch.zeros((), dtype=delta.dtype, device=delta.device)  # read once, so that no step waits for the device
    for _ in range(steps):
        delta.requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(inner(delta).sum(), delta)
        with torch.no_grad():
            health += gradient.sum()
            increment, state = rule.step(gradient, delta, constraint, state)
            delta = constraint.project(delta + increment)
    if not torch.isfinite(health):  # sign(nan) is 0: the steps would silently have gone nowhere
        raise ArithmeticError("the gradient of the inner function is NaN or infinite")
    return delta.detach()

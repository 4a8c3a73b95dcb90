"""The one inner loop: K projected steps on h_i(delta), all samples at once (Algorithm 1, lines 4-7)."""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from doubly.bilevel.face import Face, flat

T = TypeVar("T")
Inner = Callable[[Tensor], Tensor]  # delta (B, ...) -> h_i (B,)


@runtime_checkable
class Constraint(Protocol):
    """A convex set per sample."""

    def project(self, delta: Tensor) -> Tensor: ...

    def at(self, fraction: Tensor) -> Tensor:
        """A point of the set from uniform draws in [0,1], one per coordinate."""
        ...

    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """The face on which a minimizer delta with gradient `slope` lies."""
        ...


@runtime_checkable
class StepRule(Protocol):
    """Turns a gradient into an increment. The constraint is handed in for steps that are preconditioned by it."""

    def init(self, delta: Tensor) -> dict[str, Tensor]: ...

    def step(
        self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def identity(values: T) -> T:
    return values


def pooled(rows: Tensor) -> Tensor:
    """The mean of the rows, as one row; not copied where there is but one."""
    return rows if len(rows) == 1 else rows.mean(0, keepdim=True)


def gap(constraint: Constraint, delta: Tensor, slope: Tensor) -> Tensor:
    """(B,): length of the projected gradient |delta - project(delta - slope)|, 0 at a minimizer."""
    return flat(delta - constraint.project(delta - slope)).square().sum(1).sqrt()


def projected_descent(
    inner: Inner,
    start: Tensor,
    constraint: Constraint,
    rule: StepRule,
    steps: int,
    tolerance: float | None = None,
    *,
    shared: bool = False,
    gather: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """delta after `steps` steps of `rule`, detached. One backward pass per step, with respect to delta alone.

    With a tolerance it stops once the projected gradient of no sample is longer. `gather` concatenates the rows of all
    processes, which stop together; `shared`: they have the same one row, whose gradient is the mean of theirs.
    """
    delta = constraint.project(start.detach())
    state = rule.init(delta)
    gradient = delta  # where there is no step
    with torch.no_grad():
        for _ in range(steps):
            delta.requires_grad_()
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(inner(delta).sum(), delta)
            gradient = pooled(gather(gradient)) if shared else gradient
            if tolerance is not None and gather(gap(constraint, delta, gradient)).max() <= tolerance:
                break
            increment, state = rule.step(gradient, delta, constraint, state)
            delta = constraint.project(delta + increment)
    # Read once, so that no step waits for the device. A NaN stays in delta; but sign(nan) is 0, and the steps would go
    # nowhere without a word: there it is in the last gradient.
    if not torch.isfinite(delta.sum() + gradient.sum()):
        raise ArithmeticError("the gradient of the inner function is NaN or infinite")
    return delta.detach()

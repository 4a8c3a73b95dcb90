"""The inner loop: K projected steps on h_i(delta) for all samples at once (lines 4-7 of Algorithm 1)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, check_arguments, check_rows, show
from doubly.bilevel.constraints import Constraint
from doubly.bilevel.rows import flat, mean_row
from doubly.bilevel.step_rules import GradientStep, StepRule

T = TypeVar("T")
Inner = Callable[[Tensor], Tensor]  # delta (B, ...) -> h_i (B,)


@dataclass(frozen=True)
class Descent(Checked):
    """Settings of the inner solver of `minimize`: projected steps of one rule.

    Args:
        rule: How a step follows from a gradient.
        steps: Largest number of steps.
        tolerance: Stop as soon as no projected gradient is longer than this; None takes all steps.
    """

    rule: StepRule = GradientStep()
    steps: int = 10
    tolerance: float | None = None


def identity(values: T) -> T:
    """Return the argument."""
    return values


def gap(constraint: Constraint, delta: Tensor, slope: Tensor) -> Tensor:
    """Return the norm of the projected gradient |delta - project(delta - slope)| of each row; 0 at a minimizer.

    Args:
        constraint: The set of each row.
        delta: Points of the sets, (B, ...).
        slope: Gradients of the inner function there, (B, ...).
    """
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
    all_gather: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Minimize a function of each row by projected steps, with one backward pass per step.

    Args:
        inner: Function delta (B, ...) -> h_i (B,); row i of delta must only enter h_i.
        start: The points to start from, (B, ...); they are projected first.
        constraint: The set of each row.
        rule: How a step follows from a gradient.
        steps: Largest number of steps.
        tolerance: Stop as soon as the projected gradient of no row is longer than this; None takes all steps.
        shared: Whether delta is a single row that several processes share; its gradient is the mean of theirs.
        all_gather: Concatenates the rows of all processes, which then stop at the same step.

    Returns:
        delta after the last step, (B, ...), detached.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ArithmeticError: If a gradient of `inner` is NaN or infinite.
    """
    given = {"inner": inner, "rule": rule, "steps": steps, "tolerance": tolerance}
    check_arguments(projected_descent, given)
    if not hasattr(constraint, "project"):
        raise TypeError(f"constraint must have a method project, got {show(constraint)}: pass WholeSpace() for none")
    check_rows(start, "start", allow_empty=True)
    delta = constraint.project(start.detach())
    state = rule.init(delta)
    gradient = delta  # checked below if there is no step
    with torch.no_grad():
        for _ in range(steps):
            delta.requires_grad_()
            with torch.enable_grad():
                values = inner(delta)
                if not isinstance(values, Tensor):
                    raise TypeError(f"inner(delta) must return a tensor, h_i of each row, got {show(values)}")
                (gradient,) = torch.autograd.grad(values.sum(), delta)
            gradient = mean_row(all_gather(gradient)) if shared else gradient
            if tolerance is not None and (all_gather(gap(constraint, delta, gradient)) <= tolerance).all():
                break
            increment, state = rule.step(gradient, delta, constraint, state)
            delta = constraint.project(delta + increment)
    # Checked once, so that no step waits for the device. A NaN stays in delta, except after sign(nan) = 0, where the
    # steps silently stop: there it is still in the last gradient.
    if not torch.isfinite(delta.sum() + gradient.sum()):
        raise ArithmeticError(
            "the gradient of the inner function is NaN or infinite: take smaller steps, or change the start"
        )
    return delta.detach()

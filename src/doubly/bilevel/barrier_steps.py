"""Rules for one step of the inner loop that follow the log-barrier of a box."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from doubly.bilevel.constraints import Box, Constraint
from doubly.bilevel.step_rules import SignStep, SizedStep, State, StepRule


@dataclass(frozen=True)
class BarrierStep(SizedStep):
    """Gradient step on inner + barrier of a `Box`, divided by 1/size + the curvature of the barrier.

    The explicit step is stiff near a face of the box, where the barrier throws delta across the whole box. This step
    has the same fixed points, equals the explicit step where the barrier is flat, and at most about doubles a slack
    that is too small (docs/numerics.md). A coordinate that starts on a face therefore stays at it for several steps
    whatever its gradient is: after a step that saturates, such as a large `SignStep`, use a `GradientStep`.
    """

    size: float = 1250 / 255
    """step size alpha, where the barrier is flat"""
    margin: float = 1e-3
    """share of the box width that is kept free at each face, because the barrier cannot push back on the face itself"""
    preconditioned: bool = True
    """divide by the curvature; without it this is line 6 of Algorithm 1, which leaves the box near its faces"""

    needs_box: ClassVar[bool] = True

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`.

        Raises:
            TypeError: If the constraint is not a `Box`.
        """
        box = _require_box(self, constraint)
        # Numerator and denominator are multiplied by the squared slacks, so that nothing is divided by a slack.
        above, below = box.slacks(delta)
        product = above * below
        numerator = gradient * product.square() + box.strength * product * (below - above)
        denominator = product.square() / self.size
        if self.preconditioned:
            denominator = denominator + box.strength * (above.square() + below.square())
        increment = -numerator / denominator.clamp_min(torch.finfo(delta.dtype).tiny)
        return box.shrunk(self.margin).project(delta + increment) - delta, state


@dataclass(frozen=True)
class WithBarrier(StepRule):
    """Any rule on the gradient of inner + barrier of a `Box`: line 6 of Algorithm 1 with sign or Adam steps.

    The gradient of the barrier, strength * (1 / slack above - 1 / slack below), is added before the rule turns it into
    a step. Near a face it wins over any gradient, so that sign steps leave the face again: with steps of a quarter of
    the radius delta ends at 0.88 of it on average, and not at 1 (docs/numerics.md).
    """

    rule: StepRule = field(default_factory=SignStep)
    """rule that makes a step of the gradient"""
    margin: float = 1e-3
    """share of the box width that is kept free at each face, where the barrier is infinite"""

    needs_box: ClassVar[bool] = True

    @property
    def sizes(self) -> tuple[float, ...]:
        """The step sizes of the rule."""
        return self.rule.sizes

    def scaled(self, factor: float) -> Self:
        """Return the same with `factor` times the step sizes of the rule."""
        return replace(self, rule=self.rule.scaled(factor))

    def init(self, delta: Tensor) -> State:
        """Return the state of the rule before the first step; see `StepRule.init`."""
        return self.rule.init(delta)

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`.

        Raises:
            TypeError: If the constraint is not a `Box`.
        """
        box = _require_box(self, constraint)
        interior = box.shrunk(self.margin)
        inside = interior.project(delta)
        # In a box without width both slacks are 0, and the two terms cancel.
        above, below = (slack.clamp_min(torch.finfo(delta.dtype).tiny) for slack in box.slacks(inside))
        slope = gradient + box.strength * (1 / above - 1 / below)
        increment, state = self.rule.step(slope, inside, constraint, state)
        return interior.project(inside + increment) - delta, state


def _require_box(rule: StepRule, constraint: Constraint) -> Box:
    if not isinstance(constraint, Box):
        name = type(rule).__name__
        raise TypeError(f"{name} needs a Box, whose barrier it follows; got {type(constraint).__name__}")
    return constraint

"""Rules for one step of the inner loop: plain gradient, momentum, sign, normalized and Adam steps."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked
from doubly.bilevel.constraints import Constraint, CrossPolytope
from doubly.bilevel.rows import norms, per_row

State = dict[str, Tensor]  # what a rule remembers from step to step


class StepRule(Checked):
    """A rule that turns gradients of the inner function into steps; a subclass is a frozen dataclass.

    A subclass implements `step`, and `init` if it remembers something from step to step.

    Args:
        arguments: Settings of the subclass, which are compared with their annotations.
        settings: The same by name.

    Raises:
        TypeError: If a setting does not fit its annotation.
    """

    needs_box: ClassVar[bool] = False
    """whether the constraint must be a `Box`, whose barrier the rule follows"""
    rests_without_gradient: ClassVar[bool] = False
    """whether a row whose gradient is 0 does not move"""
    norm: ClassVar[str | None] = None
    """norm in which a step is as long as its size, Linf or L2; None if its length depends on the gradient"""

    made_for: ClassVar[object] = None
    """what an attack that was given no rule made this one for, so that it follows a change; None of a rule that was
    given"""

    @property
    def sizes(self) -> tuple[float, ...]:
        """The step sizes of the rule, which `scaled` multiplies."""
        return ()

    def scaled(self, factor: float) -> Self:
        """Return the same rule with `factor` times the step size.

        Raises:
            TypeError: If the rule has no step size.
        """
        if not self.sizes:
            raise TypeError(
                f"{type(self).__name__} has no size, so its steps cannot be scaled: use a step rule with one"
            )
        return replace(self, size=factor * self.sizes[0])  # type: ignore[type-var]

    def init(self, delta: Tensor) -> State:
        """Make the state of the rule before its first step.

        Args:
            delta: The start of the inner loop, (B, ...).

        Returns:
            The state, empty for rules that remember nothing.
        """
        return {}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Compute one step.

        Args:
            gradient: Gradients of the inner function at delta, (B, ...).
            delta: The current points, (B, ...).
            constraint: The constraint, for rules that precondition their step by it.
            state: What the previous step, or `init`, returned.

        Returns:
            The increment of delta, (B, ...), before it is projected, and the new state.
        """
        raise NotImplementedError


class SizedStep(StepRule):
    """A rule with one step size."""

    size: float

    @property
    def sizes(self) -> tuple[float, ...]:
        """The step size."""
        return (self.size,)


@dataclass(frozen=True)
class GradientStep(SizedStep):
    """Plain gradient step: -size * gradient."""

    size: float = 0.1
    """step size alpha"""

    rests_without_gradient: ClassVar[bool] = True

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`."""
        return -self.size * gradient, state


@dataclass(frozen=True)
class MomentumStep(SizedStep):
    """Heavy-ball step: -size * a decaying sum of all gradients so far."""

    size: float = 0.1
    """step size alpha"""
    decay: float = 0.9
    """factor by which the sum of earlier gradients shrinks in each step"""

    def init(self, delta: Tensor) -> State:
        """Return the state before the first step; see `StepRule.init`."""
        return {"sum": torch.zeros_like(delta)}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`."""
        total = self.decay * state["sum"] + gradient
        return -self.size * total, {"sum": total}


@dataclass(frozen=True)
class SignStep(SizedStep):
    """Sign step: -size * sign(gradient)."""

    size: float = 2 / 255
    """step size alpha"""

    rests_without_gradient: ClassVar[bool] = True
    norm: ClassVar[str | None] = "Linf"

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`."""
        return -self.size * gradient.sign(), state


@dataclass(frozen=True)
class NormalizedStep(SizedStep):
    """Step of fixed l2 length along the gradient of each sample: -size * gradient / |gradient|_2."""

    size: float = 0.1
    """l2 length of a step"""

    rests_without_gradient: ClassVar[bool] = True
    norm: ClassVar[str | None] = "L2"

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`."""
        lengths = norms(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        return -self.size * gradient / per_row(lengths, gradient), state


@dataclass(frozen=True)
class SparseStep(SizedStep):
    """Step of fixed l1 length along the coordinates of the largest gradients of each sample.

    From the second step on, coordinates that a bound of the set holds are passed over.
    """

    size: float = 1.0
    """l1 length of a step"""
    share: float = 0.01
    """share of the coordinates that move, at least one; the steepest step in l1 moves one alone"""

    rests_without_gradient: ClassVar[bool] = True
    norm: ClassVar[str | None] = "L1"

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`."""
        if state and isinstance(constraint, CrossPolytope):  # coordinates at a bound would take the length for nothing
            ahead = constraint.box.project(delta - self.size * gradient.sign())
            gradient = torch.where(ahead == delta, 0, gradient)
        rows = gradient.flatten(1)
        count = max(1, int(self.share * rows.shape[1]))
        largest = rows.abs().topk(count, dim=1).indices
        signs = torch.zeros_like(rows).scatter(1, largest, rows.gather(1, largest).sign())
        moved = signs.abs().sum(1, keepdim=True).clamp_min(1)
        return (-self.size * signs / moved).view_as(gradient), {"started": torch.ones(())}


@dataclass(frozen=True)
class AdamStep(SizedStep):
    """Adam step; the first one nearly equals a sign step of the same size."""

    size: float = 2 / 255
    """step size alpha"""
    decay: float = 0.9
    """decay of the first moment"""
    decay_squares: float = 0.999
    """decay of the second moment"""
    floor: float = 1e-8
    """added to the root of the second moment"""

    norm: ClassVar[str | None] = "Linf"

    def init(self, delta: Tensor) -> State:
        """Return the state before the first step; see `StepRule.init`."""
        zeros = torch.zeros_like(delta)
        return {"mean": zeros, "squares": zeros, "steps": torch.zeros((), device=delta.device, dtype=delta.dtype)}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`."""
        steps = state["steps"] + 1
        mean = torch.lerp(gradient, state["mean"], self.decay)
        squares = torch.lerp(gradient.square(), state["squares"], self.decay_squares)
        unbiased = mean / (1 - self.decay**steps)
        root = (squares / (1 - self.decay_squares**steps)).sqrt()
        return -self.size * unbiased / (root + self.floor), {"mean": mean, "squares": squares, "steps": steps}


@dataclass(frozen=True)
class FirstThen(StepRule):
    """One rule for the first step and another rule for all later steps."""

    first: StepRule = field(default_factory=SignStep)
    """rule of the first step"""
    then: StepRule = field(default_factory=GradientStep)
    """rule of all later steps"""

    @property
    def needs_box(self) -> bool:  # type: ignore[override]
        """Whether one of the two rules needs a `Box`."""
        return self.first.needs_box or self.then.needs_box

    @property
    def sizes(self) -> tuple[float, ...]:
        """The step sizes of both rules."""
        return (*self.first.sizes, *self.then.sizes)

    def scaled(self, factor: float) -> Self:
        """Return the same pair of rules with `factor` times their step sizes."""
        return replace(self, first=self.first.scaled(factor), then=self.then.scaled(factor))

    def init(self, delta: Tensor) -> State:
        """Return the state before the first step; see `StepRule.init`."""
        return {"first": torch.zeros(())}  # replaced by the state of `then` after the first step

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        """Return the increment of delta and the new state; see `StepRule.step`."""
        if "first" in state:
            increment, _ = self.first.step(gradient, delta, constraint, self.first.init(delta))
            return increment, self.then.init(delta)
        return self.then.step(gradient, delta, constraint, state)

"""How one inner step follows from a gradient: plain, normalized, sign, Adam, preconditioned by the barrier."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from doubly.bilevel.box import Box
from doubly.bilevel.face import flat
from doubly.bilevel.inner import Constraint, StepRule

State = dict[str, Tensor]


@dataclass(frozen=True)
class GradientStep:
    """-size * gradient."""

    size: float = 0.1
    """step size alpha"""

    def init(self, delta: Tensor) -> State:
        return {}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        return -self.size * gradient, state


@dataclass(frozen=True)
class MomentumStep:
    """-size * the decaying sum of gradients (heavy ball)."""

    size: float = 0.1
    """step size alpha"""
    decay: float = 0.9
    """of the sum"""

    def init(self, delta: Tensor) -> State:
        return {"sum": torch.zeros_like(delta)}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        total = self.decay * state["sum"] + gradient
        return -self.size * total, {"sum": total}


@dataclass(frozen=True)
class SignStep:
    """-size * sign(gradient)."""

    size: float = 2 / 255
    """step size alpha"""

    def init(self, delta: Tensor) -> State:
        return {}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        return -self.size * gradient.sign(), state


@dataclass(frozen=True)
class NormalizedStep:
    """-size * gradient / |gradient|_2 of each sample: the steepest step of a given length, for l2 balls."""

    size: float = 0.1
    """length of a step"""

    def init(self, delta: Tensor) -> State:
        return {}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        norms = flat(gradient).norm(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
        return -self.size * gradient / norms.view(-1, *[1] * (gradient.dim() - 1)), state


@dataclass(frozen=True)
class AdamStep:
    """Adam on delta; the first step is a sign step of the same size."""

    size: float = 2 / 255
    """step size alpha"""
    decay: float = 0.9
    """of the first moment"""
    decay_squares: float = 0.999
    """of the second moment"""
    floor: float = 1e-8
    """added to the root of the second moment"""

    def init(self, delta: Tensor) -> State:
        zeros = torch.zeros_like(delta)
        return {"mean": zeros, "squares": zeros, "steps": torch.zeros((), device=delta.device, dtype=delta.dtype)}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        steps = state["steps"] + 1
        mean = torch.lerp(gradient, state["mean"], self.decay)
        squares = torch.lerp(gradient.square(), state["squares"], self.decay_squares)
        unbiased = mean / (1 - self.decay**steps)
        root = (squares / (1 - self.decay_squares**steps)).sqrt()
        return -self.size * unbiased / (root + self.floor), {"mean": mean, "squares": squares, "steps": steps}


@dataclass(frozen=True)
class FirstThen:
    """One rule for the first step and another for those after it."""

    first: StepRule = field(default_factory=SignStep)
    """the first step"""
    then: StepRule = field(default_factory=GradientStep)
    """all others"""

    def init(self, delta: Tensor) -> State:
        return {"first": torch.zeros(())}  # the state of `then` is made when it begins

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        if "first" in state:
            increment, _ = self.first.step(gradient, delta, constraint, self.first.init(delta))
            return increment, self.then.init(delta)
        return self.then.step(gradient, delta, constraint, state)


@dataclass(frozen=True)
class BarrierStep:
    """A gradient step on h = inner + barrier of the box, divided by 1/size + the barrier's curvature.

    The explicit step is stiff near a face: there the barrier throws delta across the whole box. This one has the same
    fixed points, equals the explicit step where the barrier is flat, and at most about doubles a slack that is too
    small (docs/numerics.md). Numerator and denominator are multiplied by the squared slacks, so nothing divides by one.
    """

    size: float = 1250 / 255
    """step size alpha, where the barrier is flat"""
    margin: float = 1e-3
    """share of the box width that is kept free at each face: on a face itself the barrier cannot push back"""
    preconditioned: bool = True
    """divide by the curvature; without it this is line 6 of Algorithm 1, which leaves the box near its faces"""

    def init(self, delta: Tensor) -> State:
        return {}

    def step(self, gradient: Tensor, delta: Tensor, constraint: Constraint, state: State) -> tuple[Tensor, State]:
        if not isinstance(constraint, Box):
            raise TypeError(f"BarrierStep needs a Box, whose barrier it follows; got {type(constraint).__name__}")
        above, below = constraint.slacks(delta)
        product = above * below
        numerator = gradient * product.square() + constraint.strength * product * (below - above)
        denominator = product.square() / self.size
        if self.preconditioned:
            denominator = denominator + constraint.strength * (above.square() + below.square())
        increment = -numerator / denominator.clamp_min(torch.finfo(delta.dtype).tiny)
        return constraint.shrunk(self.margin).project(delta + increment) - delta, state

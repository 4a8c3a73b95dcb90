"""The constraint of an unconstrained problem."""

from dataclasses import dataclass

from torch import Tensor

from doubly.bilevel.arguments import explained
from doubly.bilevel.constraints.face import Face


@dataclass(frozen=True)
class WholeSpace:
    """No constraint: every delta is allowed."""

    @explained
    def project(self, delta: Tensor) -> Tensor:
        """Return `delta` itself; see `Constraint.project`."""
        return delta

    @explained
    def at(self, fraction: Tensor) -> Tensor:
        """Return draws in [0, 1] as points in [-1, 1]; see `Constraint.at`. The space has no uniform distribution."""
        return 2 * fraction - 1

    @explained
    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """Return the whole space, in which delta can move freely; see `Constraint.face`."""
        return Face()

"""The protocol of a constraint of the inner problem."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from doubly.bilevel.constraints.face import Face


@runtime_checkable
class Constraint(Protocol):
    """A convex set for each sample; an object with these methods can be passed as a constraint."""

    def project(self, delta: Tensor) -> Tensor:
        """Project each row onto its set.

        Args:
            delta: Any points, (B, ...).

        Returns:
            The nearest points of the sets, (B, ...).
        """
        ...

    def at(self, fraction: Tensor) -> Tensor:
        """Map uniform draws to points of the sets.

        Args:
            fraction: Draws in [0, 1], one per coordinate, (B, ...).

        Returns:
            One point of the set for each row, (B, ...).
        """
        ...

    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """Find the face of the set on which a minimizer lies.

        Args:
            delta: A minimizer of the inner function in each set, (B, ...).
            slope: Gradients of the inner function there, (B, ...).

        Returns:
            The tangent space of the face, and the curvature that the constraint adds.
        """
        ...

"""Faces of constraint sets: a constrained minimizer can move only along the tangent space of the face it lies on.

Eq. 9 of the paper holds for a minimizer in the interior of its set. Where a constraint is active, delta*(theta) moves
along the face only, and the face of a ball is curved. The linear system is then P (H + multiplier) P v = P b, where P
is the orthogonal projection onto the tangent space.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from doubly.bilevel.arguments import Checked
from doubly.bilevel.rows import dot, per_row


@dataclass(frozen=True, eq=False)
class Face(Checked):
    """The tangent space of each row's face; with the defaults it is the whole space.

    Args:
        free: 1 where a coordinate can move and 0 where a bound holds it, (B, ...); None if all coordinates can move.
        normal: A unit vector in each row, among the free coordinates, along which delta cannot move, (B, ...); 0 in
            rows without one.
        multiplier: Curvature that the constraint adds to the Hessian, (B,).
    """

    free: Tensor | None = None
    normal: Tensor | None = None
    multiplier: Tensor | None = None

    def tangent(self, v: Tensor) -> Tensor:
        """Project vectors onto the tangent space.

        Args:
            v: One vector per row, (B, ...).

        Returns:
            The projected vectors, (B, ...).
        """
        if self.free is not None:
            v = v * self.free
        if self.normal is not None:
            v = v - per_row(dot(v, self.normal), v) * self.normal
        return v

    def restrict(self, matvec: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Restrict a linear system to the tangent space.

        Args:
            matvec: Product v -> H v of the unrestricted Hessian, for all rows at once.

        Returns:
            The product with P (H + multiplier) P on the tangent space and with the identity on its complement, which
            keeps the system invertible.
        """

        def restricted(v: Tensor) -> Tensor:
            along = self.tangent(v)
            product = matvec(along)
            if self.multiplier is not None:
                product = product + per_row(self.multiplier, v) * along
            return self.tangent(product) + v - along

        return restricted

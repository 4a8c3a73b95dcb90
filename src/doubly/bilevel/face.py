"""Where a constrained minimizer may move: the tangent space of the face it lies on.

Eq. 9 holds for a minimizer inside its set. On an active constraint delta*(theta) moves along the face only, and the
face of a ball is curved: there the system is P (H + multiplier) P v = P b, P the projection onto the tangent space.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def as_rows(numbers: Tensor, like: Tensor) -> Tensor:
    """(B,) shaped to broadcast against `like` (B, ...)."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


def flat(rows: Tensor) -> Tensor:
    """(B, d); a row may be one number."""
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """(B,): the inner product of each row."""
    return flat(a * b).sum(1)


@dataclass(frozen=True, eq=False)
class Face:
    """One face per row. All of the row where nothing is active."""

    free: Tensor | None = None  # 1 where the coordinate may move, 0 where it is held; None: all may
    normal: Tensor | None = None  # unit vector among the free coordinates that delta may not follow; 0 for none
    multiplier: Tensor | None = None  # (B,), curvature that the constraint adds

    def tangent(self, v: Tensor) -> Tensor:
        if self.free is not None:
            v = v * self.free
        if self.normal is not None:
            v = v - as_rows(dot(v, self.normal), v) * self.normal
        return v

    def restrict(self, matvec: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The system on the tangent space; the identity across it, so that it stays invertible."""

        def restricted(v: Tensor) -> Tensor:
            along = self.tangent(v)
            product = matvec(along)
            if self.multiplier is not None:
                product = product + as_rows(self.multiplier, v) * along
            return self.tangent(product) + v - along

        return restricted

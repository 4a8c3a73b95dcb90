"""No constraint at all, as a constraint."""

from dataclasses import dataclass

from torch import Tensor

from doubly.bilevel.face import Face


@dataclass(frozen=True)
class WholeSpace:
    """delta is free."""

    def project(self, delta: Tensor) -> Tensor:
        return delta

    def at(self, fraction: Tensor) -> Tensor:
        """A point of [-1, 1] in each coordinate: there is no uniform draw from everywhere."""
        return 2 * fraction - 1

    def face(self, delta: Tensor, slope: Tensor) -> Face:
        return Face()

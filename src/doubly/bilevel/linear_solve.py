"""Solvers of A_i v_i = b_i, batched over samples: a solver is a value, called with the product v -> A v and with b.

`inverse_diagonal` is the inverse of a diagonal D, such as the barrier's curvature, that is added to A and only known by
its inverse: it may be 0 where D is infinite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MatVec = Callable[[Tensor], Tensor]


class Solver(Protocol):
    def __call__(self, matvec: MatVec, b: Tensor) -> Tensor: ...


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each sample, shaped to broadcast against a."""
    return (a * b).flatten(1).sum(1).view(-1, *[1] * (a.dim() - 1))


@dataclass(frozen=True, eq=False)
class Diagonal:
    """A is neglected beside D (Proposition 1 on ReLU networks, whose curvature in delta vanishes): v = D^-1 b."""

    inverse_diagonal: Tensor

    def __call__(self, matvec: MatVec, b: Tensor) -> Tensor:
        return self.inverse_diagonal * b


@dataclass(frozen=True, eq=False)
class ConjugateGradient:
    """(A + D) v = b for symmetric A, by conjugate gradients on z = D^(1/2) v, which needs only D^(-1/2).

    A sample that meets negative curvature keeps what it has; it starts from the diagonal solution D^-1 b, so that
    is what it has at worst. Without D it starts from 0.
    """

    iterations: int = 10
    tolerance: float = 1e-6
    inverse_diagonal: Tensor | None = None

    def __call__(self, matvec: MatVec, b: Tensor) -> Tensor:
        scale = torch.ones_like(b) if self.inverse_diagonal is None else self.inverse_diagonal.sqrt()
        shift = 0.0 if self.inverse_diagonal is None else 1.0
        z = scale * b * shift
        residual = scale * (b - matvec(scale * z)) - shift * z if shift else b
        direction, squares = residual, _dot(residual, residual)
        enough = self.tolerance**2 * _dot(scale * b, scale * b)
        for _ in range(self.iterations):
            product = scale * matvec(scale * direction) + shift * direction
            curvature = _dot(direction, product)
            going = (curvature > 0) & (squares > enough)
            step = torch.where(going, squares / curvature, 0)
            z, residual = z + step * direction, residual - step * product
            previous, squares = squares, torch.where(going, _dot(residual, residual), 0)
            direction = residual + torch.where(going, squares / previous, 0) * direction
        return scale * z


@dataclass(frozen=True)
class Neumann:
    """v = size * sum_{k<terms} (I - size A)^k b: converges where 0 < size * A < 2."""

    size: float = 0.1
    terms: int = 10

    def __call__(self, matvec: MatVec, b: Tensor) -> Tensor:
        v = self.size * b
        for _ in range(self.terms - 1):
            v = v + self.size * (b - matvec(v))
        return v

"""Solvers of A_i v_i = b_i, batched over rows: a solver is a value, called with the product v -> A v and with b.

`inverse_diagonal` is the inverse of a diagonal D, such as the barrier's curvature, that is added to A and only known by
its inverse: it may be 0 where D is infinite. With a `tolerance` a solver reports the relative residual of each row and
warns where it is missed; without one it is cut off on purpose and says nothing.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from doubly.bilevel.face import as_rows, dot, flat

MatVec = Callable[[Tensor], Tensor]


class SolverWarning(UserWarning):
    """A linear solve missed its tolerance: the implicit term is approximate."""


class Solution(NamedTuple):
    v: Tensor
    residual: Tensor | None = None  # (B,): |b - A v| / |b|, where it is known


class Solver(Protocol):
    def __call__(self, matvec: MatVec, b: Tensor) -> Solution: ...


def _relative(residual: Tensor, b: Tensor) -> Tensor:
    return (dot(residual, residual) / dot(b, b).clamp_min(torch.finfo(b.dtype).tiny)).sqrt()


def _judged(v: Tensor, residual: Tensor, tolerance: float, remedy: str, bent: Tensor | None = None) -> Solution:
    """The solution, after a warning where it misses the tolerance or, in rows that are `bent`, is no minimizer's."""
    missed = ~(residual <= tolerance)  # a NaN is missed too
    if bent is not None and bent.any():
        missed = missed | bent
        remedy = (
            f"inner has no positive curvature at delta in {int(bent.sum())} of them; take more inner steps, or add "
            "curvature to inner, such as a multiple of the squared norm of delta"
        )
    if missed.any():
        warnings.warn(
            f"the linear solve left a relative residual of {residual.max().item():.1e} (tolerance {tolerance:.0e}) in "
            f"{int(missed.sum())} of {len(residual)} systems: {remedy}",
            SolverWarning,
            stacklevel=4,
        )
    return Solution(v, residual)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """With `inverse_diagonal`, A is neglected beside D (Proposition 1 on ReLU networks, whose curvature in delta
    vanishes): v = D^-1 b. Without, A is taken to be diagonal, as it is where h is a sum over the coordinates of delta:
    one product gives it.
    """

    inverse_diagonal: Tensor | None = None
    tolerance: float | None = 1e-5

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        if self.inverse_diagonal is not None:
            return Solution(self.inverse_diagonal * b)
        diagonal = matvec(torch.ones_like(b))
        v = b / diagonal
        if self.tolerance is None:
            return Solution(v)
        residual = _relative(b - matvec(v), b)
        bent = flat(diagonal < 0).any(1) & (residual <= self.tolerance)
        remedy = "the Hessian of inner is singular or not diagonal; use ConjugateGradient or Direct"
        return _judged(v, residual, self.tolerance, remedy, bent)


@dataclass(frozen=True, eq=False)
class ConjugateGradient:
    """(A + D) v = b for symmetric A, by conjugate gradients.

    `preconditioner` maps a residual to about A^-1 of it. With D they run on z = D^(1/2) v, which needs only D^(-1/2),
    and start from the diagonal solution D^-1 b; without D from 0. A row of negative curvature keeps what it has.
    """

    iterations: int = 10
    tolerance: float | None = 1e-5
    inverse_diagonal: Tensor | None = None
    preconditioner: MatVec | None = None

    def __post_init__(self) -> None:
        if self.inverse_diagonal is not None and self.preconditioner is not None:
            raise ValueError("inverse_diagonal is the preconditioner already: give one of the two")

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        if self.inverse_diagonal is None:
            return self._solve(matvec, b, torch.zeros_like(b), b)
        scale = self.inverse_diagonal.sqrt()

        def scaled(z: Tensor) -> Tensor:
            return scale * matvec(scale * z) + z

        z = scale * b
        v, residual = self._solve(scaled, z, z, z - scaled(z))
        return Solution(scale * v, residual)

    def _solve(self, matvec: MatVec, b: Tensor, v: Tensor, residual: Tensor) -> Solution:
        enough = (self.tolerance or 0.0) ** 2 * dot(b, b)
        smoothed = self.preconditioner(residual) if self.preconditioner else residual
        direction, product = smoothed, dot(residual, smoothed)
        convex = torch.ones_like(product, dtype=torch.bool)
        squares = dot(residual, residual)
        best, least = v, squares  # on a singular system the last iterate can be anywhere
        for _ in range(self.iterations):
            going = convex & (squares > enough)
            if self.tolerance is not None and not going.any():
                break
            image = matvec(direction)
            curvature = dot(direction, image)
            convex = convex & ((curvature > 0) | ~going)
            going = going & convex
            step = as_rows(torch.where(going, product / curvature, 0), b)
            v, residual = torch.addcmul(v, step, direction), torch.addcmul(residual, step, image, value=-1)
            smoothed = self.preconditioner(residual) if self.preconditioner else residual
            previous, product = product, dot(residual, smoothed)
            direction = torch.addcmul(smoothed, as_rows(torch.where(going, product / previous, 0), b), direction)
            squares = dot(residual, residual) if self.preconditioner else product
            best, least = torch.where(as_rows(squares < least, v), v, best), torch.minimum(squares, least)
        if self.tolerance is None:
            return Solution(best)
        # Not the residual of the recurrence, which rounding lets drift away from that of v.
        residual, remedy = _relative(b - matvec(best), b), "allow more iterations, or give a preconditioner"
        return _judged(best, residual, self.tolerance, remedy, ~convex)


@dataclass(frozen=True)
class Neumann:
    """v = size * sum_{k<terms} (I - size A)^k b: converges where 0 < size * A < 2."""

    size: float = 0.1
    terms: int = 10
    tolerance: float | None = 1e-3

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        v = self.size * b
        for _ in range(self.terms - 1):
            v = v + self.size * (b - matvec(v))
        if self.tolerance is None:
            return Solution(v)
        residual = _relative(b - matvec(v), b)
        return _judged(v, residual, self.tolerance, "take more terms, or a smaller size; inner must be convex")


@dataclass(frozen=True)
class Direct:
    """The matrix written out, by one product per coordinate, and factorized: for small delta, as a reference."""

    tolerance: float | None = 1e-5
    largest: int = 2048  # coordinates of a row

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        size = b[0].numel()
        if size > self.largest:
            raise ValueError(f"Direct would build matrices of {size} x {size}: use ConjugateGradient, or raise largest")
        units = torch.eye(size, dtype=b.dtype, device=b.device).view(size, 1, *b.shape[1:])
        columns = [flat(matvec(unit.expand_as(b))) for unit in units]
        matrix = torch.stack(columns, dim=2)
        matrix = (matrix + matrix.mT) / 2
        factor, failed = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal(dim1=1, dim2=2).square()
        scale = matrix.diagonal(dim1=1, dim2=2).abs().amax(1, keepdim=True)
        bad = (failed > 0) | (pivots <= 10 * size * torch.finfo(b.dtype).eps * scale).any(1)
        if bad.any():
            raise ValueError(
                f"inner: its Hessian in delta is singular or indefinite in {int(bad.sum())} of {len(b)} systems; take "
                "more inner steps, or add curvature to inner, such as a multiple of the squared norm of delta"
            )
        column = flat(b).unsqueeze(2)
        v = torch.cholesky_solve(column, factor)
        if self.tolerance is None:
            return Solution(v.view_as(b))
        residual = _relative(column - matrix @ v, column)
        return _judged(v.view_as(b), residual, self.tolerance, "the Hessian of inner is badly conditioned; use float64")

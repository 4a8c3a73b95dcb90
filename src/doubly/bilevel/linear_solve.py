"""Solvers of the linear systems A_i v_i = b_i, one per row, that need only products with A.

Some solvers take `inverse_diagonal`, the inverse of a diagonal matrix D that is added to A, such as the curvature of a
barrier. D itself is never formed: where it is infinite, its inverse is 0. With a `tolerance` a solver reports the
relative residual of each row and warns where the residual is larger; without one it stops early on purpose, and neither
reports nor warns.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, check_rows, fits, show
from doubly.bilevel.rows import dot, flat, per_row

MatVec = Callable[[Tensor], Tensor]


class SolverWarning(UserWarning):
    """Warning that a linear solve missed its tolerance, or that inner problems are not solved."""


class Solution(NamedTuple):
    """The result of a linear solve.

    Attributes:
        v: The solutions, (B, ...).
        residual: Relative residual |b - A v| / |b| of each row, (B,); None if the solver does not compute it.
    """

    v: Tensor
    residual: Tensor | None = None


class Solver(Protocol):
    """A callable that solves A_i v_i = b_i for all rows, such as `ConjugateGradient`.

    A plain function will do if it returns no residual.

    Attributes:
        tolerance: Largest relative residual without a warning; None if the solver reports no residual.
    """

    @property
    def tolerance(self) -> float | None:
        """Largest relative residual without a warning."""
        ...

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        """Solve the systems.

        Args:
            matvec: Product v -> A v for all rows at once, (B, ...) -> (B, ...).
            b: Right-hand sides, (B, ...).

        Returns:
            The solutions and, if the solver computes them, their relative residuals.
        """
        ...


def _checked_system(matvec: MatVec, b: Tensor) -> MatVec:
    """Return the product, whose results are compared with b; refuse what is no function, and no rows of numbers."""
    if not fits(matvec, MatVec):
        raise TypeError(f"matvec must be a function v -> A v, got {show(matvec)}")
    check_rows(b, "b")

    def product(v: Tensor) -> Tensor:
        image = matvec(v)
        if not isinstance(image, Tensor) or image.shape != v.shape:
            raise ValueError(f"matvec must return A v, a tensor of the shape of v, {tuple(v.shape)}, got {show(image)}")
        return image

    return product


def _relative_norm(residual: Tensor, b: Tensor) -> Tensor:
    """Return |residual| / |b| of each row, (B,)."""
    return (dot(residual, residual) / dot(b, b).clamp_min(torch.finfo(b.dtype).tiny)).sqrt()


def meets_tolerance(residual: Tensor, tolerance: float) -> Tensor:
    """Return whether each residual is within the tolerance, up to the rounding of an iteration that stopped there."""
    return residual <= 1.1 * tolerance + 16 * torch.finfo(residual.dtype).eps


def _checked(v: Tensor, residual: Tensor, tolerance: float, remedy: str, concave: Tensor | None = None) -> Solution:
    """Return the solution, and warn if it misses the tolerance.

    Args:
        v: The solutions, (B, ...).
        residual: Their relative residuals, (B,).
        tolerance: Largest relative residual without a warning.
        remedy: What the user can do, for the message.
        concave: Rows in which a direction without positive curvature was met, (B,); the warning covers them as well.
    """
    missed = ~meets_tolerance(residual, tolerance)  # true for NaN as well
    if concave is not None and concave.any():
        missed = missed | concave
        remedy = (
            f"inner has no positive curvature at delta in {int(concave.sum())} of them; take more inner steps, or add "
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
class Diagonal(Checked):
    """Solver for diagonal systems, which needs at most two products.

    With `inverse_diagonal` it returns v = D^-1 b and neglects A beside D, as Proposition 1 does for ReLU networks,
    whose curvature in delta vanishes. Otherwise it takes A to be diagonal, as it is where h is a sum over the
    coordinates of delta, and finds it by one product.

    Args:
        inverse_diagonal: The inverse of D, (B, ...), or None.
        tolerance: Largest relative residual without a warning, for a solve without `inverse_diagonal`; None neither
            computes it nor warns.
    """

    inverse_diagonal: Tensor | None = None
    tolerance: float | None = 1e-5

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        """Solve the systems; see `Solver`."""
        if self.inverse_diagonal is not None:
            check_rows(b, "b", allow_empty=True)
            return Solution(self.inverse_diagonal * b)
        matvec = _checked_system(matvec, b)
        diagonal = matvec(torch.ones_like(b))
        v = b / diagonal
        if self.tolerance is None:
            return Solution(v)
        residual = _relative_norm(b - matvec(v), b)
        concave = flat(diagonal < 0).any(1) & (residual <= self.tolerance)
        remedy = "the Hessian of inner is singular or not diagonal; use ConjugateGradient or Direct"
        return _checked(v, residual, self.tolerance, remedy, concave)


@dataclass(frozen=True, eq=False)
class ConjugateGradient(Checked):
    """Conjugate-gradient solver of (A + D) v = b for symmetric A.

    With D the iteration runs on z = D^(1/2) v, which needs only D^(-1/2), and starts from D^-1 b; without D it starts
    from 0. A row in which it meets negative curvature keeps its last iterate.

    Args:
        iterations: Largest number of iterations.
        tolerance: Relative residual at which a row is solved; None takes all iterations, and neither reports the
            residual nor warns.
        inverse_diagonal: The inverse of D, (B, ...); None for D = 0.
        preconditioner: Function that maps a residual r to approximately A^-1 r, (B, ...) -> (B, ...).

    Raises:
        ValueError: If both `inverse_diagonal` and `preconditioner` are given.
    """

    iterations: int = 10
    tolerance: float | None = 1e-5
    inverse_diagonal: Tensor | None = None
    preconditioner: MatVec | None = None

    def __post_init__(self) -> None:
        if self.inverse_diagonal is not None and self.preconditioner is not None:
            raise ValueError("inverse_diagonal is the preconditioner already: give one of the two")

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        """Solve the systems; see `Solver`."""
        matvec = _checked_system(matvec, b)
        if self.inverse_diagonal is None:
            return self._solve(matvec, b, torch.zeros_like(b), b)
        scale = self.inverse_diagonal.sqrt()

        def scaled(z: Tensor) -> Tensor:
            return scale * matvec(scale * z) + z

        z = scale * b
        v, residual = self._solve(scaled, z, z, z - scaled(z))
        return Solution(scale * v, residual)

    def _solve(self, matvec: MatVec, b: Tensor, v: Tensor, residual: Tensor) -> Solution:
        """Solve from the start v, whose residual is given."""
        target = (self.tolerance or 0.0) ** 2 * dot(b, b)
        smoothed = self.preconditioner(residual) if self.preconditioner else residual
        direction, product = smoothed, dot(residual, smoothed)
        convex = torch.ones_like(product, dtype=torch.bool)
        squares = dot(residual, residual)
        best, best_squares = v, squares  # the last iterate of a singular system can be arbitrarily bad
        for _ in range(self.iterations):
            running = convex & (squares > target)
            if self.tolerance is not None and not running.any():
                break
            image = matvec(direction)
            curvature = dot(direction, image)
            convex = convex & ((curvature > 0) | ~running)
            running = running & convex
            step = per_row(torch.where(running, product / curvature, 0), b)
            v, residual = torch.addcmul(v, step, direction), torch.addcmul(residual, step, image, value=-1)
            smoothed = self.preconditioner(residual) if self.preconditioner else residual
            previous, product = product, dot(residual, smoothed)
            direction = torch.addcmul(smoothed, per_row(torch.where(running, product / previous, 0), b), direction)
            squares = dot(residual, residual) if self.preconditioner else product
            best = torch.where(per_row(squares < best_squares, v), v, best)
            best_squares = torch.minimum(squares, best_squares)
        if self.tolerance is None:
            return Solution(best)
        # The residual of the recurrence drifts away from that of v by rounding, so it is computed anew.
        residual, remedy = _relative_norm(b - matvec(best), b), "allow more iterations, or give a preconditioner"
        return _checked(best, residual, self.tolerance, remedy, ~convex)


@dataclass(frozen=True)
class Neumann(Checked):
    """Truncated Neumann series v = size * sum_{k<terms} (I - size A)^k b, which converges if 0 < size * A < 2.

    Args:
        size: Step size of the series; with that of the inner steps it gives what unrolling `terms` of them would.
        terms: Number of terms.
        tolerance: Largest relative residual without a warning; None neither computes it nor warns.
    """

    size: float = 0.1
    terms: int = 10
    tolerance: float | None = 1e-3

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        """Solve the systems; see `Solver`."""
        matvec = _checked_system(matvec, b)
        v = self.size * b
        for _ in range(self.terms - 1):
            v = v + self.size * (b - matvec(v))
        if self.tolerance is None:
            return Solution(v)
        residual = _relative_norm(b - matvec(v), b)
        return _checked(v, residual, self.tolerance, "take more terms, or a smaller size; inner must be convex")


@dataclass(frozen=True)
class Direct(Checked):
    """Direct solver that builds each matrix by one product per coordinate and factorizes it; for small delta.

    Args:
        tolerance: Largest relative residual without a warning; None neither computes it nor warns.
        largest: Largest number of coordinates of a row.
    """

    tolerance: float | None = 1e-5
    largest: int = 2048

    def __call__(self, matvec: MatVec, b: Tensor) -> Solution:
        """Solve the systems; see `Solver`.

        Raises:
            TypeError: If b is of half precision.
            ValueError: If a row has more than `largest` coordinates, or a matrix is singular or indefinite.
        """
        matvec = _checked_system(matvec, b)
        size = b[0].numel()
        if b.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"Direct factorizes matrices of float32 and float64, got {b.dtype}: use delta.float()")
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
        residual = _relative_norm(column - matrix @ v, column)
        return _checked(
            v.view_as(b), residual, self.tolerance, "the Hessian of inner is badly conditioned; use float64"
        )

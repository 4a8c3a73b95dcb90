"""A scaled probability simplex for each sample."""

from dataclasses import dataclass

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, explained
from doubly.bilevel.constraints.face import Face
from doubly.bilevel.rows import flat, per_row

ZERO_TOLERANCE = 1e-6  # a coordinate below this share of the total counts as 0


@dataclass(frozen=True)
class Simplex(Checked):
    """The constraint that the coordinates of each sample are non-negative and sum to `total`.

    Args:
        total: The sum of the coordinates of a row.

    Raises:
        ValueError: If `total` is not positive.
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        if not self.total > 0:
            raise ValueError(f"total={self.total} is not allowed: total > 0")

    @explained
    def project(self, delta: Tensor) -> Tensor:
        """Return the nearest point of the simplex, (B, ...); see `Constraint.project`.

        It is max(delta - shift, 0), with a shift that follows from the sorted coordinates.
        """
        # Shifting a row does not change its projection, and keeps the total from drowning in large numbers.
        rows = flat(delta) - flat(delta).amax(1, keepdim=True)
        ordered = rows.sort(dim=1, descending=True).values
        counts = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
        shifts = (ordered.cumsum(1) - self.total) / counts
        positive_count = (ordered > shifts).sum(1, keepdim=True)
        return (rows - shifts.gather(1, (positive_count - 1).clamp_min(0))).clamp_min(0).view_as(delta)

    @explained
    def at(self, fraction: Tensor) -> Tensor:
        """Return a uniformly distributed point of the simplex from uniform draws; see `Constraint.at`."""
        limits = torch.finfo(fraction.dtype)
        spacings = -fraction.clamp(limits.tiny, 1 - limits.eps).log()
        return self.total * spacings / per_row(flat(spacings).sum(1), spacings)

    @explained
    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """Return the face on which each row of a minimizer lies.

        A coordinate is held at 0 where descent would push it below; the free coordinates keep their sum.

        Args:
            delta: The minimizers, (B, ...).
            slope: Gradients of the inner function there, (B, ...).
        """
        positive = delta > ZERO_TOLERANCE * self.total
        multiplier = flat(slope * positive).sum(1) / flat(positive).sum(1).clamp_min(1)  # of the sum constraint
        free = (positive | (slope < per_row(multiplier, slope))).to(delta.dtype)
        return Face(free, free / per_row(flat(free).sum(1).clamp_min(1).sqrt(), free))

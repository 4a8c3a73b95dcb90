"""A probability simplex per sample."""

from dataclasses import dataclass

import torch
from torch import Tensor

from doubly.bilevel.face import Face, as_rows, flat

ON_FACE = 1e-6  # of the total: a coordinate below it counts as 0


@dataclass(frozen=True)
class Simplex:
    """delta >= 0 and the coordinates of each sample sum to `total`."""

    total: float = 1.0

    def __post_init__(self) -> None:
        if not self.total > 0:
            raise ValueError(f"total={self.total} is not allowed: total > 0")

    def project(self, delta: Tensor) -> Tensor:
        """The nearest point: max(delta - shift, 0) with the shift that gives the total, found by sorting."""
        rows = flat(delta) - flat(delta).amax(1, keepdim=True)  # the same point, and no total lost beside large numbers
        ordered = rows.sort(dim=1, descending=True).values
        counts = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
        shifts = (ordered.cumsum(1) - self.total) / counts
        kept = (ordered > shifts).sum(1, keepdim=True)  # how many coordinates stay positive
        return (rows - shifts.gather(1, (kept - 1).clamp_min(0))).clamp_min(0).view_as(delta)

    def at(self, fraction: Tensor) -> Tensor:
        """Uniform on the simplex, by exponential spacings of the draws."""
        numbers = torch.finfo(fraction.dtype)
        spacings = -fraction.clamp(numbers.tiny, 1 - numbers.eps).log()
        return self.total * spacings / as_rows(flat(spacings).sum(1), spacings)

    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """A coordinate is held at 0 where descent would push it below; the free ones keep their sum."""
        positive = delta > ON_FACE * self.total
        price = flat(slope * positive).sum(1) / flat(positive).sum(1).clamp_min(1)  # of the sum: its multiplier
        free = (positive | (slope < as_rows(price, slope))).to(delta.dtype)
        return Face(free, free / as_rows(flat(free).sum(1).clamp_min(1).sqrt(), free))

"""A box per sample, and the log-barrier that keeps delta inside it (eq. 7, Proposition 1).

The barrier's curvature is infinite on the faces, its inverse is 0 there: only the inverse is ever formed, without a
division by a slack.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from doubly.bilevel.face import Face, flat

ON_FACE = 1e-6  # of 1 + |bound|: nearer than this counts as on the bound


@dataclass(frozen=True, eq=False)
class Box:
    """lower <= delta <= upper, coordinate by coordinate, with barrier -strength * sum log(slacks)."""

    lower: Tensor  # a number stands for all coordinates
    upper: Tensor
    strength: float = 0.0  # c, of the log-barrier

    def __post_init__(self) -> None:
        numbers = [bound for bound in (self.lower, self.upper) if not isinstance(bound, Tensor)]
        if len(numbers) == 2 and not numbers[0] <= numbers[1]:
            raise ValueError(f"lower={self.lower} and upper={self.upper} leave nothing between: lower <= upper")
        for name in ("lower", "upper"):
            if not isinstance(getattr(self, name), Tensor):  # in float64, which yields to the dtype of delta
                object.__setattr__(self, name, torch.tensor(float(getattr(self, name)), dtype=torch.float64))

    def project(self, delta: Tensor) -> Tensor:
        return torch.clamp(delta, self.lower, self.upper)

    def at(self, fraction: Tensor) -> Tensor:
        """The point that divides each edge at `fraction` in [0,1]."""
        return self.lower + fraction * (self.upper - self.lower)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Uniform inside; drawn on the CPU, so the same on every device."""
        return self.at(torch.rand(self.lower.shape, generator=generator).to(self.lower))

    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """A coordinate is held on its bound where descent would push it across."""
        near_upper = delta >= self.upper - ON_FACE * (1 + self.upper.abs())
        near_lower = delta <= self.lower + ON_FACE * (1 + self.lower.abs())
        held = (near_upper & (slope < 0)) | (near_lower & (slope > 0))
        return Face((~held).to(delta.dtype))

    def shrunk(self, share: float) -> "Box":
        """The box with `share` of its width taken off at each face."""
        margin = share * (self.upper - self.lower)
        return replace(self, lower=self.lower + margin, upper=self.upper - margin)

    def slacks(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Room left above and below, never negative."""
        return (self.upper - delta).clamp_min(0), (delta - self.lower).clamp_min(0)

    def barrier(self, delta: Tensor) -> Tensor:
        """(B,): -strength * sum of the logarithms of all slacks; infinite on the faces."""
        above, below = self.slacks(delta)
        return -self.strength * flat(above.log() + below.log()).sum(1)

    def inverse_curvature(self, delta: Tensor, damping: float = 0.0) -> Tensor:
        """1 / (C + damping), C = strength * (1/above^2 + 1/below^2) the barrier's second derivative; 0 on the faces."""
        above, below = self.slacks(delta)
        product = (above * below).square()
        curvature = self.strength * (above.square() + below.square()) + damping * product
        return product / curvature.clamp_min(torch.finfo(delta.dtype).tiny)

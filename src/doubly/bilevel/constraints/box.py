"""A box for each sample, and the log-barrier that keeps delta inside it (eq. 7 and Proposition 1 of the paper).

The curvature of the barrier is infinite on the faces of the box, where its inverse is 0. Only the inverse is ever
formed, without a division by a slack.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, explained, fits, show
from doubly.bilevel.constraints.face import Face
from doubly.bilevel.rows import flat

BOUND_TOLERANCE = 1e-6  # distance, relative to 1 + |bound|, within which a coordinate counts as on its bound


@dataclass(frozen=True, eq=False)
class Box(Checked):
    """The constraint lower <= delta <= upper in each coordinate, with the barrier -strength * sum(log(slacks)).

    Args:
        lower: Lower bounds, of a shape that broadcasts with delta; a number holds for all coordinates.
        upper: Upper bounds, likewise.
        strength: Factor c of the log-barrier.

    Raises:
        TypeError: If a bound is neither a number nor a tensor.
        ValueError: If both bounds are numbers and `lower` is above `upper`.
    """

    lower: Tensor
    upper: Tensor
    strength: float = 0.0

    checks_itself: ClassVar[tuple[str, ...]] = ("lower", "upper")

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            bound = getattr(self, name)
            if not fits(bound, float) and not (isinstance(bound, Tensor) and bound.is_floating_point()):
                raise TypeError(f"{name} must be a number or a floating-point tensor, got {show(bound)}")
        numbers = [bound for bound in (self.lower, self.upper) if not isinstance(bound, Tensor)]
        if len(numbers) == 2 and not numbers[0] <= numbers[1]:
            raise ValueError(f"lower={self.lower} and upper={self.upper} leave nothing between: lower <= upper")
        for name in ("lower", "upper"):
            if not isinstance(getattr(self, name), Tensor):  # 0-dim float64, which is promoted to the dtype of delta
                object.__setattr__(self, name, torch.tensor(float(getattr(self, name)), dtype=torch.float64))

    @explained
    def project(self, delta: Tensor) -> Tensor:
        """Return the nearest point of the box, (B, ...); see `Constraint.project`."""
        return torch.clamp(delta, self.lower, self.upper)

    @explained
    def at(self, fraction: Tensor) -> Tensor:
        """Return the point that divides each edge of the box at `fraction` in [0, 1], (B, ...)."""
        return self.lower + fraction * (self.upper - self.lower)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw a uniformly distributed point, of the shape of `lower`.

        Args:
            generator: A generator of the CPU, so that the draws are the same on every device.

        Returns:
            The point, on the device of `lower`.
        """
        return self.at(torch.rand(self.lower.shape, generator=generator).to(self.lower))

    @explained
    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """Return the face on which each row of a minimizer lies.

        A coordinate is held on its bound where descent would push it across.

        Args:
            delta: The minimizers, (B, ...).
            slope: Gradients of the inner function there, (B, ...).
        """
        near_upper = delta >= self.upper - BOUND_TOLERANCE * (1 + self.upper.abs())
        near_lower = delta <= self.lower + BOUND_TOLERANCE * (1 + self.lower.abs())
        held = (near_upper & (slope < 0)) | (near_lower & (slope > 0))
        return Face((~held).to(delta.dtype))

    def shrunk(self, share: float) -> "Box":
        """Return the box without a margin of `share` times its width at each face."""
        margin = share * (self.upper - self.lower)
        return replace(self, lower=self.lower + margin, upper=self.upper - margin)

    @explained
    def slacks(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distances of `delta` to the upper and to the lower bounds, never negative, each (B, ...)."""
        return (self.upper - delta).clamp_min(0), (delta - self.lower).clamp_min(0)

    @explained
    def barrier(self, delta: Tensor) -> Tensor:
        """Return the barrier -strength * sum(log(slacks)) of each row of `delta`, (B,); infinite on the faces."""
        above, below = self.slacks(delta)
        return -self.strength * flat(above.log() + below.log()).sum(1)

    @explained
    def inverse_curvature(self, delta: Tensor, damping: float = 0.0) -> Tensor:
        """Return the inverse of the barrier's second derivative plus a damping term; it is 0 on the faces.

        Args:
            delta: The points, (B, ...).
            damping: Number added to the second derivative strength * (1 / above^2 + 1 / below^2).

        Returns:
            One number per coordinate, (B, ...).
        """
        above, below = self.slacks(delta)
        product = (above * below).square()
        curvature = self.strength * (above.square() + below.square()) + damping * product
        return product / curvature.clamp_min(torch.finfo(delta.dtype).tiny)

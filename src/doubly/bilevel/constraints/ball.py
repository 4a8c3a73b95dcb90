"""An l2 ball around 0 for each sample, optionally intersected with a box that contains 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, explained
from doubly.bilevel.constraints.box import Box
from doubly.bilevel.constraints.face import Face
from doubly.bilevel.constraints.radial import point_in_ball, smallest_fitting
from doubly.bilevel.rows import dot, flat, norms, per_row

SPHERE_TOLERANCE = 1e-6  # relative distance to the sphere within which a point counts as on it
BISECTIONS = 50  # enough for float64, where both ball and box bind


@dataclass(frozen=True, eq=False)
class Ball(Checked):
    """The constraint |delta|_2 <= radius, intersected with `box` if there is one.

    Args:
        radius: One number for all samples, or one per sample, (B,).
        box: A box that contains 0, or None.

    Raises:
        ValueError: If `radius` is a number that is not positive.
    """

    radius: float | Tensor
    box: Box | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.radius, Tensor) and not self.radius > 0:
            raise ValueError(f"radius={self.radius} is not allowed: radius > 0")

    @explained
    def project(self, delta: Tensor) -> Tensor:
        """Return the nearest point of the set, (B, ...); see `Constraint.project`.

        Where only the ball or only the box binds, that is the projection onto that set; where both do, it is
        clip(delta / factor) with the factor that gives the right norm, found by bisection.
        """
        lengths = norms(delta).clamp_min(torch.finfo(delta.dtype).tiny)
        excess = (lengths / self.radius).clamp_min(1)
        shrunk = delta / per_row(excess, delta)
        if self.box is None:
            return shrunk
        clipped = self.box.project(delta)
        box_only = norms(clipped) <= self.radius
        both = ~box_only & flat(self.box.project(shrunk) != shrunk).any(1)
        nearest = torch.where(per_row(box_only, delta), clipped, shrunk)
        if delta.device.type == "cpu" and not both.any():  # on another device the test would wait for the result
            return nearest
        box = self.box

        def shrunk_by(divisor: Tensor) -> Tensor:
            return box.project(delta / per_row(divisor, delta))

        divisor = smallest_fitting(
            torch.ones_like(excess), excess, lambda middle: norms(shrunk_by(middle)) > self.radius, BISECTIONS
        )
        return torch.where(per_row(both, delta), shrunk_by(divisor), nearest)

    @explained
    def at(self, fraction: Tensor) -> Tensor:
        """Return a point of the set from uniform draws in [0, 1], (B, ...); see `Constraint.at`."""
        return self.project(point_in_ball(fraction, self.radius, norms))

    @explained
    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """Return the face on which each row of a minimizer lies.

        A row on the sphere whose descent direction points outwards cannot move radially; its multiplier solves
        slope + multiplier * delta = 0 in the free coordinates.

        Args:
            delta: The minimizers, (B, ...).
            slope: Gradients of the inner function there, (B, ...).
        """
        free = None if self.box is None else self.box.face(delta, slope).free
        radial = delta if free is None else delta * free
        squares = dot(radial, radial).clamp_min(torch.finfo(delta.dtype).tiny)
        outward = -dot(slope, radial)
        on_sphere = norms(delta) >= (1 - SPHERE_TOLERANCE) * self.radius
        active = (on_sphere & (outward > 0)).to(delta.dtype)
        return Face(free, radial * per_row(active / squares.sqrt(), delta), active * outward / squares)

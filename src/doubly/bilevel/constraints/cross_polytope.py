"""An l1 ball around 0 for each sample, intersected with a box that contains 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

from doubly.bilevel.arguments import Checked, explained
from doubly.bilevel.constraints.box import Box
from doubly.bilevel.constraints.face import Face
from doubly.bilevel.constraints.radial import point_in_ball, smallest_fitting
from doubly.bilevel.rows import dot, flat, norms, per_row

FACE_TOLERANCE = 1e-6  # relative distance to the faces of the ball within which a point counts as on them
BISECTIONS = 60  # enough for float64


@dataclass(frozen=True, eq=False)
class CrossPolytope(Checked):
    """The constraint |delta|_1 <= radius, intersected with `box`.

    Args:
        radius: One number for all samples.
        box: A box that contains 0.

    Raises:
        ValueError: If `radius` is not positive.
    """

    radius: float
    box: Box

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ValueError(f"radius={self.radius} is not allowed: radius > 0")

    @explained
    def project(self, delta: Tensor) -> Tensor:
        """Return the nearest point of the set, (B, ...); see `Constraint.project`.

        It is clip(shrink(delta, t)) with the smallest t >= 0 that gives the right norm, found by bisection; shrink
        moves each coordinate by t towards 0.
        """
        clipped = self.box.project(delta)
        inside = _lengths(clipped) <= self.radius
        by = smallest_fitting(
            torch.zeros_like(_lengths(delta)),
            flat(delta).abs().amax(1),
            lambda middle: _lengths(self._shrunk(delta, middle)) > self.radius,
            BISECTIONS,
        )
        return torch.where(per_row(inside, delta), clipped, self._shrunk(delta, by))

    def _shrunk(self, delta: Tensor, by: Tensor) -> Tensor:
        return self.box.project(delta.sign() * (delta.abs() - per_row(by, delta)).clamp_min(0))

    @explained
    def at(self, fraction: Tensor) -> Tensor:
        """Return a point of the set from uniform draws in [0, 1], (B, ...); see `Constraint.at`."""
        return self.project(point_in_ball(fraction, self.radius, _lengths))

    @explained
    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """Return the face on which each row of a minimizer lies.

        On a face of the ball coordinates that are 0 stay 0, and the sum of the others, with their signs, is constant.
        The faces are flat, so they add no curvature.

        Args:
            delta: The minimizers, (B, ...).
            slope: Gradients of the inner function there, (B, ...).
        """
        free = self.box.face(delta, slope).free
        on_face = _lengths(delta) >= (1 - FACE_TOLERANCE) * self.radius
        active = per_row((on_face & (dot(slope, delta) < 0)).to(delta.dtype), delta)
        free = (1 - active) + active * (delta != 0) if free is None else free * ((1 - active) + active * (delta != 0))
        normal = active * free * delta.sign()
        return Face(free, normal / per_row(norms(normal).clamp_min(torch.finfo(delta.dtype).tiny), normal))


def _lengths(delta: Tensor) -> Tensor:
    return flat(delta).abs().sum(1)

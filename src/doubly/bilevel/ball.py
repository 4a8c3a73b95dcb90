"""An l2 ball per sample around 0, and one that is cut to a box that contains 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

from doubly.bilevel.box import Box
from doubly.bilevel.face import Face, as_rows, dot, flat

ON_FACE = 1e-6  # of the radius: nearer than this counts as on the sphere
BISECTIONS = 50  # of the factor where ball and box bind both: to rounding, in float64 as well


@dataclass(frozen=True, eq=False)
class Ball:
    """|delta|_2 <= radius, and delta in `box` if there is one."""

    radius: float | Tensor  # a number, or (B,)
    box: Box | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.radius, Tensor) and not self.radius > 0:
            raise ValueError(f"radius={self.radius} is not allowed: radius > 0")

    def project(self, delta: Tensor) -> Tensor:
        """The nearest point: where only one of ball and box binds, theirs; else the clipped one of the right length."""
        norms = flat(delta).norm(dim=1).clamp_min(torch.finfo(delta.dtype).tiny)
        excess = (norms / self.radius).clamp_min(1)
        shrunk = delta / as_rows(excess, delta)
        if self.box is None:
            return shrunk
        clipped = self.box.project(delta)
        near = flat(clipped).norm(dim=1) <= self.radius
        both = ~near & flat(self.box.project(shrunk) != shrunk).any(1)
        found = torch.where(as_rows(near, delta), clipped, shrunk)
        if delta.device.type == "cpu" and not both.any():  # another device would have to be waited for
            return found
        low, high = torch.ones_like(excess), excess  # clip(delta / factor) is too long at low, and not at high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            long = flat(self.box.project(delta / as_rows(middle, delta))).norm(dim=1) > self.radius
            low, high = torch.where(long, middle, low), torch.where(long, high, middle)
        return torch.where(as_rows(both, delta), self.box.project(delta / as_rows(high, delta)), found)

    def at(self, fraction: Tensor) -> Tensor:
        """A point inside from uniform draws: the direction they give from the center, at the radius of the first."""
        direction = 2 * fraction - 1
        norms = flat(direction).norm(dim=1).clamp_min(torch.finfo(fraction.dtype).tiny)
        length = self.radius * flat(fraction)[:, 0] / norms
        return self.project(direction * as_rows(length, direction))

    def face(self, delta: Tensor, slope: Tensor) -> Face:
        """On the sphere, where descent pushes outwards: no step along delta, and slope + multiplier * delta = 0."""
        free = None if self.box is None else self.box.face(delta, slope).free
        radial = delta if free is None else delta * free
        squares = dot(radial, radial).clamp_min(torch.finfo(delta.dtype).tiny)
        outward = -dot(slope, radial)
        on_sphere = flat(delta).norm(dim=1) >= (1 - ON_FACE) * self.radius
        active = (on_sphere & (outward > 0)).to(delta.dtype)
        return Face(free, radial * as_rows(active / squares.sqrt(), delta), active * outward / squares)

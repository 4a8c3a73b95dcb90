"""An l2 ball per sample around 0, cut to a box that contains 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

from doubly.bilevel.box import Box


@dataclass(frozen=True, eq=False)
class BoxedBall:
    """|delta|_2 <= radius and delta in box.

    `project` rescales, then clips: always feasible (clipping towards 0 shortens), and the nearest point where only
    one of the two binds.
    """

    radius: float
    box: Box

    def project(self, delta: Tensor) -> Tensor:
        norms = delta.flatten(1).norm(dim=1).clamp_min(torch.finfo(delta.dtype).tiny)
        scale = (self.radius / norms).clamp_max(1)
        return self.box.project(delta * scale.view(-1, *[1] * (delta.dim() - 1)))

    def at(self, fraction: Tensor) -> Tensor:
        """A point inside from uniform draws: the direction they give from the centre, at the radius of the first."""
        direction = 2 * fraction - 1
        norms = direction.flatten(1).norm(dim=1).clamp_min(torch.finfo(fraction.dtype).tiny)
        length = self.radius * fraction.flatten(1)[:, 0] / norms
        return self.project(direction * length.view(-1, *[1] * (fraction.dim() - 1)))

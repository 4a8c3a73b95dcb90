"""What the attacker may do: the set of perturbations allowed around each image, cut to the image range [0,1]."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from doubly.bilevel import Ball, Box, Constraint
from doubly.bilevel.rows import flat
from doubly.errors import UsageError


@runtime_checkable
class Threat(Protocol):
    def around(self, x: Tensor) -> Constraint: ...

    def scaled(self, share: float) -> "Threat":
        """The same threat with `share` of its radius."""
        ...


@dataclass(frozen=True)
class LinfBall:
    """|delta|_inf <= radius and x + delta in [0,1]; the paper's threat."""

    radius: float = 8 / 255
    """epsilon, a fraction of the image range"""
    barrier: float = 1e-6
    """c, strength of the log-barrier that DONE puts on this set (A6)"""

    def __post_init__(self) -> None:
        if not 0 < self.radius <= 1:
            raise UsageError(
                f"epsilon must lie in (0, 1], got {self.radius:g}: images are in [0,1], so 8 gray levels are 8/255"
            )
        if not self.barrier > 0:
            raise UsageError(f"the strength of the barrier must be positive, got {self.barrier:g}")

    def scaled(self, share: float) -> "LinfBall":
        return replace(self, radius=share * self.radius)

    def length(self, delta: Tensor) -> Tensor:
        """(B,), in the norm of the ball."""
        return flat(delta).norm(torch.inf, dim=1)  # type: ignore[no-any-return]

    def around(self, x: Tensor) -> Box:
        return Box((-x).clamp(min=-self.radius), (1 - x).clamp(max=self.radius), self.barrier)


@dataclass(frozen=True)
class L2Ball:
    """|delta|_2 <= radius and x + delta in [0,1]. No barrier: for evaluation, and training without implicit term."""

    radius: float = 0.5
    """epsilon, a fraction of the image range"""

    def __post_init__(self) -> None:
        if not 0 < self.radius < float("inf"):
            raise UsageError(f"epsilon must be positive and finite, got {self.radius:g}: 0.5 is usual on CIFAR-10")

    def scaled(self, share: float) -> "L2Ball":
        return replace(self, radius=share * self.radius)

    def length(self, delta: Tensor) -> Tensor:
        """(B,), in the norm of the ball."""
        return flat(delta).norm(2, dim=1)  # type: ignore[no-any-return]

    def around(self, x: Tensor) -> Ball:
        return Ball(self.radius, Box(-x, 1 - x))


NormBall = LinfBall | L2Ball  # what has a radius that an attack can be judged by
SLACK = 1e-6  # of rounding, of the radius and of the image range


def holds(ball: NormBall, delta: Tensor) -> Tensor:
    """Whether delta lies in the ball, but for rounding, (B,)."""
    return ball.length(delta) <= ball.radius * (1 + SLACK) + SLACK


def is_image(x: Tensor) -> Tensor:
    """Whether all pixels lie in [0,1], (B,); NaN does not."""
    rows = flat(x)
    return (rows.amin(1) >= 0) & (rows.amax(1) <= 1)


THREATS: dict[str, type] = {"linf": LinfBall, "l2": L2Ball}

"""Threats: the perturbations that an attacker may use around each image, within the image range [0, 1]."""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from doubly.bilevel import Ball, Box, Constraint, NormalizedStep, SignStep, SparseStep, StepRule
from doubly.bilevel.arguments import check_arguments
from doubly.bilevel.constraints import CrossPolytope
from doubly.bilevel.rows import flat
from doubly.errors import UsageError
from doubly.settings import Settings, explained
from doubly.text import parse_number

TOLERANCE = 1e-6  # for rounding, of the radius and of the image range


class Threat(Settings):
    """The perturbations that an attacker may use around an image, within the image range [0, 1].

    A subclass is a frozen dataclass. A new norm is one subclass in threat.py and one line in its table THREATS.
    """

    checks_itself: ClassVar[tuple[str, ...]] = ("radius",)
    norm: ClassVar[str]
    """name of the norm, as AutoAttack writes it"""
    max_radius: ClassVar[float] = float("inf")
    """largest radius that makes sense"""
    has_barrier: ClassVar[bool] = False
    """whether `box` returns the set with a log-barrier, which DONE's implicit term needs"""
    radius: float

    @explained
    def around(self, x: Tensor) -> Constraint:
        """Return the set of allowed perturbations of each image in `x`."""
        return self.between(-x, 1 - x)

    def between(self, lower: Tensor, upper: Tensor) -> Constraint:
        """Return the set of perturbations within the radius whose coordinates lie between two bounds.

        Args:
            lower: Lower bounds, (B, ...), at most 0.
            upper: Upper bounds, (B, ...), at least 0.
        """
        raise NotImplementedError

    def box(self, x: Tensor, factors: Tensor | None = None) -> Box:
        """Return the set of allowed perturbations of each image in `x` as a box with a log-barrier.

        Args:
            x: Images in [0, 1].
            factors: Factors of the radius, of a shape that broadcasts with `x`.

        Raises:
            UsageError: If the set is not a box.
        """
        raise UsageError(f"{type(self).__name__} is not a box and has no barrier: use LinfBall")

    def length(self, delta: Tensor) -> Tensor:
        """Return the norm of each perturbation in `delta`, (B,)."""
        raise NotImplementedError

    def step_rule(self, size: float) -> StepRule:
        """Return the usual attack step of this `size`: the steepest one in this norm."""
        raise NotImplementedError

    def unbounded(self, x: Tensor) -> Self:
        """Return the same threat with a radius that allows any image of the shape of those in `x`."""
        raise NotImplementedError

    def scaled(self, factor: float) -> Self:
        """Return the same threat with `factor` times the radius."""
        check_arguments(self.scaled, {"factor": factor}, UsageError)
        return replace(self, radius=factor * self.radius)  # type: ignore[type-var]  # subclasses are dataclasses

    def clip_gray_levels(self, levels: Tensor, clean: Tensor) -> Tensor:
        """Move attacked images in gray levels (0 to 255) back inside the threat, where rounding moved them out.

        Args:
            levels: Attacked images, rounded to whole gray levels.
            clean: The clean images in [0, 1].

        Returns:
            Whole gray levels inside the threat; unchanged where the threat cannot be kept exactly.
        """
        return levels


@dataclass(frozen=True)
class LinfBall(Threat):
    """An l-infinity ball: each pixel may change by at most `radius`. It is the threat of the paper.

    Raises:
        UsageError: If the radius is not in (0, 1] or the barrier is not positive.
    """

    radius: float = 8 / 255
    """epsilon, a fraction of the image range"""
    barrier: float = 1e-6
    """strength c of the log-barrier that DONE puts on this set; larger values keep attacks further from the faces"""

    norm: ClassVar[str] = "Linf"
    max_radius: ClassVar[float] = 1.0
    has_barrier: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", _radius(self.radius, "LinfBall(8 / 255)"))
        if not 0 < self.radius <= 1:
            raise UsageError(
                f"epsilon must lie in (0, 1], got {self.radius:g}: images are in [0,1], so 8 gray levels are 8/255"
            )
        if not self.barrier > 0:
            raise UsageError(f"the strength of the barrier must be positive, got {self.barrier:g}")

    @explained
    def between(self, lower: Tensor, upper: Tensor) -> Box:
        return Box(lower.clamp(min=-self.radius), upper.clamp(max=self.radius), self.barrier)

    @explained
    def box(self, x: Tensor, factors: Tensor | None = None) -> Box:
        if factors is None:
            return self.between(-x, 1 - x)
        radius = factors * self.radius
        return Box(torch.maximum(-x, -radius), torch.minimum(1 - x, radius), self.barrier)

    @explained
    def length(self, delta: Tensor) -> Tensor:
        return flat(delta).norm(torch.inf, dim=1)  # type: ignore[no-any-return]

    def step_rule(self, size: float) -> SignStep:
        return SignStep(size)

    @explained
    def unbounded(self, x: Tensor) -> Self:
        return replace(self, radius=1.0)

    @explained
    def clip_gray_levels(self, levels: Tensor, clean: Tensor) -> Tensor:
        tolerance = 1e-4  # of a gray level: 8/255 is eight levels in float32 as well
        low, high = (clean - self.radius) * 255, (clean + self.radius) * 255
        return torch.minimum(torch.maximum(levels, (low - tolerance).ceil()), (high + tolerance).floor())


@dataclass(frozen=True)
class L2Ball(Threat):
    """An l2 ball: the Euclidean length of the perturbation is at most `radius`.

    It has no barrier: for evaluation, and for training without DONE's implicit term.

    Raises:
        UsageError: If the radius is not positive and finite.
    """

    radius: float = 0.5
    """epsilon, a fraction of the image range"""

    norm: ClassVar[str] = "L2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", _radius(self.radius, "L2Ball(0.5)"))
        if not 0 < self.radius < float("inf"):
            raise UsageError(f"epsilon must be positive and finite, got {self.radius:g}: 0.5 is usual on CIFAR-10")

    @explained
    def between(self, lower: Tensor, upper: Tensor) -> Ball:
        return Ball(self.radius, Box(lower, upper))

    @explained
    def length(self, delta: Tensor) -> Tensor:
        return flat(delta).norm(2, dim=1)  # type: ignore[no-any-return]

    def step_rule(self, size: float) -> NormalizedStep:
        return NormalizedStep(size)

    @explained
    def unbounded(self, x: Tensor) -> Self:
        return replace(self, radius=math.sqrt(x[0].numel()))


@dataclass(frozen=True)
class L1Ball(Threat):
    """An l1 ball: the absolute changes of all pixels add up to at most `radius`.

    It has no barrier: for evaluation, and for training without DONE's implicit term.

    Raises:
        UsageError: If the radius is not positive and finite.
    """

    radius: float = 12.0
    """epsilon, a sum over pixels in [0, 1]"""

    norm: ClassVar[str] = "L1"

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", _radius(self.radius, "L1Ball(12)"))
        if not 0 < self.radius < float("inf"):
            raise UsageError(f"epsilon must be positive and finite, got {self.radius:g}: 12 is usual on CIFAR-10")

    @explained
    def between(self, lower: Tensor, upper: Tensor) -> CrossPolytope:
        return CrossPolytope(self.radius, Box(lower, upper))

    @explained
    def length(self, delta: Tensor) -> Tensor:
        return flat(delta).abs().sum(1)

    def step_rule(self, size: float) -> SparseStep:
        return SparseStep(size)

    @explained
    def unbounded(self, x: Tensor) -> Self:
        return replace(self, radius=float(x[0].numel()))


def _radius(value: Any, example: str) -> float:
    """Return a radius that may be written as text."""
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are real, too
        raise UsageError(f"the radius of a ball is a number, got {type(value).__name__}: write {example}")
    return float(value)


THREATS: dict[str, type[Threat]] = {"linf": LinfBall, "l2": L2Ball, "l1": L1Ball}


def check_threat(threat: Any, owner: str) -> None:
    """Check what an attack was given as its threat.

    Args:
        threat: What was given.
        owner: Name of the attack.

    Raises:
        UsageError: If it is not a threat; the message says how to write one.
    """
    if not isinstance(threat, Threat):
        ball = f"LinfBall({threat:g})" if isinstance(threat, Real) else "LinfBall(8 / 255)"
        raise UsageError(
            f"the first argument of {owner} is the threat, got {type(threat).__name__}: write {owner}({ball}), and "
            "pass the network when you call the attack, attack(model, x, y)"
        )


@explained
def is_inside(threat: Threat, delta: Tensor) -> Tensor:
    """Return whether each perturbation lies within the radius, up to rounding, (B,)."""
    return threat.length(delta) <= threat.radius * (1 + TOLERANCE) + TOLERANCE


@explained
def is_image(x: Tensor) -> Tensor:
    """Return whether all pixels of each image lie in [0, 1], (B,); NaN does not."""
    rows = flat(x)
    return (rows.amin(1) >= 0) & (rows.amax(1) <= 1)

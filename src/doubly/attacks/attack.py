"""The protocol of an attack, with its defaults."""

import warnings
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from doubly.bilevel import Box
from doubly.errors import UsageError
from doubly.seeding import AnyGenerator, BatchGenerator
from doubly.settings import Settings
from doubly.threat import Threat, check_threat


class Attack(Settings):
    """Finds a perturbation delta inside its threat that makes the network wrong.

    A subclass is a frozen dataclass with a field `threat`.
    """

    checks_itself: ClassVar[tuple[str, ...]] = ("threat", "rule")
    stays_inside: ClassVar[bool] = True
    """whether delta lies in the threat's set; an attack that leaves it is for training only"""
    may_leave: ClassVar[bool] = False
    """whether delta may lie outside all the same, as other libraries' may; the image then counts as not broken"""
    for_any_images: ClassVar[bool] = True
    """whether it can attack any images, and not only those that it was computed for"""
    threat: Threat

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Refuse a network in the place of the threat before the other arguments are looked at."""
        if arguments and isinstance(arguments[0], nn.Module):
            check_threat(arguments[0], cls.__name__)
        return super().__new__(cls, *arguments, **settings)

    @property
    def short_name(self) -> str | None:
        """The name of the attack in an evaluation that was given none; None: made from the name of its class."""
        return None

    @property
    def finds_radius(self) -> bool:
        """Whether it looks for the smallest perturbation of each image, whatever the radius of the threat."""
        return False

    def for_images(self, ids: Tensor, y: Tensor) -> "Attack":
        """Return the attack on particular images, for one that was computed elsewhere; by default itself.

        Args:
            ids: Positions of the images in their dataset, (B,).
            y: Their labels.

        Raises:
            UsageError: If it was computed for other images.
        """
        return self

    def covers(self, ids: Tensor) -> Tensor | None:
        """Return which images it attacks, (B,), by their positions in their dataset; None: all.

        Raises:
            UsageError: If it attacks none of them.
        """
        return None

    def describe(self) -> dict[str, Any] | None:
        """Return what the protocol of an evaluation says of it; None: its settings."""
        return None

    @property
    def weakness(self) -> str | None:
        """A sentence about settings that make the attack weaker than its threat allows; None if there are none."""
        return None

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        """Return delta for each image.

        Args:
            model: The network; it is left as it was found.
            x: Images in [0, 1].
            y: Their labels.
            generator: Random numbers for the start of the attack: a generator or a seed; None is seed 0.

        Returns:
            The perturbations, of the shape of `x`; `perturb` returns the attacked images.

        Raises:
            UsageError: If images, labels and logits do not fit each other.
            NonFiniteError: If the network returns NaN or infinity.
        """
        raise NotImplementedError

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        """Return the attacked images, in [0, 1]; arguments and errors are those of a call of the attack."""
        if self.weakness:
            warnings.warn(self.weakness, stacklevel=2)
        return (x + self(model, x, y, BatchGenerator.of(generator))).clamp(0, 1)

    @classmethod
    def for_evaluation(cls, reference: "Attack") -> "Attack":
        """Return this kind of attack as an evaluation runs it.

        Args:
            reference: The PGD attack of the evaluation, whose threat is used, and its settings where they apply.

        Returns:
            The attack within the threat of `reference`.
        """
        return cls(threat=reference.threat)  # a field of every subclass

    def box(self, x: Tensor, y: Tensor) -> Box:
        """Return the set of allowed perturbations of each image as a box with a log-barrier.

        Args:
            x: Images in [0, 1].
            y: Their labels, on which the radius may depend.

        Raises:
            UsageError: If the set is not a box.
        """
        return self.threat.box(x)

    def with_class_factors(self, factors: Tensor) -> "Attack":
        """Return the same attack with radii and step sizes that depend on the class.

        Args:
            factors: Factor of the radius and of the step size by class, (classes,), positive.

        Raises:
            UsageError: If the attack cannot do this.
        """
        raise UsageError(f"{type(self).__name__} has one radius for all classes: use PGD where classes have their own")

    def scaled(self, factor: float) -> Self:
        """Return the same attack within `factor` times the radius."""
        return replace(self, threat=self.threat.scaled(factor))  # type: ignore[type-var]

    def within(self, threat: Threat) -> Self:
        """Return the same attack within another threat; step sizes keep their ratio to the radius.

        Args:
            threat: What the attacker may do.

        Raises:
            UsageError: If the attack cannot stay within that threat.
        """
        return replace(self, threat=threat)  # type: ignore[type-var]

"""The settings of a repair and of a frontier."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from doubly.errors import UsageError
from doubly.settings import Settings

FitLoss = Literal["margin", "cross_entropy"]
FIRST_ATTACK = 5  # times as many steps for the first attack, which starts at random, as for each later one
MAX_ATTACK_STEPS = 100  # of each image, in the whole fit
Split = Literal["test", "validation"]
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0)
MAX_SCALE = 10.0
_COUNTS = ("rounds", "attack_steps", "steps", "images", "judge_images", "chunk_size")


@dataclass(frozen=True)
class RepairConfig(Settings):
    """The settings of a repair.

    Raises:
        UsageError: If a number is out of range, or two settings do not fit together.
    """

    checks_itself: ClassVar[tuple[str, ...]] = ("fit_on",)

    priority: float = 1.0
    """how far to go from the network as it is (0) to the fitted offsets (1)"""
    temperature: float = 0.2
    """R of the objective R log mean_c exp(error_c / R): a small one cares for the weakest class, a large one for all"""
    smoothing: float = 0.1
    """width of the smooth step from right to wrong, relative to the spread of the logit margins under attack"""
    step_size: float = 0.05
    """step of the offsets, relative to the same spread; it decays to 0"""
    rounds: int = 10
    """rounds of attack steps and steps of the offsets; the attack goes on from where it was"""
    attack_steps: int = 4
    """attack steps in each round, and five times as many before the first; at most 100 in all"""
    steps: int = 5
    """steps of the offsets in each round"""
    fit_on: FitLoss = "margin"
    """loss of the attack in the fit: margin, or cross_entropy"""
    implicit: bool = False
    """also differentiate through the attack, which takes second derivatives; with --fit-on cross_entropy only, since
    the slope of a margin does not depend on offsets"""
    fit_share: float = 0.5
    """share of the held-out images that the offsets are fitted on; the others judge the result"""
    images: int = 2000
    """most images to fit on, in the proportions of the classes"""
    judge_images: int = 2000
    """most images to judge on"""
    seed: int = 0
    """decides which images fit and which judge, and where attacks start"""
    chunk_size: int = 250
    """images that are attacked at a time"""

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 1:
            raise UsageError(
                f"priority lies in [0, 1], from the network as it is to the fitted offsets, got {self.priority:g}"
            )
        for name, symbol in (("temperature", " (R)"), ("smoothing", ""), ("step_size", "")):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UsageError(f"{name}{symbol} must be positive and finite, got {value:g}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.all_attack_steps > MAX_ATTACK_STEPS:
            raise UsageError(
                f"a fit takes at most {MAX_ATTACK_STEPS} attack steps, got {self.all_attack_steps}: lower rounds or "
                "attack_steps"
            )
        if self.fit_on not in get_args(FitLoss):
            raise UsageError(f"fit_on is one of {', '.join(get_args(FitLoss))}, got '{self.fit_on}'")
        if self.implicit and self.fit_on == "margin":
            raise UsageError(
                "the slope of a margin does not depend on offsets, so that its implicit term is 0: use fit_on "
                "cross_entropy, or leave implicit out"
            )
        if not 0 < self.fit_share < 1:
            raise UsageError(f"fit_share lies inside (0, 1), since the other images judge, got {self.fit_share:g}")

    @property
    def all_attack_steps(self) -> int:
        """Attack steps of each image in the whole fit."""
        return (FIRST_ATTACK + self.rounds) * self.attack_steps


@dataclass(frozen=True)
class FrontierConfig(Settings):
    """The settings of a frontier.

    Raises:
        UsageError: If a number is out of range, or the network as trained is not among the points.
    """

    checks_itself: ClassVar[tuple[str, ...]] = ("split",)

    scales: tuple[float, ...] = SCALES
    """factors of the fitted offsets, 0 among them; above 1 they go on beyond the fit"""
    attack: str = "margin"
    """attack under which average and tail are measured; a name from `doubly list attacks`"""
    split: Split = "test"
    """test images, or the held-out images that neither the method nor the fit used, to choose by; the run then needs
    data.driver_share"""
    images: int | None = 1000
    """number of these images, in the proportions of the classes; none: all"""
    skip_images: int = 0
    """number of images at the beginning of the set that are left out before"""
    eval_seed: int = 0
    """seed of the attack"""

    def __post_init__(self) -> None:
        if len(set(self.scales)) < 2 or 0.0 not in self.scales or not all(0 <= s <= MAX_SCALE for s in self.scales):
            raise UsageError(
                f"scales are at least two different numbers from 0 to {MAX_SCALE:g}, 0 among them, got {self.scales}"
            )
        if self.images is not None and self.images < 1:
            raise UsageError(f"images must be at least 1, or none for all, got {self.images}")
        if self.skip_images < 0:
            raise UsageError(f"skip_images must be at least 0, got {self.skip_images}")
        if self.split not in get_args(Split):
            raise UsageError(f"split is one of {', '.join(get_args(Split))}, got '{self.split}'")

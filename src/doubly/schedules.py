"""Values that change over training. A schedule maps the share of training done, in [0, 1), to a number."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from doubly.errors import UsageError
from doubly.settings import Settings


class Schedule(Settings):
    """A value over training; a subclass is a frozen dataclass."""

    boundaries: tuple[float, ...] = ()
    """shares of training at which the value jumps"""

    def at(self, progress: float) -> float:
        """Return the value at a share `progress` of training, in [0, 1)."""
        raise NotImplementedError

    def values_taken(self) -> Sequence[float]:
        """Return the values that the schedule takes, at every percent of training where they are not listed."""
        return [self.at(percent / 100) for percent in range(100)]

    def with_peak(self, value: float) -> Self:
        """Return the same schedule with `value` as its highest value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """A value that stays the same throughout training."""

    value: float = 0.1
    """the value"""

    def at(self, progress: float) -> float:
        return self.value

    def values_taken(self) -> Sequence[float]:
        return (self.value,)

    def with_peak(self, value: float) -> Self:
        return replace(self, value=value)


@dataclass(frozen=True)
class Piecewise(Schedule):
    """`values[k]` from share `boundaries[k-1]` of training on; shares fit any number of epochs.

    Raises:
        UsageError: If the number of boundaries does not fit, or a stage would never be reached.
    """

    values: tuple[float, ...] = (0.1, 0.01, 0.001)
    """one value per stage"""
    boundaries: tuple[float, ...] = (0.5, 0.75)
    """share of training at which each later stage begins"""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise UsageError(
                f"a piecewise schedule with {len(self.values)} values needs {len(self.values) - 1} boundaries, "
                f"got {len(self.boundaries)}: {self.boundaries}"
            )
        edges = (0.0, *self.boundaries, 1.0)
        if any(left >= right for left, right in pairwise(edges)):
            raise UsageError(
                f"boundaries {self.boundaries} leave a stage that is never reached: give rising shares inside (0, 1)"
            )

    def at(self, progress: float) -> float:
        return self.values[bisect_right(self.boundaries, progress)]

    def values_taken(self) -> Sequence[float]:
        return self.values

    def with_peak(self, value: float) -> Self:
        factor = value / max(self.values)
        return replace(self, values=tuple(factor * old for old in self.values))


@dataclass(frozen=True)
class Cyclic(Schedule):
    """Linear from 0 up to `peak` at share `turn` of training, then linear down to 0; it changes in every step.

    Raises:
        UsageError: If `turn` does not lie inside (0, 1).
    """

    peak: float = 0.2
    """highest value"""
    turn: float = 0.4
    """share of training at which the peak is reached"""

    def __post_init__(self) -> None:
        if not 0 < self.turn < 1:
            raise UsageError(f"a cyclic schedule turns inside (0, 1), got turn={self.turn}: give a share of training")

    def at(self, progress: float) -> float:
        return self.peak * min(progress / self.turn, (1 - progress) / (1 - self.turn))

    def with_peak(self, value: float) -> Self:
        return replace(self, peak=value)


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "piecewise": Piecewise, "cyclic": Cyclic}

"""Values that change over training, as data. Each maps progress in [0,1) to a number."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from doubly.errors import UsageError


@runtime_checkable
class Schedule(Protocol):
    def at(self, progress: float) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same value all along."""

    value: float = 0.1

    def at(self, progress: float) -> float:
        return self.value


@dataclass(frozen=True)
class Piecewise:
    """`values[k]` from share `boundaries[k-1]` of training on; shares fit any number of epochs."""

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


@dataclass(frozen=True)
class Cyclic:
    """Linear from 0 up to `peak` at share `turn` of training, then linear down to 0, per iteration (A15)."""

    peak: float = 0.2
    """highest value"""
    turn: float = 0.4
    """share of training at which the peak is reached"""

    def __post_init__(self) -> None:
        if not 0 < self.turn < 1:
            raise UsageError(f"a cyclic schedule turns inside (0, 1), got turn={self.turn}")

    def at(self, progress: float) -> float:
        return self.peak * min(progress / self.turn, (1 - progress) / (1 - self.turn))


SCHEDULES: dict[str, type] = {"constant": Constant, "piecewise": Piecewise, "cyclic": Cyclic}

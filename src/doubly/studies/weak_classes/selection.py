"""How the study chooses on part B of the held-out images, and how methods are compared on the test images."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from doubly.evaluation.intervals import (
    Interval,
    Statistic,
    average_accuracy,
    paired_seed_difference,
    tail_accuracy,
    worst_accuracy,
)
from doubly.studies.weak_classes.measured_job import Measured

WITHIN = 0.01  # of the best average: candidates that lose more are not eligible
STATISTICS: dict[str, Statistic] = {"average": average_accuracy, "tail": tail_accuracy, "worst": worst_accuracy}


class Candidate(NamedTuple):
    """A network as trained (scale 0) or repaired (scale 1), with its accuracy under attack on part B.

    Attributes:
        trial: Number of the trial.
        scale: Factor of the class offsets.
        average: Average.
        tail: Tail.
    """

    trial: int
    scale: float
    average: float
    tail: float


def candidates(measured: Mapping[int, Sequence[Measured]]) -> list[Candidate]:
    """Return all trials at all scales; each is the mean over its measurements, one per seed."""
    return [
        Candidate(trial, scale, *(_mean(parts, scale, STATISTICS[name]) for name in ("average", "tail")))
        for trial, parts in measured.items()
        for scale in parts[0].scales
    ]


def choose(options: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the highest tail among those whose average is within one point of the best."""
    best = max(option.average for option in options)
    return max((o for o in options if o.average >= best - WITHIN), key=lambda option: option.tail)


def paired_difference(
    first: Sequence[Measured],
    second: Sequence[Measured],
    scales: tuple[float, float],
    statistic: str,
    resamples: int = 2000,
) -> Interval:
    """Return the difference of two methods, mean over their seeds, with a 95 % interval; see `paired_seed_difference`.

    Args:
        first: Measurements of the first method, one per seed.
        second: Those of the second with the same seeds.
        scales: Factors of the class offsets of the first and of the second.
        statistic: average, tail or worst.
        resamples: Number of resamples.
    """
    a, b = (np.stack([one.at(scale) for one in parts]) for parts, scale in zip((first, second), scales, strict=True))
    return paired_seed_difference(a, b, first[0].y, STATISTICS[statistic], resamples)


def mean_and_sd(parts: Sequence[Measured], scale: float, statistic: str) -> tuple[float, float | None]:
    """Return mean and standard deviation over seeds of clean, average, tail or worst; no deviation of one seed."""
    rows = [part.clean[part.scales.index(scale)] if statistic == "clean" else part.at(scale) for part in parts]
    compute = average_accuracy if statistic == "clean" else STATISTICS[statistic]
    values = [compute(row, part.y) for row, part in zip(rows, parts, strict=True)]
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _mean(parts: Sequence[Measured], scale: float, statistic: Statistic) -> float:
    return float(np.mean([statistic(part.at(scale), part.y) for part in parts]))

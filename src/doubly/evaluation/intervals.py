"""How sure an accuracy is: Wilson's interval for a share, and bootstrap intervals for anything else.

The bootstrap resamples within each class, as the test set is stratified, and a difference resamples the same images for
both models. A tail picks its classes anew in each resample: the interval includes the uncertainty of that choice.
"""

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from doubly.errors import UsageError
from doubly.evaluation.metrics import Bools, Ints, per_class, tail, worst_class

Statistic = Callable[[Bools, Ints], float]


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def average_accuracy(correct: Bools, y: Ints) -> float:
    return float(correct.mean())


def tail_accuracy(correct: Bools, y: Ints) -> float:
    return tail(per_class(correct, y, int(y.max()) + 1))[0]


def worst_accuracy(correct: Bools, y: Ints) -> float:
    return worst_class(per_class(correct, y, int(y.max()) + 1))[1]


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval: the shares p for which successes/n lies within z standard errors of p."""
    if not 0 <= successes <= n:
        raise UsageError(f"{successes} successes of {n}: give a count between 0 and n")
    if n == 0:
        return 0.0, 1.0
    share, z = successes / n, NormalDist().inv_cdf((1 + _checked(level)) / 2)
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap(
    correct: Bools, y: Ints, statistic: Statistic, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile interval of `statistic`."""
    values = [statistic(correct[index], y) for index in _resampled(y, resamples, seed)]
    return _interval(statistic(correct, y), values, level)


def bootstrap_difference(
    correct_a: Bools,
    correct_b: Bools,
    y: Ints,
    statistic: Statistic,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile interval of statistic(a) - statistic(b), paired: both are measured on the same resampled images."""

    def difference(index: Ints | slice) -> float:
        return statistic(correct_a[index], y) - statistic(correct_b[index], y)

    return _interval(difference(slice(None)), [difference(i) for i in _resampled(y, resamples, seed)], level)


def _resampled(y: Ints, resamples: int, seed: int) -> Iterator[Ints]:
    """Positions drawn with replacement, each from the class of the sample it stands for: the labels stay `y`."""
    if resamples < 1 or not len(y) or seed < 0:
        raise UsageError(
            f"{resamples} resamples of {len(y)} samples with seed {seed}: give at least one of each, and a seed >= 0"
        )
    generator = np.random.default_rng(seed)
    by_class = np.argsort(y, kind="stable")
    counts = np.bincount(y)
    first, count = (np.cumsum(counts) - counts)[y], counts[y]
    for _ in range(resamples):
        yield by_class[first + (generator.random(len(y)) * count).astype(np.int64)]


def _interval(value: float, resampled: list[float], level: float) -> Interval:
    outside = (1 - _checked(level)) / 2
    low, high = np.quantile(resampled, [outside, 1 - outside])
    return Interval(value, float(low), float(high))


def _checked(level: float) -> float:
    if not 0 < level < 1:
        raise UsageError(f"the level of an interval lies inside (0, 1), got {level}: use 0.95")
    return level

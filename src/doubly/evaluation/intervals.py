"""Confidence intervals: Wilson's for an accuracy, the bootstrap for any other statistic of the samples.

The bootstrap resamples within each class, since test sets are stratified. A difference of two models resamples the same
images for both. The tail selects its classes again in each resample, so its interval includes that uncertainty.
"""

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from doubly.bilevel.arguments import check_arguments, fits, show
from doubly.errors import UsageError
from doubly.evaluation.metrics import Bools, Ints, per_class, tail, worst_class
from doubly.settings import explained

Statistic = Callable[[Bools, Ints], float]  # whether each sample is correct, labels -> a number


class Interval(NamedTuple):
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


def average_accuracy(correct: Bools, y: Ints) -> float:
    """Return the share of correct samples."""
    return float(correct.mean())


def tail_accuracy(correct: Bools, y: Ints) -> float:
    """Return the mean accuracy of the weakest 30 % of the classes."""
    return tail(per_class(correct, y, int(y.max()) + 1))[0]


def worst_accuracy(correct: Bools, y: Ints) -> float:
    """Return the accuracy of the weakest class."""
    return worst_class(per_class(correct, y, int(y.max()) + 1))[1]


@explained
def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval: the shares p for which successes / n lies within z standard errors of p.

    Args:
        successes: Number of successes.
        n: Number of trials; without any the interval is (0, 1).
        level: Confidence level.

    Raises:
        UsageError: If the count is not between 0 and n, or the level not inside (0, 1).
    """
    if not 0 <= successes <= n:
        raise UsageError(f"{successes} successes of {n}: give a count between 0 and n")
    if n == 0:
        return 0.0, 1.0
    share, z = successes / n, NormalDist().inv_cdf((1 + _checked_level(level)) / 2)
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap(
    correct: Bools, y: Ints, statistic: Statistic, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Return the percentile interval of a statistic.

    Args:
        correct: Whether each sample is correct, (n,).
        y: Labels, (n,).
        statistic: What to compute of each resample.
        resamples: Number of resamples.
        seed: Seed of the resampling.
        level: Confidence level.

    Raises:
        UsageError: If there are no samples or resamples, or a number is out of range.
    """
    values = [statistic(correct[index], y) for index in resampled_positions(y, resamples, seed)]
    return _percentile_interval(statistic(correct, y), values, level)


def weakest_interval(
    correct: Bools, y: Ints, statistic: Statistic, classes: Ints | int, resamples: int = 1000
) -> Interval:
    """Return a 95 % interval of a statistic that selects the weakest classes, such as the tail accuracy.

    The weakest classes of a sample look weaker than they are, and those of a resample weaker still. The basic
    bootstrap, which mirrors the distances from the value, corrects for that. The interval is extended where needed to
    contain Wilson's interval for the samples of the classes that were selected.

    Args:
        correct: Whether each sample is correct, (n,).
        y: Labels, (n,).
        statistic: The statistic, which selects its classes again in each resample.
        classes: The classes that it selects on the samples as they are.
        resamples: Number of resamples.
    """
    value, low, high = bootstrap(correct, y, statistic, resamples)
    among = np.isin(y, classes)
    fixed_low, fixed_high = wilson(int(correct[among].sum()), int(among.sum()))
    return Interval(
        value, max(0.0, min(value, 2 * value - high, fixed_low)), min(1.0, max(value, 2 * value - low, fixed_high))
    )


def bootstrap_difference(
    correct_a: Bools,
    correct_b: Bools,
    y: Ints,
    statistic: Statistic,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Return the percentile interval of statistic(a) - statistic(b), both computed on the same resampled images.

    Args:
        correct_a: Whether each sample is correct under the first model, (n,).
        correct_b: The same under the second model, (n,).
        y: Labels, (n,).
        statistic: What to compute of each resample.
        resamples: Number of resamples.
        seed: Seed of the resampling.
        level: Confidence level.

    Raises:
        UsageError: If there are no samples or resamples, or a number is out of range.
    """

    for name, given, kinds in (("correct_a", correct_a, "biu"), ("correct_b", correct_b, "biu"), ("y", y, "iu")):
        if not isinstance(given, np.ndarray) or given.shape != np.shape(y) or given.dtype.kind not in kinds:
            raise UsageError(f"{name} must be an array with one entry per sample, got {show(given)}: see help")
    if len(y) and y.min() < 0:
        raise UsageError(f"labels are class numbers from 0, got {y.min()}: subtract the smallest")
    settings = {"statistic": statistic, "level": level, "resamples": resamples, "seed": seed}
    check_arguments(bootstrap_difference, settings, UsageError)

    def difference(index: Ints | slice) -> float:
        first, second = statistic(correct_a[index], y), statistic(correct_b[index], y)
        if not fits(first, float) or not fits(second, float):
            raise UsageError(f"statistic(correct, y) must return a number, got {show(first)}")
        return first - second

    values = [difference(index) for index in resampled_positions(y, resamples, seed)]
    return _percentile_interval(difference(slice(None)), values, level)


def paired_seed_difference(
    first: Bools, second: Bools, y: Ints, statistic: Statistic, resamples: int = 2000
) -> Interval:
    """Return the mean difference of two methods over seeds, with a 95 % percentile interval.

    Each resample draws images, the same for both methods and all seeds, and pairs of networks of the same seed, so that
    the interval covers other images and other seeds.

    Args:
        first: Whether each network of the first method predicts each image correctly, (seeds, n).
        second: The same for the second method.
        y: Labels, (n,).
        statistic: What to compute of each network.
        resamples: Number of resamples.
    """
    generator, seeds = np.random.default_rng(0), len(first)

    def difference(images: Ints | slice, networks: Ints) -> float:
        pairs = [(first[seed, images], second[seed, images]) for seed in networks]
        return float(np.mean([statistic(a, y) - statistic(b, y) for a, b in pairs]))

    values = [
        difference(images, generator.integers(0, seeds, seeds)) for images in resampled_positions(y, resamples, 0)
    ]
    return _percentile_interval(difference(slice(None), np.arange(seeds)), values, 0.95)


@explained
def resampled_positions(y: Ints, resamples: int, seed: int) -> Iterator[Ints]:
    """Yield positions drawn with replacement, each from the class of the sample that it replaces: labels stay `y`.

    Args:
        y: Labels, (n,).
        resamples: Number of resamples.
        seed: Seed of the resampling.

    Raises:
        UsageError: If there are no samples or resamples, or the seed is negative.
    """
    if resamples < 1 or not len(y) or seed < 0:
        raise UsageError(
            f"{resamples} resamples of {len(y)} samples with seed {seed}: give at least one of each, and a seed >= 0"
        )
    generator = np.random.default_rng(seed)
    by_class = np.argsort(y, kind="stable")
    counts = np.bincount(y)
    start, count = (np.cumsum(counts) - counts)[y], counts[y]
    for _ in range(resamples):
        yield by_class[start + (generator.random(len(y)) * count).astype(np.int64)]


def _percentile_interval(value: float, resampled: list[float], level: float) -> Interval:
    outside = (1 - _checked_level(level)) / 2
    low, high = np.quantile(resampled, [outside, 1 - outside])
    return Interval(value, float(low), float(high))


def _checked_level(level: float) -> float:
    if not 0 < level < 1:
        raise UsageError(f"the level of an interval lies inside (0, 1), got {level}: use 0.95")
    return level

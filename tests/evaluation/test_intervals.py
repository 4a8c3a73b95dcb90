"""Intervals against scipy, closed forms, and their coverage in simulations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from doubly.errors import UsageError
from doubly.evaluation.intervals import (
    average_accuracy,
    bootstrap,
    bootstrap_difference,
    tail_accuracy,
    weakest_interval,
    wilson,
    worst_accuracy,
)
from doubly.evaluation.metrics import per_class, tail
from doubly.evaluation.result import EvalResult


def samples(seed=0, n=400, classes=10, accuracy=0.7):
    generator = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return y, generator.random(n) < accuracy


def result(y, correct):
    classes = int(y.max()) + 1
    predictions = {"clean": y, "pgd": np.where(correct, y, (y + 1) % classes)}
    return EvalResult(y, tuple(map(str, range(classes))), predictions)


def test_wilson_is_scipys():
    for successes, n in ((0, 10), (10, 10), (3, 10), (50, 100), (359, 360)):
        for level in (0.9, 0.95):
            expected = binomtest(successes, n).proportion_ci(level, method="wilson")
            assert wilson(successes, n, level) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.5, 0.999))
def test_wilson_contains_the_share_and_is_symmetric(hits, misses, level):
    n = hits + misses
    low, high = wilson(hits, n, level)
    assert 0 <= low <= high <= 1 and (not n or low - 1e-12 <= hits / n <= high + 1e-12)
    assert wilson(misses, n, level) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_the_interval_of_the_average_has_its_closed_form_width():
    y, correct = samples(n=4000, classes=1)
    value, low, high = bootstrap(correct, y, average_accuracy)
    error = np.sqrt(value * (1 - value) / 4000)
    assert value == correct.mean()
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.06)


def test_resampling_stays_within_the_classes():
    y = np.repeat([0, 1], [5, 50])
    assert bootstrap(y == 1, y, average_accuracy, resamples=50) == (50 / 55,) * 3  # no class varies in itself


def test_pairing_removes_what_both_models_share():
    y, correct = samples()
    other = correct.copy()
    other[:20] = False
    paired = bootstrap_difference(correct, other, y, average_accuracy)
    unpaired = bootstrap(correct, y, average_accuracy)
    assert paired.value == pytest.approx(correct.mean() - other.mean())
    assert paired.high - paired.low < 0.7 * (unpaired.high - unpaired.low)
    assert bootstrap_difference(correct, correct, y, tail_accuracy, resamples=20) == (0, 0, 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=25), st.integers(0, 1000))
@settings(max_examples=30)
def test_a_difference_resamples_the_same_images_for_both(labels, seed):
    y = np.array(labels)
    a, b = np.random.default_rng(seed).random((2, len(y))) < 0.5
    drawn = []

    def record(correct, labels):
        drawn.append(correct)
        return 0.0

    bootstrap_difference(np.arange(len(y)), np.arange(len(y)), y, record, resamples=5, seed=seed)
    pairs = list(zip(drawn[:10:2], drawn[1:10:2], strict=True))
    assert all(np.array_equal(one, other) and np.array_equal(y[one], y) for one, other in pairs)
    values = [a[one].mean() - b[other].mean() for one, other in pairs]
    interval = bootstrap_difference(a, b, y, average_accuracy, resamples=5, seed=seed)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))


def test_coverage_of_the_difference():
    covered = 0
    for trial in range(200):
        y, a = samples(trial, n=200, accuracy=0.75)
        _, b = samples(trial + 10_000, n=200, accuracy=0.6)
        _, low, high = bootstrap_difference(a, b, y, average_accuracy, resamples=200, seed=trial)
        covered += low <= 0.15 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_the_worst_class_of_classes_that_differ_is_covered():
    accuracies, y, covered = np.linspace(0.2, 0.9, 8), np.repeat(np.arange(8), 60), 0
    for trial in range(60):
        correct = np.random.default_rng(trial).random(480) < accuracies[y]
        value, low, high = bootstrap(correct, y, worst_accuracy, resamples=100, seed=trial)
        covered += low <= 0.2 <= high
        assert value == min(correct[y == label].mean() for label in range(8))
    assert covered >= 52


def test_equal_seeds_give_equal_intervals():
    y, correct = samples()
    one, again, other = (bootstrap(correct, y, tail_accuracy, resamples=50, seed=s) for s in (1, 1, 2))
    assert one == again != other


def test_the_weakest_of_classes_that_do_not_vary_have_wilsons_interval():
    y = np.repeat(np.arange(4), 25)
    for of in ("tail", "worst"):
        for correct in (False, True):
            interval = result(y, np.full(100, correct)).interval("pgd", of)
            assert interval == (float(correct), *wilson(25 * correct, 25))


def test_the_interval_of_the_weakest_classes_mirrors_the_resamples_and_contains_wilsons():
    """The resamples look weaker than the sample, so that their own interval would lie too low."""
    y = np.repeat(np.arange(10), 100)
    correct = np.random.default_rng(0).random(1000) < 0.6
    weakest = tail(per_class(correct, y, 10))[1]
    among = np.isin(y, weakest)
    value, low, high = bootstrap(correct, y, tail_accuracy, 300)
    wilson_low, wilson_high = wilson(int(correct[among].sum()), int(among.sum()))
    assert low < wilson_low < 2 * value - high and high < wilson_high < 2 * value - low
    assert weakest_interval(correct, y, tail_accuracy, weakest, 300) == (value, wilson_low, 2 * value - low)


def test_the_interval_of_the_weakest_classes_contains_its_value():
    """Where the classes differ, and where they are equal."""
    y = np.repeat(np.arange(10), 40)
    differing = result(y, np.tile(np.arange(40), 10) < 4 * y + 2)
    equal = result(np.repeat(np.arange(20), 10), np.tile(np.arange(10), 20) < 7)
    for of in ("tail", "worst"):
        for interval in (differing.interval("pgd", of, 300), equal.interval("pgd", of, 300)):
            assert interval.low <= interval.value <= interval.high
        assert 0.01 < differing.interval("pgd", of, 300).high - differing.interval("pgd", of, 300).low < 0.3
    assert differing.interval("pgd", "worst", 300).value == 0.05 != differing.interval("pgd", "tail", 300).value


def test_the_interval_of_equally_hard_classes_covers_the_truth():
    """Not always: the bootstrap removes most of the bias of selecting the weakest, not all of it."""
    y = np.repeat(np.arange(10), 100)
    for of in ("tail", "worst"):
        covered = 0
        for trial in range(30):
            interval = result(y, np.random.default_rng(trial).random(1000) < 0.5).interval("pgd", of, 100)
            covered += interval.low <= 0.5 <= interval.high
        assert covered >= 20


def test_refusals():
    y, correct = samples()
    for call, message in (
        (lambda: wilson(5, 4), "between 0 and n"),
        (lambda: wilson(1, 4, level=1), "inside"),
        (lambda: bootstrap(correct, y, average_accuracy, resamples=0), "at least one of each"),
        (lambda: bootstrap(correct, y, average_accuracy, resamples=2, level=95), "use 0.95"),
        (lambda: bootstrap_difference(correct, correct, y, lambda *_: None), "must return a number, got None"),
        (lambda: bootstrap_difference(correct, correct, y - 9, average_accuracy), "class numbers from 0, got -"),
        (lambda: result(y, correct).interval("pgd", "median", 5), "average, tail or worst, got 'median'"),
    ):
        with pytest.raises(UsageError, match=message):
            call()

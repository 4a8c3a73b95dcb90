import time

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
    wilson,
    worst_accuracy,
)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (3, 10), (50, 100), (359, 360)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_wilson_matches_scipy(successes, n, level):
    expected = binomtest(successes, n).proportion_ci(level, method="wilson")
    assert wilson(successes, n, level) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_no_samples_say_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


def samples(seed=0, n=400, classes=10, accuracy=0.7):
    generator = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return y, generator.random(n) < accuracy


def test_the_average_has_its_closed_form_width():
    y, correct = samples(n=4000, classes=1)
    value, low, high = bootstrap(correct, y, average_accuracy)
    error = np.sqrt(value * (1 - value) / 4000)
    assert value == correct.mean()
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.06)


def test_resampling_stays_within_the_classes():
    y = np.repeat([0, 1], [5, 50])
    assert bootstrap(y == 1, y, average_accuracy, resamples=50) == (50 / 55,) * 3  # no class varies in itself


def test_pairing_takes_out_what_both_share():
    y, correct = samples()
    other = correct.copy()
    other[:20] = False
    paired = bootstrap_difference(correct, other, y, average_accuracy)
    alone = bootstrap(correct, y, average_accuracy)
    assert paired.value == pytest.approx(correct.mean() - other.mean())
    assert paired.high - paired.low < 0.7 * (alone.high - alone.low)
    assert bootstrap_difference(correct, correct, y, tail_accuracy, resamples=20) == (0, 0, 0)


def test_coverage_of_the_difference():
    covered = 0
    for trial in range(200):
        y, a = samples(trial, n=200, accuracy=0.75)
        _, b = samples(trial + 10_000, n=200, accuracy=0.6)
        _, low, high = bootstrap_difference(a, b, y, average_accuracy, resamples=200, seed=trial)
        covered += low <= 0.15 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_equal_seeds_give_equal_intervals():
    y, correct = samples()
    first, again, other = (bootstrap(correct, y, tail_accuracy, resamples=50, seed=s) for s in (1, 1, 2))
    assert first == again != other


def test_digits_take_less_than_two_seconds():
    y, correct = samples(n=1797)
    start = time.perf_counter()
    bootstrap_difference(correct, ~correct, y, tail_accuracy)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: wilson(5, 4),
        lambda: wilson(1, 4, level=1),
        lambda: bootstrap(*reversed(samples()), average_accuracy, resamples=0),
        lambda: bootstrap(*reversed(samples()), average_accuracy, resamples=2, level=95),
    ],
)
def test_wrong_input_is_said(wrong):
    with pytest.raises(UsageError):
        wrong()


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.5, 0.999))
def test_wilson_holds_the_share_and_mirrors(hits, misses, level):
    n = hits + misses
    low, high = wilson(hits, n, level)
    assert 0 <= low <= high <= 1 and (not n or low - 1e-12 <= hits / n <= high + 1e-12)
    assert wilson(misses, n, level) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=25), st.integers(0, 1000))
@settings(max_examples=30)
def test_a_difference_is_that_of_resamples_of_the_same_images(labels, seed):
    y = np.array(labels)
    a, b = np.random.default_rng(seed).random((2, len(y))) < 0.5
    drawn = []

    def recorded(correct, labels):
        drawn.append(correct)
        return 0.0

    bootstrap_difference(np.arange(len(y)), np.arange(len(y)), y, recorded, resamples=5, seed=seed)
    pairs = list(zip(drawn[2::2], drawn[3::2], strict=True))
    assert all(np.array_equal(one, other) and np.array_equal(y[one], y) for one, other in pairs)
    values = [a[one].mean() - b[other].mean() for one, other in pairs]
    found = bootstrap_difference(a, b, y, average_accuracy, resamples=5, seed=seed)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))


def test_the_worst_class_of_classes_that_differ_is_covered():
    accuracies, y, covered = np.linspace(0.2, 0.9, 8), np.repeat(np.arange(8), 60), 0
    for trial in range(60):
        correct = np.random.default_rng(trial).random(480) < accuracies[y]
        value, low, high = bootstrap(correct, y, worst_accuracy, resamples=100, seed=trial)
        covered += low <= 0.2 <= high
        assert value == min(correct[y == label].mean() for label in range(8))
    assert covered >= 52

import time

import numpy as np
import pytest
from scipy.stats import binomtest

from doubly.errors import UsageError
from doubly.evaluation.intervals import average_accuracy, bootstrap, bootstrap_difference, tail_accuracy, wilson


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

"""KL weights against their definition and scipy."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from doubly.errors import UsageError
from doubly.evaluation.result import EvalResult
from doubly.evaluation.weights import KLWeights

ROWS = st.lists(st.floats(0, 20), min_size=1, max_size=40).map(np.array)
TEMPERATURES = st.floats(0.05, 50)


def weights(losses, r=1.0, normalize="all", batch=128, y=None, classes=1, accuracies=None):
    y = np.zeros(len(losses), dtype=int) if y is None else y
    return KLWeights.of(losses, y, np.zeros(classes) if accuracies is None else accuracies, r, normalize, batch)


@given(ROWS, TEMPERATURES)
def test_they_attain_the_worst_case_of_kl_dro(losses, r):
    result, n = weights(losses, r).weights, len(losses)
    divergence = np.sum(result * np.log(np.maximum(n * result, 1e-300)))
    shifted = losses / r - losses.max() / r
    assert result @ losses - r * divergence == pytest.approx(
        losses.max() + r * np.log(np.exp(shifted).mean()), abs=1e-6
    )
    assert (np.diff(result[losses.argsort()]) >= 0).all()  # a larger loss never has a smaller weight


@given(ROWS, TEMPERATURES, st.floats(-30, 30))
def test_only_differences_of_losses_count(losses, r, offset):
    np.testing.assert_allclose(weights(losses, r).weights, weights(losses + offset, r).weights, rtol=1e-6, atol=1e-12)


@given(ROWS, TEMPERATURES, st.integers(1, 50))
def test_normalizations_add_up(losses, r, batch):
    n = len(losses)
    assert weights(losses, r).weights.sum() == pytest.approx(1)
    assert weights(losses, r, "mean_one").weights.mean() == pytest.approx(1)
    assert weights(losses, r, "batch", batch).weights.sum() == pytest.approx(max(1, round(n / batch)))
    np.testing.assert_allclose(weights(losses, r, "batch", n + batch).weights, weights(losses, r).weights, rtol=1e-12)
    assert (weights(losses, r, "batch", 1).weights == 1).all()


def test_a_large_r_gives_equal_weights_and_a_small_r_only_the_largest_loss():
    losses = np.array([0.0, 1.0, 3.0])
    np.testing.assert_allclose(weights(losses, 1e9).weights, 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(weights(losses, 1e-3).weights, [0, 0, 1])
    assert weights(losses, 1.0).weights == pytest.approx(np.exp(losses) / np.exp(losses).sum())


def test_batches_mix_the_classes_and_are_always_the_same():
    y = np.repeat([0, 1], 64)
    result, again = (weights(np.where(y == 1, 5.0, 0.0), 1.0, "batch", 64, y, 2) for _ in range(2))
    np.testing.assert_array_equal(result.weights, again.weights)
    light, heavy = result.mean_per_class()
    assert heavy / light == pytest.approx(np.exp(5), rel=0.2)  # of a sorted set in its own order it would be 1


def test_shares_and_means_are_those_of_each_class():
    y = np.array([0, 0, 1, 1, 1, 3])
    result = KLWeights(np.array([0.001, 0.0011, 0.5, 0.0, 0.002, 0.0]), y, np.zeros(4), 1.0, "all", 128)
    assert result.above() == 3 / 6 and result.above(0.4) == 1 / 6
    np.testing.assert_array_equal(result.above_per_class(), [1 / 2, 2 / 3, np.nan, 0])
    np.testing.assert_allclose(result.mean_per_class(), [0.00105, 0.502 / 3, np.nan, 0], rtol=1e-12)


def test_quantiles_are_those_of_each_class():
    """The quantiles of 0, 1, …, 20 are known; between two weights they are interpolated."""
    y, shuffled = np.repeat([0, 2], [21, 2]), np.random.default_rng(0).permutation(np.arange(21.0))
    result = KLWeights(np.array([*shuffled, 1.0, 3.0]), y, np.zeros(3), 1.0, "all", 9)
    even, empty, two = result.quantiles_per_class()
    assert even == pytest.approx([1, 5, 10, 15, 19]) and empty is None and two == pytest.approx([1.1, 1.5, 2, 2.5, 2.9])


def test_the_correlation_is_that_of_the_class_means():
    generator = np.random.default_rng(0)
    y, accuracies = np.repeat(np.arange(6), 10), generator.random(7)
    accuracies[6] = np.nan
    result = weights(generator.random(60) * 4 - 3 * accuracies[y], 0.7, "all", y=y, accuracies=accuracies)
    means = np.array([result.weights[y == label].mean() for label in range(6)])
    expected = np.corrcoef(means, accuracies[:6])[0, 1]
    assert result.correlation()["pearson"] == pytest.approx(expected) and expected < -0.5
    assert result.correlation()["spearman"] == pytest.approx(spearmanr(means, accuracies[:6])[0])


def test_what_does_not_vary_has_no_correlation():
    """Also where means differ by rounding only, and whatever is left for the last batch."""
    two, three, ten = np.array([0, 0, 1, 1]), np.repeat([0, 1, 2], [3, 7, 11]), np.arange(150) % 10
    for losses, y, accuracies, normalize in (
        ([1.0] * 4, two, [0.0, 1.0], "all"),
        ([1.0, 2.0, 3.0, 4.0], two, [0.5, 0.5], "all"),
        ([1.0] * 4, two, [0.0, np.nan], "all"),
        (np.full(21, np.log(3)), three, [1.0, 0.0, 0.0], "batch"),
        (np.full(150, np.log(10)), ten, (ten[:10] == 0).astype(float), "batch"),
    ):
        result = weights(np.array(losses), normalize=normalize, y=y, accuracies=np.array(accuracies))
        assert result.correlation() == {"pearson": None, "spearman": None}


def test_the_summary_has_plain_numbers_and_names_r_and_the_normalization():
    y = np.array([0, 0, 2])
    result = EvalResult(y, ("a", "b", "c"), {"clean": y, "pgd": 0 * y}, losses={"pgd": np.array([0.1, 0.2, 9.0])})
    one = result.weights(0.5, "all")
    summary = one.summary(result.names)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert (summary["r"], summary["normalize"], "batch" in summary) == (0.5, "all", False)
    assert summary["above_0.001_per_class"] == {"a": 0.0, "b": None, "c": 1.0} and summary["above_0.001"] == 1 / 3
    assert summary["correlation_with_class_accuracy"]["pearson"] == pytest.approx(-1)
    quantiles = summary["quantiles_per_class"]
    assert quantiles["b"] is None and quantiles["c"] == [one.weights[2]] * 5
    assert quantiles["a"] == np.quantile(one.weights[:2], [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()
    kinds = [(part["r"], part["normalize"], part["batch"]) for part in result.summary()["weights"]]
    assert kinds == [(10.0, "batch", 128), (1.0, "batch", 128), (0.1, "batch", 128)]


def test_refusals():
    for settings, message in (
        ({"r": 0.0}, "r must be positive"),
        ({"r": -1.0}, "r must be positive"),
        ({"r": float("nan")}, "r must be positive"),
        ({"batch": 0}, "batch at least 1"),
        ({"normalize": "none"}, "batch, all, mean_one, got 'none'"),
    ):
        with pytest.raises(UsageError, match=message):
            weights(np.ones(3), **settings)

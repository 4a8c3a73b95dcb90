"""Accuracies per class, the tail and the confusion matrix, against scikit-learn and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, recall_score

from doubly.errors import UsageError
from doubly.evaluation.metrics import confusion, distinct_names, per_class, tail, worst_class


def test_accuracy_per_class_and_confusion_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    y = generator.integers(0, 7, 500)
    predictions = np.where(generator.random(500) < 0.6, y, generator.integers(0, 7, 500))
    recall = recall_score(y, predictions, average=None)
    np.testing.assert_allclose(per_class(predictions == y, y, 7), recall, rtol=1e-12)
    counts = confusion(predictions, y, 8)
    np.testing.assert_array_equal(counts, confusion_matrix(y, predictions, labels=range(8)))
    assert counts.dtype == np.int64


def test_confusion_of_small_integer_types_does_not_overflow():
    y = np.full(3, 99, dtype=np.uint8)
    assert confusion(y, y, 100)[99, 99] == 3


def test_the_tail_has_the_number_of_classes_that_share_and_rounding_say():
    """43 is the number of traffic signs; 0.07 of 100 is 7 in spite of floating point."""
    for classes, share, rounding, expected in (
        (1, 0.3, "round", 1),
        (2, 0.3, "floor", 1),
        (5, 0.3, "round", 2),
        (5, 0.5, "round", 3),  # a half is rounded up, also to an odd number
        (10, 0.3, "ceil", 3),
        (10, 0.3, "floor", 3),
        (10, 0.3, "round", 3),
        (43, 0.3, "round", 13),
        (43, 0.3, "floor", 12),
        (43, 0.3, "ceil", 13),
        (100, 0.07, "round", 7),
        (100, 0.07, "floor", 7),
        (100, 0.07, "ceil", 7),
    ):
        weakest = tail(np.linspace(1, 0, classes), share, rounding)[1]
        assert len(weakest) == expected, (classes, share, rounding)


def test_the_tail_is_the_mean_of_the_weakest_classes_weakest_first():
    value, weakest = tail(np.array([0.9, 0.2, 0.8, 0.1, 0.6, 0.5, 0.9, 0.9, 0.9, 0.9]))
    assert value == pytest.approx((0.1 + 0.2 + 0.5) / 3) and weakest.tolist() == [3, 1, 5]


def test_of_equally_weak_classes_the_lower_index_comes_first():
    assert tail(np.array([0.5] * 10))[1].tolist() == [0, 1, 2]
    assert worst_class(np.array([0.5, 0.2, 0.2])) == (1, 0.2)


def test_classes_without_samples_are_left_out():
    accuracies = per_class(np.array([True, False, True]), np.array([0, 2, 2]), 4)
    np.testing.assert_array_equal(accuracies, [1.0, np.nan, 0.5, np.nan])
    value, weakest = tail(accuracies)
    assert (value, weakest.tolist(), worst_class(accuracies)) == (0.5, [2], (2, 0.5))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0.01, 1))
def test_the_tail_lies_between_the_worst_class_and_the_mean(values, share):
    accuracies = np.array(values)
    value, weakest = tail(accuracies, share)
    assert worst_class(accuracies)[1] - 1e-9 <= value <= accuracies.mean() + 1e-9
    assert len(set(weakest.tolist())) == len(weakest) >= 1


def test_names_become_distinct_and_keep_their_beginning():
    for names in (["a", "a"], ["a", "a", "a (1)"], ["", "", ""], ["x", "y"]):
        distinct = distinct_names(names)
        assert len(set(distinct)) == len(names)
        assert all(new.startswith(old) for new, old in zip(distinct, names, strict=True))
    assert distinct_names(["sign", "sign"]) == ["sign (0)", "sign (1)"]


def test_refusals():
    for call, message in (
        (lambda: tail(np.array([0.5]), share=0.0), "a share of the classes"),
        (lambda: tail(np.array([0.5]), share=1.1), "a share of the classes"),
        (lambda: tail(np.array([0.5]), rounding="up"), "unknown rounding 'up'"),
        (lambda: tail(np.array([np.nan])), "no class has a sample"),
        (lambda: worst_class(np.array([])), "no class has a sample"),
        (lambda: per_class(np.array([True]), np.array([3]), 3), "labels range from 3 to 3"),
        (lambda: confusion(np.array([-1]), np.array([0]), 3), "predictions range from -1 to -1"),
        (lambda: confusion(np.array([0, 1]), np.array([0]), 3), "one value per label"),
    ):
        with pytest.raises(UsageError, match=message):
            call()

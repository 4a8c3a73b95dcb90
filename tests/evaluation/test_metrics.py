import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, recall_score

from doubly.errors import UsageError
from doubly.evaluation.metrics import confusion, per_class, tail, worst_class


@pytest.fixture
def labels():
    generator = np.random.default_rng(0)
    y = generator.integers(0, 7, 500)
    return y, np.where(generator.random(500) < 0.6, y, generator.integers(0, 7, 500))


def test_per_class_is_recall(labels):
    y, predictions = labels
    np.testing.assert_allclose(
        per_class(predictions == y, y, 7), recall_score(y, predictions, average=None), rtol=1e-12
    )


def test_confusion_matches_scikit_learn(labels):
    y, predictions = labels
    ours = confusion(predictions, y, 8)
    np.testing.assert_array_equal(ours, confusion_matrix(y, predictions, labels=range(8)))
    assert ours[7].sum() == 0 and ours.dtype == np.int64


def test_confusion_of_small_integer_types_does_not_overflow():
    y = np.full(3, 99, dtype=np.uint8)
    assert confusion(y, y, 100)[99, 99] == 3


@pytest.mark.parametrize(
    ("classes", "rounding", "expected"),
    [(1, "round", 1), (2, "floor", 1), (5, "round", 2), (10, "ceil", 3), (10, "floor", 3), (10, "round", 3)],
)
def test_tail_takes_so_many_classes(classes, rounding, expected):
    assert len(tail(np.linspace(1, 0, classes), rounding=rounding)[1]) == expected


@pytest.mark.parametrize(("rounding", "expected"), [("round", 13), ("floor", 12), ("ceil", 13)])
def test_tail_of_the_traffic_signs(rounding, expected):
    assert len(tail(np.linspace(1, 0, 43), rounding=rounding)[1]) == expected
    assert len(tail(np.linspace(1, 0, 100), share=0.07, rounding=rounding)[1]) == 7


def test_tail_is_the_mean_of_the_lowest_weakest_first():
    value, picked = tail(np.array([0.9, 0.2, 0.8, 0.1, 0.6, 0.5, 0.9, 0.9, 0.9, 0.9]))
    assert value == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert picked.tolist() == [3, 1, 5]


def test_ties_go_to_the_lower_index():
    assert tail(np.array([0.5] * 10))[1].tolist() == [0, 1, 2]
    assert worst_class(np.array([0.5, 0.2, 0.2])) == (1, 0.2)


def test_classes_without_samples_are_left_out():
    accuracies = per_class(np.array([True, False, True]), np.array([0, 2, 2]), 4)
    np.testing.assert_array_equal(accuracies, [1.0, np.nan, 0.5, np.nan])
    value, picked = tail(accuracies)
    assert (value, picked.tolist(), worst_class(accuracies)) == (0.5, [2], (2, 0.5))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0.01, 1))
def test_tail_lies_between_the_worst_class_and_the_mean(values, share):
    accuracies = np.array(values)
    value, picked = tail(accuracies, share)
    assert worst_class(accuracies)[1] - 1e-9 <= value <= accuracies.mean() + 1e-9
    assert len(set(picked.tolist())) == len(picked) >= 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: tail(np.array([0.5]), share=0.0),
        lambda: tail(np.array([0.5]), share=1.1),
        lambda: tail(np.array([0.5]), rounding="up"),
        lambda: tail(np.array([np.nan])),
        lambda: worst_class(np.array([])),
        lambda: per_class(np.array([True]), np.array([3]), 3),
        lambda: confusion(np.array([-1]), np.array([0]), 3),
        lambda: confusion(np.array([0, 1]), np.array([0]), 3),
    ],
)
def test_wrong_input_is_said(wrong):
    with pytest.raises(UsageError):
        wrong()

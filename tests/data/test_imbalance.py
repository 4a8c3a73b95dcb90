import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubly.data import ExponentialImbalance, StepImbalance
from doubly.errors import UsageError

both = pytest.mark.parametrize("kind", [StepImbalance, ExponentialImbalance])
CIFAR10 = torch.arange(10).repeat(5000)


def counts(imbalance, y, classes=10):
    return torch.bincount(y[imbalance.keep(y, classes)], minlength=classes).tolist()


def test_step_on_cifar10():
    assert counts(StepImbalance(), CIFAR10) == [1000] * 5 + [5000] * 5


def test_step_takes_a_share_of_each_class_of_svhn():
    sizes = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    y = torch.arange(10).repeat_interleave(torch.tensor(sizes))
    assert counts(StepImbalance(), y) == [989, 2772, 2117, 1699, 1491, *sizes[5:]]


def test_step_takes_at_most_a_share_of_the_largest_class_of_svhn():
    y = torch.arange(10).repeat_interleave(torch.tensor([494, 1386, 1058, 849, 745, 688, 572, 559, 504, 100]))
    found = counts(StepImbalance(0.4, of="largest"), y)
    assert found == [494, 554, 554, 554, 554, 688, 572, 559, 504, 100]  # 0.4 * 1386 = 554.4


def test_exponential_on_cifar10():
    expected = [1000, 1195, 1429, 1709, 2044, 2445, 2924, 3496, 4181, 5000]
    assert counts(ExponentialImbalance(), CIFAR10) == expected


def test_the_middle_class_of_an_odd_number_is_untouched():
    y = torch.arange(3).repeat(10)
    assert counts(StepImbalance(0.5), y, 3) == [5, 10, 10]


def test_rounding_does_not_lose_an_image():
    assert counts(StepImbalance(0.29), torch.arange(2).repeat(100), 2) == [29, 100]  # 0.29 * 100 = 28.999…


def test_a_smaller_ratio_keeps_a_part_of_the_larger():
    y = torch.arange(4).repeat(50)
    few, many = (set(StepImbalance(ratio).keep(y, 4).tolist()) for ratio in (0.2, 0.6))
    assert few < many


@both
@given(sizes=st.lists(st.integers(20, 60), min_size=2, max_size=8), ratio=st.floats(0.05, 1.0), seed=st.integers(0, 3))
def test_counts_lie_between_ratio_and_all(kind, sizes, ratio, seed):
    shuffled = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[shuffled]
    kept = kind(ratio, seed).keep(y, len(sizes))
    assert torch.equal(kept, kept.unique())
    for count, size in zip(torch.bincount(y[kept]).tolist(), sizes, strict=True):
        assert max(1, ratio * size - 1) <= count <= size
    assert (y[kept] == len(sizes) - 1).sum() == sizes[-1]


@both
@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, float("nan")])
def test_refuses_ratios(kind, ratio):
    with pytest.raises(UsageError, match="ratio"):
        kind(ratio)


@both
def test_refuses_a_class_without_images(kind):
    with pytest.raises(UsageError, match="class 1 has no images"):
        kind().keep(torch.tensor([0, 0, 2, 2]), 3)


def test_small_classes():
    y = torch.arange(4).repeat(3)
    assert counts(StepImbalance(0.01), y, 4) == [1, 1, 3, 3]
    with pytest.raises(UsageError, match="no image of class 0"):
        ExponentialImbalance(0.01).keep(y, 4)

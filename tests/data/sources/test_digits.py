import pytest
import torch

from doubly.data import Digits
from doubly.errors import UsageError


def test_the_folds_test_every_image_once():
    tests = [Digits(fold).load().test for fold in range(5)]
    assert torch.equal(torch.cat([test.ids for test in tests]).sort().values, torch.arange(1797))
    assert max(map(len, tests)) - min(map(len, tests)) <= 1


def test_train_is_the_rest_in_the_same_proportions():
    splits = Digits(fold=3).load()
    assert set(splits.train.ids.tolist()) | set(splits.test.ids.tolist()) == set(range(1797))
    assert len(splits.train) + len(splits.test) == 1797
    assert (splits.train.counts() - 4 * splits.test.counts()).abs().max() <= 4
    assert splits.train.classes == tuple("0123456789")


def test_gray_levels_fill_the_byte_range():
    x = Digits().load().train.x
    assert x.shape[1:] == (1, 8, 8)
    assert set(x.unique().tolist()) == {round(level * 255 / 16) for level in range(17)}


def test_folds_that_do_not_exist_are_refused():
    for fold, folds in ((5, 5), (-1, 5), (0, 1)):
        with pytest.raises(UsageError, match="folds"):
            Digits(fold, folds)

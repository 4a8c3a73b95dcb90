"""Every entry of DATASETS, IMBALANCES and AUGMENTATIONS keeps its promises."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import doubly.data
from doubly.data import AUGMENTATIONS, DATASETS, IMBALANCES, Augmentation, DataSource, Imbalance

TABLES = {"load": (DATASETS, DataSource), "keep": (IMBALANCES, Imbalance), "__call__": (AUGMENTATIONS, Augmentation)}


def is_value(thing):
    return "__dataclass_params__" in vars(thing)


@pytest.mark.parametrize("method", TABLES)
def test_every_value_in_the_folder_is_listed(method):
    found = set()
    for module in pkgutil.iter_modules(doubly.data.__path__):
        for _, thing in inspect.getmembers(importlib.import_module(f"doubly.data.{module.name}"), inspect.isclass):
            if is_value(thing) and method in vars(thing) and thing.__module__.startswith("doubly.data"):
                found.add(thing)
    table, protocol = TABLES[method]
    assert found == set(table.values())
    for kind in table.values():
        assert isinstance(kind(), protocol)
        assert kind() == kind() and kind.__dataclass_params__.frozen


@pytest.mark.parametrize("name", DATASETS)
def test_dataset(name):
    splits, again = DATASETS[name]().load(None), DATASETS[name]().load(None)
    for images, same in ((splits.train, again.train), (splits.test, again.test)):
        assert images.x.dtype is torch.uint8 and images.x.ndim == 4
        assert images.y.dtype is torch.int64 and images.y.shape == images.ids.shape == (len(images.x),)
        assert images.counts().shape == (len(images.classes),) and images.counts().all()
        assert images.sha256() == same.sha256()
        assert torch.equal(images.ids, same.ids) and len(images.ids.unique()) == len(images)
    assert splits.train.sha256() != splits.test.sha256()
    _, std = splits.train.channel_statistics()
    assert len(std) == splits.train.x.shape[1] and min(std) > 0


def test_what_changes_nothing():
    y, x = torch.tensor([2, 0, 1, 2]), torch.rand(4, 1, 3, 3)
    assert torch.equal(IMBALANCES["balanced"]().keep(y, 3), torch.arange(4))
    assert torch.equal(AUGMENTATIONS["unchanged"]()(x, torch.Generator().manual_seed(0)), x)


@pytest.mark.parametrize("name", sorted(IMBALANCES.keys() - {"balanced"}))
def test_imbalance(name):
    y = torch.arange(10).repeat_interleave(100)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    kept = IMBALANCES[name](ratio=0.2).keep(y, 10)
    assert torch.equal(kept, kept.unique())
    counts = torch.bincount(y[kept], minlength=10)
    assert counts[0] == 20 and counts[-1] == 100 and (counts.diff() >= 0).all()
    assert torch.equal(kept, IMBALANCES[name](ratio=0.2).keep(y, 10))
    assert not torch.equal(kept, IMBALANCES[name](ratio=0.2, seed=1).keep(y, 10))
    assert torch.equal(IMBALANCES[name](ratio=1.0).keep(y, 10), torch.arange(1000))


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS.keys() - {"unchanged"}))
def test_augmentation(name):
    x, before = torch.rand(16, 3, 9, 11), torch.get_rng_state()
    original = x.clone()
    augmented = AUGMENTATIONS[name]()(x, torch.Generator().manual_seed(0))
    assert augmented.shape == x.shape and augmented.dtype is x.dtype
    assert augmented.min() >= 0 and augmented.max() <= 1
    assert not torch.equal(augmented, x)
    assert torch.equal(x, original) and torch.equal(torch.get_rng_state(), before)
    assert torch.equal(augmented, AUGMENTATIONS[name]()(x, torch.Generator().manual_seed(0)))
    assert not torch.equal(augmented, AUGMENTATIONS[name]()(x, torch.Generator().manual_seed(1)))

"""Every entry of DATASETS, IMBALANCES and AUGMENTATIONS keeps its promises."""

import importlib
import inspect
import pkgutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import dataset_writers as write
import doubly.data
from doubly.data import AUGMENTATIONS, DATASETS, IMBALANCES, Augmentation, DataSource, ImageFolder, Imbalance, TarShards
from doubly.data.download.published import PUBLISHED
from doubly.errors import UsageError
from doubly.seeding import BatchGenerator

FIELDS = {"folder": ImageFolder("folder"), "tar": TarShards("tar")}  # where the defaults name no files
TABLES = {"load": (DATASETS, DataSource), "keep": (IMBALANCES, Imbalance), "__call__": (AUGMENTATIONS, Augmentation)}


def numbers(seed):
    return BatchGenerator(torch.Generator().manual_seed(seed))


def is_value(thing):
    return "__dataclass_params__" in vars(thing)


@pytest.mark.parametrize("method", TABLES)
def test_every_value_in_the_folder_is_listed(method):
    result = set()
    for module in pkgutil.walk_packages(doubly.data.__path__, "doubly.data."):
        for _, thing in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if is_value(thing) and method in vars(thing) and thing.__module__.startswith("doubly.data"):
                result.add(thing)
    table, protocol = TABLES[method]
    assert result == set(table.values())
    for kind in table.values():
        assert isinstance(kind(), protocol)
        assert kind() == kind() and kind.__dataclass_params__.frozen


def write_everything(folder):
    def part(seed, n, shape=(3, 32, 32), classes=10):
        random = np.random.default_rng(seed)
        return random.integers(256, size=(n, *shape), dtype=np.uint8), np.arange(n) % classes

    def sign(seed, label, track):
        return SimpleNamespace(pixels=part(seed, 1, (3, 20, 24))[0][0], label=label, track=track, number=0)

    write.cifar10_python(folder, [part(number, 10) for number in range(5)], part(9, 10))
    write.cifar100_python(folder, part(0, 100, classes=100), part(1, 100, classes=100))
    write.svhn(folder, part(0, 20), part(1, 10))
    write.stl10(folder, part(0, 20, (3, 96, 96)), part(1, 10, (3, 96, 96)))
    write.gtsrb_original(
        folder, [sign(k, k % 43, k // 43) for k in range(86)], [sign(100 + k, k, 0) for k in range(43)]
    )
    for name in ("mnist", "fashion_mnist"):
        write.mnist(folder, part(0, 20, (1, 28, 28)), part(1, 10, (1, 28, 28)), folder=name)
    (x, y), (x_test, y_test) = part(0, 20), part(1, 10)
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / "folder" / str(label % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(place / f"{number}.png")
    write.tar_shard(folder / "tar" / "train-000.tar", x, y)
    write.tar_shard(folder / "tar" / "test-000.tar", x_test, y_test)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with small files of every dataset, in its original format."""
    folder = tmp_path_factory.mktemp("originals")
    write_everything(folder)
    return folder


@pytest.mark.parametrize("name", DATASETS)
def test_dataset(name, root):
    source = FIELDS.get(name, DATASETS[name]())
    splits, again = source.load(root), source.load(root)
    for images, other in ((splits.train, again.train), (splits.test, again.test)):
        assert images.x.dtype is torch.uint8 and images.x.ndim == 4
        assert images.y.dtype is torch.int64 and images.y.shape == images.ids.shape == (len(images.x),)
        assert images.counts().shape == (len(images.classes),) and images.counts().sum() == len(images)
        assert images.sha256() == other.sha256()
        assert torch.equal(images.ids, other.ids) and len(images.ids.unique()) == len(images)
    assert splits.train.sha256() != splits.test.sha256()
    assert bool(splits.note) is (name in PUBLISHED)  # so few images are never the published set
    _, std = splits.train.channel_statistics()
    assert len(std) == splits.train.x.shape[1] and min(std) > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dataset_that_is_not_there_says_how_to_get_it(name, tmp_path):
    with pytest.raises(UsageError, match=rf"(?s){name} needs .* is missing: fetch it with `doubly data fetch {name}"):
        DATASETS[name]().load(tmp_path)


def test_what_changes_nothing():
    y, x = torch.tensor([2, 0, 1, 2]), torch.rand(4, 1, 3, 3)
    assert torch.equal(IMBALANCES["balanced"]().keep(y, 3), torch.arange(4))
    assert torch.equal(AUGMENTATIONS["unchanged"]()(x, numbers(0)), x)


@pytest.mark.parametrize("name", sorted(IMBALANCES.keys() - {"balanced", "selected"}))
def test_imbalance(name):
    y = torch.arange(10).repeat_interleave(100)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    indices = IMBALANCES[name](ratio=0.2).keep(y, 10)
    assert torch.equal(indices, indices.unique())
    counts = torch.bincount(y[indices], minlength=10)
    assert counts[0] == 20 and counts[-1] == 100 and (counts.diff() >= 0).all()
    assert torch.equal(indices, IMBALANCES[name](ratio=0.2).keep(y, 10))
    assert not torch.equal(indices, IMBALANCES[name](ratio=0.2, seed=1).keep(y, 10))
    assert torch.equal(IMBALANCES[name](ratio=1.0).keep(y, 10), torch.arange(1000))


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS.keys() - {"unchanged"}))
def test_augmentation(name):
    x, before = torch.rand(16, 3, 9, 11), torch.get_rng_state()
    original = x.clone()
    augmented = AUGMENTATIONS[name]()(x, numbers(0))
    assert augmented.shape == x.shape and augmented.dtype is x.dtype
    assert augmented.min() >= 0 and augmented.max() <= 1
    assert not torch.equal(augmented, x)
    assert torch.equal(x, original) and torch.equal(torch.get_rng_state(), before)
    assert torch.equal(augmented, AUGMENTATIONS[name]()(x, numbers(0)))
    assert not torch.equal(augmented, AUGMENTATIONS[name]()(x, numbers(1)))

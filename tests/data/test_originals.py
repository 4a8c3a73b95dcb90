import contextlib
import csv
import gzip
import pickle
import re
import runpy
import subprocess
import sys
import warnings
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from doubly.data import CIFAR10, CIFAR100, GTSRB, MNIST, STL10, SVHN, FashionMNIST
from doubly.data.files import content, data_folder, md5
from doubly.data.holdout import holdout
from doubly.data.pickles import read_batch
from doubly.data.published import PUBLISHED
from doubly.errors import UsageError

write = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "originals.py")))

zipped = partial(gzip.compress, mtime=0)  # the same bytes whenever it is asked: they are part of a test's name


def part(seed, n, shape=(3, 32, 32), classes=10):
    """Noise, so that no two axes look alike; the labels begin with the lowest and the highest."""
    random = np.random.default_rng(seed)
    y = random.integers(classes, size=n)
    y[:2] = 0, classes - 1
    return random.integers(256, size=(n, *shape), dtype=np.uint8), y


BATCHES, TEST = [part(number, 4) for number in range(5)], part(9, 3)
HUNDRED, HUNDRED_TEST = part(10, 12, classes=100), part(11, 3, classes=100)
LARGE, LARGE_TEST = part(12, 3, (3, 96, 96)), part(13, 2, (3, 96, 96))
GRAY, GRAY_TEST = part(14, 5, (1, 28, 28)), part(15, 3, (1, 28, 28))


def sign(seed, label, track=0, number=0, size=(32, 32)):
    return write.Frame(np.random.default_rng(seed).integers(256, size=(3, *size), dtype=np.uint8), label, track, number)


# Two frames of each sign, and a second sign of the first two classes.
FRAMES = [sign(2 * k + n, k, 0, n) for k in range(43) for n in (0, 1)] + [
    sign(100 + 2 * k + n, k, 1, n) for k in (0, 1) for n in (0, 1)
]
SIGNS = sorted(FRAMES, key=lambda frame: frame[1:])
SIGNS_TEST = [sign(200 + k, label) for k, label in enumerate((16, 0, 42))]

FORMATS = {
    "cifar10 python": (CIFAR10(), lambda root: write.cifar10_python(root, BATCHES, TEST)),
    "cifar10 binary": (CIFAR10(), lambda root: write.cifar10_binary(root, BATCHES, TEST)),
    "cifar100 python": (CIFAR100(), lambda root: write.cifar100_python(root, HUNDRED, HUNDRED_TEST)),
    "cifar100 binary": (CIFAR100(), lambda root: write.cifar100_binary(root, HUNDRED, HUNDRED_TEST)),
    "svhn": (SVHN(), lambda root: write.svhn(root, BATCHES[0], TEST)),
    "svhn uncompressed": (SVHN(), lambda root: write.svhn(root, BATCHES[0], TEST, compressed=False)),
    "stl10": (STL10(), lambda root: write.stl10(root, LARGE, LARGE_TEST)),
    "gtsrb": (GTSRB(), lambda root: write.gtsrb_original(root, SIGNS, SIGNS_TEST)),
    "gtsrb mirror": (GTSRB(), lambda root: write.gtsrb_mirror(root, SIGNS, SIGNS_TEST)),
    "mnist": (MNIST(), lambda root: write.mnist(root, GRAY, GRAY_TEST)),
    "mnist unzipped": (MNIST(), lambda root: write.mnist(root, GRAY, GRAY_TEST, zipped=False)),
    "fashion_mnist": (FashionMNIST(), lambda root: write.mnist(root, GRAY, GRAY_TEST, folder="fashion_mnist")),
}


def written(root, name):
    source, make = FORMATS[name]
    make(root)
    return source


def of_signs(frames):
    return np.stack([frame.pixels for frame in frames]), [frame.label for frame in frames]


def joined(parts):
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def same(images, x, y):
    assert images.x.dtype is torch.uint8 and images.y.dtype is torch.int64
    assert torch.equal(images.x, torch.as_tensor(x))
    assert images.y.tolist() == list(y)


def refused(source, root, *said):
    with pytest.raises(UsageError) as problem:
        source.load(root)
    for words in said:
        assert words in str(problem.value)


# What was written comes back.


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [
        ("cifar10 python", joined(BATCHES), TEST, write.THINGS),
        ("cifar10 binary", joined(BATCHES), TEST, write.THINGS),
        ("cifar100 python", HUNDRED, HUNDRED_TEST, write.FINE),
        ("cifar100 binary", HUNDRED, HUNDRED_TEST, write.FINE),
        ("svhn", BATCHES[0], TEST, list("0123456789")),
        ("svhn uncompressed", BATCHES[0], TEST, list("0123456789")),
        ("mnist", GRAY, GRAY_TEST, list("0123456789")),
        ("mnist unzipped", GRAY, GRAY_TEST, list("0123456789")),
        (
            "stl10",
            LARGE,
            LARGE_TEST,
            ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"],
        ),
        (
            "fashion_mnist",
            GRAY,
            GRAY_TEST,
            ["T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"],
        ),
    ],
)
def test_what_was_written_comes_back(tmp_path, name, train, test, classes):
    splits = written(tmp_path, name).load(tmp_path)
    same(splits.train, *train)
    same(splits.test, *test)
    assert list(splits.train.classes) == list(splits.test.classes) == classes
    assert splits.train.groups is None
    whole = PUBLISHED[name.split()[0]]
    assert f"{len(train[1])} of the {whole.train:,} published training images" in splits.note
    assert f"{len(test[1])} of the {whole.test:,} published test images" in splits.note


@pytest.mark.parametrize("name", ["gtsrb", "gtsrb mirror"])
def test_signs_come_back_from_both_layouts(tmp_path, name):
    splits = written(tmp_path, name).load(tmp_path)
    same(splits.train, *of_signs(SIGNS))
    same(splits.test, *of_signs(SIGNS_TEST))
    assert len(splits.train.classes) == 43 and len(set(splits.train.classes)) == 43
    told = {14: "stop", 13: "give way", 17: "no entry", 1: "speed limit 30", 38: "keep right", 40: "roundabout"}
    assert {k: splits.train.classes[k] for k in told} == told
    assert "90 of the 39,209 published training images" in splits.note
    assert "3 of the 12,630 published test images" in splits.note


@pytest.mark.parametrize("name", ["cifar10 python", "mnist", "stl10", "svhn"])
def test_the_files_may_lie_in_the_root_itself(tmp_path, name):
    source = written(tmp_path, name)
    (folder,) = tmp_path.iterdir()
    assert source.load(folder).train.sha256() == source.load(tmp_path).train.sha256()


def test_the_root_is_found_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path))
    same(written(tmp_path, "svhn").load().test, *TEST)
    assert data_folder(Path("given")) == Path("given")
    monkeypatch.delenv("DOUBLY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert data_folder() == Path("/caches/doubly")


def test_the_files_own_class_names_are_used(tmp_path):
    names = [f"kind_{k}" for k in range(10)]
    write.cifar10_python(tmp_path / "python", BATCHES, TEST, names)
    write.cifar10_binary(tmp_path / "binary", BATCHES, TEST, names)
    write.stl10(tmp_path, LARGE, LARGE_TEST, names)
    for source, root in ((CIFAR10(), "python"), (CIFAR10(), "binary"), (STL10(), ".")):
        assert source.load(tmp_path / root).train.classes == tuple(names)


def test_fewer_batches_are_the_first_ones(tmp_path):
    for kind in ("python", "binary"):
        written(tmp_path / kind, f"cifar10 {kind}")
        splits = CIFAR10(batches=2).load(tmp_path / kind)
        same(splits.train, *joined(BATCHES[:2]))
        same(splits.test, *TEST)
        assert "8 of the 50,000 published training images" in splits.note


@pytest.mark.parametrize("batches", [0, 6, -1])
def test_there_are_five_batches(batches):
    with pytest.raises(UsageError, match=f"5 training batches, got batches={batches}"):
        CIFAR10(batches)


def test_where_batches_are_missing_the_remedy_is_to_read_fewer(tmp_path):
    write.cifar10_python(tmp_path, BATCHES[:2], TEST)
    refused(CIFAR10(), tmp_path, "data_batch_3", "missing", "--data.source.batches 2", "doubly data fetch cifar10")
    assert len(CIFAR10(batches=2).load(tmp_path).train) == 8


def test_where_binary_batches_are_missing_the_remedy_is_the_same(tmp_path):
    write.cifar10_binary(tmp_path, BATCHES[:2], TEST)
    refused(CIFAR10(), tmp_path, "data_batch_3.bin", "cifar-10-batches-bin", "--data.source.batches 2")


def test_a_folder_of_the_name_of_a_file_does_not_hide_the_binary_version(tmp_path):
    (tmp_path / "train").mkdir()
    same(written(tmp_path, "cifar100 binary").load(tmp_path).train, *HUNDRED)


def test_the_written_pickles_are_what_numpy_itself_reads(tmp_path):
    """Else the tests below would be of a format of our own."""
    write.cifar10_python(tmp_path, BATCHES, TEST)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    with warnings.catch_warnings(action="ignore"):  # numpy.core has another name by now
        batch = pickle.loads(path.read_bytes(), encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], BATCHES[0][0].reshape(4, -1))
    assert {key.decode(): value for key, value in batch.items() if key != b"data"} == {
        key: value for key, value in read_batch(path).items() if key != "data"
    }


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_batches_that_python_3_has_written_anew_are_read(tmp_path, protocol, order):
    write.cifar10_python(tmp_path, BATCHES, TEST)
    x, y = BATCHES[0]
    batch = {"batch_label": "training batch 1 of 5", "labels": y.tolist()}
    batch["data"] = np.asarray(x.reshape(4, -1), order=order)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps(batch, protocol=protocol))
    same(CIFAR10(batches=1).load(tmp_path).train, x, y)


def test_svhn_labels_may_be_doubles(tmp_path):
    """MATLAB's own numbers."""
    write.svhn(tmp_path, BATCHES[0], TEST)
    x, y = BATCHES[0]
    matrices = {"X": x.transpose(2, 3, 1, 0), "y": np.where(y == 0, 10.0, y)[:, None]}
    savemat(tmp_path / "svhn" / "train_32x32.mat", matrices)
    same(SVHN().load(tmp_path).train, x, y)


# Published files are known by their checksums.


def published_as(monkeypatch, dataset, folder, train=None, test=None):
    """Pretend that these files are the published ones."""
    whole = PUBLISHED[dataset]
    digests = {name: md5(folder / name) for name in whole.md5 if (folder / name).exists()}
    new = whole._replace(md5=digests, train=train or whole.train, test=test or whole.test)
    monkeypatch.setitem(PUBLISHED, dataset, new)


def test_the_published_set_needs_no_note(tmp_path, monkeypatch):
    source = written(tmp_path, "svhn")
    published_as(monkeypatch, "svhn", tmp_path / "svhn", train=4, test=3)
    assert source.load(tmp_path).note == ""


def test_files_other_than_the_published_are_named(tmp_path, monkeypatch):
    source = written(tmp_path, "svhn")
    published_as(monkeypatch, "svhn", tmp_path / "svhn", train=4, test=3)
    write.svhn(tmp_path, part(50, 4), TEST)
    note = source.load(tmp_path).note
    assert "train_32x32.mat differ from the published" in note
    assert "test_32x32.mat" not in note and "images" not in note


def swap(folder, one, other):
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


def test_published_files_that_changed_names_are_refused(tmp_path, monkeypatch):
    """Of equally many images, and with labels that fit: only the checksums tell."""
    write.svhn(tmp_path, BATCHES[0], BATCHES[1])
    published_as(monkeypatch, "svhn", tmp_path / "svhn")
    swap(tmp_path / "svhn", "train_32x32.mat", "test_32x32.mat")
    refused(SVHN(), tmp_path, "train_32x32.mat holds svhn's published test_32x32.mat", "its own name again")


# Bad input.


@pytest.mark.parametrize("name", FORMATS)
def test_without_files_the_first_is_named_and_where_to_fetch_it(tmp_path, name):
    source = FORMATS[name][0]
    dataset = name.split()[0]
    first = {
        "cifar10": "batches.meta",
        "cifar100": "meta",
        "svhn": "train_32x32.mat",
        "stl10": "train_X.bin",
        "gtsrb": "Final_Training/Images",
        "mnist": "train-images-idx3-ubyte.gz",
        "fashion_mnist": "train-images-idx3-ubyte.gz",
    }
    refused(source, tmp_path, first[dataset], "missing", f"doubly data fetch {dataset} --data-root {tmp_path}")


def data_files(root):
    """But for those that may be left out, and the five hundred images."""
    left_out = ("coarse_label_names.txt", "class_names.txt")
    return sorted(
        p for p in root.rglob("*") if p.is_file() and p.name not in left_out and p.suffix not in (".ppm", ".png")
    )


@pytest.mark.parametrize("name", FORMATS)
def test_each_file_is_missed(tmp_path, name):
    source = written(tmp_path, name)
    files = data_files(tmp_path)
    for path in files[:: 9 if name == "gtsrb" else 1]:
        aside = path.rename(tmp_path / "aside")
        if path.name == "train.bin" or path.name == "data_batch_1.bin":
            refused(source, tmp_path, "meta", "missing")  # without these nothing speaks for the binary version
        elif path.name == "Train.csv":
            refused(source, tmp_path, "Final_Training/Images", "missing")
        else:
            refused(source, tmp_path, path.name)
        aside.rename(path)
    source.load(tmp_path)


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("gtsrb")])
def test_files_that_are_cut_short_are_refused(tmp_path, name):
    source = written(tmp_path, name)
    for path in data_files(tmp_path):
        if path.suffix == ".txt":
            continue
        whole = path.read_bytes()
        for length in {0, 1, 5, len(whole) // 3 + 1, len(whole) // 2 + 1, len(whole) - 9, len(whole) - 1} & set(
            range(len(whole))
        ):
            path.write_bytes(whole[:length])
            refused(source, tmp_path, path.name)
        path.write_bytes(whole)
    source.load(tmp_path)


@pytest.mark.parametrize("name", ["cifar10 python", "cifar100 python"])
def test_pickles_are_refused_wherever_they_are_cut(tmp_path, name):
    source = written(tmp_path, name)
    path = next(tmp_path.rglob("*meta"))
    whole = path.read_bytes()
    for length in range(0, len(whole), 1 if len(whole) < 500 else 17):
        path.write_bytes(whole[:length])
        refused(source, tmp_path, path.name, "cut short or another file; put it in again")


@pytest.mark.parametrize("name", ["cifar10 binary", "cifar100 binary"])
def test_binary_batches_cut_between_images_are_noted(tmp_path, name):
    source = written(tmp_path, name)
    path = next(tmp_path.rglob("test*.bin"))
    path.write_bytes(path.read_bytes()[: 2 * (3074 if "100" in name else 3073)])
    assert "2 of the 10,000 published test images" in source.load(tmp_path).note


@pytest.mark.parametrize("place", ["gtsrb/GT-final_test.csv", "gtsrb/GTSRB/Final_Training/Images/00042/GT-00042.csv"])
def test_tables_that_are_cut_short_are_refused(tmp_path, place):
    source = written(tmp_path, "gtsrb")
    path = tmp_path / place
    whole = path.read_bytes().rstrip(b"\r\n")
    last = len(whole) - whole.rindex(b"\n") - 1
    for back in range(2, last):  # a class number of two digits may lose one unnoticed
        path.write_bytes(whole[:-back])
        refused(source, tmp_path, path.name)


@pytest.mark.parametrize(
    ("name", "place", "other", "said"),
    [
        ("cifar10 python", "data_batch_1", b"<html>Not found</html>", "another file; put it in again"),
        ("cifar10 python", "data_batch_1", write.pickled([1, 2]), "no dictionary"),
        ("cifar10 python", "data_batch_1", write.pickled({b"labels": [1]}), "lacks rows of 3072 bytes"),
        ("cifar10 python", "batches.meta", write.pickled({b"names": [b"a"]}), "no label_names"),
        ("cifar10 python", "batches.meta", write.pickled({b"label_names": 3}), "no label_names"),
        ("cifar10 binary", "data_batch_1.bin", b"", "cut short: its 0 bytes"),
        ("cifar100 binary", "test.bin", bytes(3073), "no multiple of 3074; put it in again"),
        ("cifar100 python", "meta", write.pickled({b"label_names": [b"a"]}), "no fine_label_names"),
        ("svhn", "train_32x32.mat", b"<html>Not found</html>" * 20, "another file; put it in again"),
        ("mnist", "train-images-idx3-ubyte.gz", b"<html>Not found</html>", "another file; put it in again"),
        ("mnist", "train-images-idx3-ubyte.gz", zipped(b"\0\0\x0d\3" + bytes(100)), "no idx file of bytes"),
        ("mnist", "train-images-idx3-ubyte.gz", zipped(b"\0\0\x08\3" + b"\xff" * 12), "cut short: it promises"),
        ("gtsrb", "GTSRB/Final_Training/Images/00003/GT-00003.csv", b"", "GTSRB's own in again"),
        ("gtsrb", "GT-final_test.csv", b"\xff\xfe\0", "put it in again"),
        ("gtsrb mirror", "Train.csv", b"Width,Height,Path\n1,2,a.png\n", "no lines with Path and ClassId"),
    ],
)
def test_other_files_of_the_same_name_are_refused(tmp_path, name, place, other, said):
    source = written(tmp_path, name)
    (path,) = tmp_path.rglob(place)
    path.write_bytes(other)
    refused(source, tmp_path, path.name, said)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(
            {"labels": [1, [2], 3]},
        ),
        {"labels": [[[[1]]]] * 4},
        {"labels": [b"cat"] * 4},
        {"labels": [None] * 4},
        {"labels": np.zeros(4, np.uint8)},
        pytest.param(
            {"batch_label": np.zeros(4, np.uint8)},
        ),
        {"batch_label": [b"training batch 1 of 5"]},
        {"data": np.zeros((4, 3071), np.uint8)},
        {"data": np.zeros((4, 3, 32, 32), np.uint8)},
        {"data": [0] * 4},
        {"data": b"0" * 3072},
    ],
)
def test_batches_with_odd_things_in_them_are_refused(tmp_path, batch):
    write.cifar10_python(tmp_path, BATCHES, TEST)
    good = {"batch_label": b"training batch 1 of 5", "labels": [0] * 4, "data": np.zeros((4, 3072), np.uint8)}
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(write.pickled({key.encode(): value for key, value in (good | batch).items()}))
    refused(CIFAR10(batches=1), tmp_path, "data_batch_1")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10 python", "batches.meta"),
        ("cifar10 binary", "batches.meta.txt"),
        ("cifar100 binary", "fine_label_names.txt"),
        ("stl10", "class_names.txt"),
    ],
)
def test_class_names_that_are_no_text_are_refused(tmp_path, name, file):
    source = written(tmp_path, name)
    (folder,) = tmp_path.iterdir()
    names = [b"\xff\xfe%d" % k for k in range(100)]
    path = folder / file
    path.write_bytes(write.pickled({b"label_names": names}) if "python" in name else b"\n".join(names))
    refused(source, tmp_path, file)


def test_a_batch_under_another_name_tells(tmp_path):
    write.cifar10_python(tmp_path, BATCHES, TEST)
    swap(tmp_path / "cifar-10-batches-py", "data_batch_1", "data_batch_2")
    refused(CIFAR10(), tmp_path, "data_batch_1", "training batch 2 of 5", "training batch 1 of 5", "its own name again")


def test_swapped_train_and_test_batches_tell(tmp_path):
    write.cifar10_python(tmp_path, BATCHES, TEST)
    swap(tmp_path / "cifar-10-batches-py", "data_batch_1", "test_batch")
    refused(CIFAR10(), tmp_path, "data_batch_1", "testing batch 1 of 1", "its own name again")
    write.cifar100_python(tmp_path, HUNDRED, HUNDRED_TEST)
    swap(tmp_path / "cifar-100-python", "train", "test")
    refused(CIFAR100(), tmp_path, "train", "testing batch 1 of 1", "its own name again")


@pytest.mark.parametrize(
    ("name", "one", "other", "said"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "may be swapped; put it in again"),
        ("mnist unzipped", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "may be swapped; put it in again"),
        ("mnist", "train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", "3 images and 5 labels"),
        ("stl10", "train_X.bin", "train_y.bin", "swapped, put both in again"),
        ("stl10", "train_X.bin", "test_X.bin", "swapped, put both in again"),
    ],
)
def test_swapped_files_are_refused(tmp_path, name, one, other, said):
    source = written(tmp_path, name)
    (folder,) = tmp_path.iterdir()
    swap(folder, one, other)
    refused(source, tmp_path, one, said)


def shorter(x, y):
    return x, y[:-1]


@pytest.mark.parametrize(
    ("source", "make", "file"),
    [
        (CIFAR10(1), lambda root: write.cifar10_python(root, [shorter(*BATCHES[0])], TEST), "data_batch_1"),
        (CIFAR10(1), lambda root: write.cifar10_python(root, BATCHES[:1], shorter(*TEST)), "test_batch"),
        (CIFAR100(), lambda root: write.cifar100_python(root, shorter(*HUNDRED), HUNDRED_TEST), "train"),
        (SVHN(), lambda root: write.svhn(root, BATCHES[0], shorter(*TEST)), "test_32x32.mat"),
        (STL10(), lambda root: write.stl10(root, LARGE, shorter(*LARGE_TEST)), "test_X.bin and test_y.bin"),
        (MNIST(), lambda root: write.mnist(root, shorter(*GRAY), GRAY_TEST), "train-images-idx3-ubyte.gz"),
    ],
)
def test_images_and_labels_are_equally_many(tmp_path, source, make, file):
    make(tmp_path)
    refused(source, tmp_path, file, "labels")


def outside(label):
    def changed(x, y):
        return x, np.r_[y[:-1], label]

    return changed


@pytest.mark.parametrize(
    ("source", "make", "said"),
    [
        (CIFAR10(1), lambda root: write.cifar10_python(root, BATCHES[:1], outside(10)(*TEST)), "test_batch: labels"),
        (CIFAR10(1), lambda root: write.cifar10_python(root, [outside(-1)(*BATCHES[0])], TEST), "data_batch_1: labels"),
        (
            CIFAR10(2),
            lambda root: write.cifar10_binary(root, [BATCHES[0], outside(10)(*BATCHES[1])], TEST),
            "data_batch_2.bin: ",
        ),
        (CIFAR100(), lambda root: write.cifar100_binary(root, HUNDRED, outside(100)(*HUNDRED_TEST)), "test.bin: "),
        (SVHN(), lambda root: write.svhn(root, BATCHES[0], outside(11)(*TEST)), "test_32x32.mat has labels other than"),
        (
            STL10(),
            lambda root: write.stl10(root, outside(10)(*LARGE), LARGE_TEST),
            "train_y.bin has labels from 1 to 11",
        ),
        (MNIST(), lambda root: write.mnist(root, GRAY, outside(10)(*GRAY_TEST)), "t10k-images-idx3-ubyte.gz: labels"),
        pytest.param(
            GTSRB(),
            lambda root: write.gtsrb_original(root, SIGNS, [sign(0, 43)]),
            "GT-final_test.csv",
        ),
        pytest.param(
            GTSRB(),
            lambda root: write.gtsrb_mirror(root, [*SIGNS, sign(0, 43)], SIGNS_TEST),
            "Train.csv",
        ),
    ],
)
def test_labels_outside_the_classes_are_refused(tmp_path, source, make, said):
    make(tmp_path)
    refused(source, tmp_path, said)


def test_svhn_and_stl10_count_from_one(tmp_path):
    matrices = {"X": BATCHES[0][0].transpose(2, 3, 1, 0), "y": np.arange(4, dtype=np.uint8)[:, None]}
    write.svhn(tmp_path, BATCHES[0], TEST)
    savemat(tmp_path / "svhn" / "train_32x32.mat", matrices)
    refused(SVHN(), tmp_path, "train_32x32.mat", "labels other than", "1 to 10, 10 being a zero")
    write.stl10(tmp_path, LARGE, outside(-1)(*LARGE_TEST))
    refused(STL10(), tmp_path, "test_y.bin", "labels from 0 to", "1 to 10")


@pytest.mark.parametrize(
    "matrices",
    [
        {"X": np.zeros((32, 32, 3, 4), np.uint8)},
        {"y": np.ones((4, 1), np.uint8)},
        {"X": np.zeros((32, 32, 3, 4)), "y": np.ones((4, 1), np.uint8)},
        {"X": np.zeros((4, 3, 32, 32), np.uint8), "y": np.ones((4, 1), np.uint8)},
        {"X": {"a": 1}, "y": np.ones((4, 1), np.uint8)},
    ],
)
def test_matlab_files_with_other_matrices_are_refused(tmp_path, matrices):
    write.svhn(tmp_path, BATCHES[0], TEST)
    savemat(tmp_path / "svhn" / "train_32x32.mat", matrices)
    refused(SVHN(), tmp_path, "train_32x32.mat")


@pytest.mark.parametrize("y", ["abcd", {"a": 1}, np.array([1, 2, np.nan, 3]), np.array([1, 2, 2.5, 3])])
def test_svhn_labels_that_are_no_whole_numbers_are_refused(tmp_path, y):
    write.svhn(tmp_path, BATCHES[0], TEST)
    savemat(tmp_path / "svhn" / "train_32x32.mat", {"X": BATCHES[0][0].transpose(2, 3, 1, 0), "y": y})
    refused(SVHN(), tmp_path, "train_32x32.mat")


@pytest.mark.parametrize(
    ("source", "make"),
    [
        (CIFAR100(), lambda root: write.cifar100_python(root, HUNDRED, HUNDRED)),
        (SVHN(), lambda root: write.svhn(root, TEST, TEST)),
        (STL10(), lambda root: write.stl10(root, LARGE, LARGE)),
        (MNIST(), lambda root: write.mnist(root, GRAY, GRAY)),
        (GTSRB(), lambda root: write.gtsrb_original(root, SIGNS, SIGNS)),
    ],
)
def test_a_test_set_that_is_the_training_set_is_refused(tmp_path, source, make):
    make(tmp_path)
    refused(source, tmp_path, "train and test hold the same images")


def test_one_batch_under_two_names_is_refused(tmp_path):
    """A binary batch does not say which it is."""
    write.cifar10_binary(tmp_path, [*BATCHES[:4], BATCHES[1]], TEST)
    refused(CIFAR10(), tmp_path, "data_batch_2.bin", "data_batch_5.bin", "hold the same images")
    write.cifar10_binary(tmp_path, [TEST, *BATCHES[1:]], TEST)
    refused(CIFAR10(), tmp_path, "data_batch_1.bin", "test_batch.bin", "hold the same images")


def test_files_of_another_dataset_are_refused(tmp_path, monkeypatch):
    """Digits and clothes have files of equal names and sizes."""
    write.mnist(tmp_path, GRAY, GRAY_TEST)
    digest = md5(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
    clothes = PUBLISHED["fashion_mnist"]
    known = {**clothes.md5, "train-images-idx3-ubyte.gz": digest}
    monkeypatch.setitem(PUBLISHED, "fashion_mnist", clothes._replace(md5=known))
    refused(MNIST(), tmp_path, "mnist/train-images-idx3-ubyte.gz", "holds fashion_mnist's published")


def test_all_files_are_taken_from_one_place(tmp_path):
    write.mnist(tmp_path, GRAY, GRAY_TEST)
    write.mnist(tmp_path, GRAY_TEST, GRAY, folder="MNIST/raw")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    refused(MNIST(), tmp_path, "t10k-labels-idx1-ubyte.gz", "missing")


def test_the_archive_s_table_without_classes_is_no_ground_truth(tmp_path):
    """It comes with the test images, under nearly the name of the table with the classes."""
    source = written(tmp_path, "gtsrb")
    path = tmp_path / "gtsrb" / "GT-final_test.csv"
    lines = [line.rpartition(";")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    refused(source, tmp_path, "GT-final_test.csv", "without classes", "GTSRB_Final_Test_GT.zip")


def test_the_ground_truth_is_found_where_people_put_it(tmp_path):
    source = written(tmp_path, "gtsrb")
    path = tmp_path / "gtsrb" / "GT-final_test.csv"
    path = path.rename(tmp_path / "gtsrb" / "GTSRB" / "GT-final_test.csv")
    same(source.load(tmp_path).test, *of_signs(SIGNS_TEST))
    path.rename(tmp_path / "gtsrb" / "GTSRB" / "Final_Test" / "Images" / "GT-final_test.csv")
    same(source.load(tmp_path).test, *of_signs(SIGNS_TEST))


def test_a_class_folder_under_another_number_tells(tmp_path):
    source = written(tmp_path, "gtsrb")
    images = tmp_path / "gtsrb" / "GTSRB" / "Final_Training" / "Images"
    table = images / "00003" / "GT-00003.csv"
    table.write_text((images / "00004" / "GT-00004.csv").read_text())
    refused(source, tmp_path, "GT-00003.csv", "class 4", "its own name again")


def test_signs_that_are_missing_or_unreadable_are_named(tmp_path):
    source = written(tmp_path, "gtsrb")
    for place in ("Final_Training/Images/00007/00000_00001.ppm", "Final_Test/Images/00002.ppm"):
        path = tmp_path / "gtsrb" / "GTSRB" / place
        whole = path.read_bytes()
        for other in (b"", whole[:2], whole[:100], whole[:-1], b"<html>Not found</html>"):
            path.write_bytes(other)
            refused(source, tmp_path, path.name, "cannot be read as an image", "put it in again")
        path.unlink()
        refused(source, tmp_path, path.name, "missing", "unpack the archive again")
        path.write_bytes(whole)


def test_signs_are_numbered_as_published(tmp_path):
    source = written(tmp_path, "gtsrb")
    table = tmp_path / "gtsrb" / "GTSRB" / "Final_Training" / "Images" / "00007" / "GT-00007.csv"
    (table.parent / "00000_00001.ppm").rename(table.parent / "left.ppm")
    table.write_text(table.read_text().replace("00000_00001.ppm", "left.ppm"))
    refused(source, tmp_path, "GT-00007.csv", "left.ppm", "not numbered")


# Signs: sizes and tracks.


@pytest.mark.parametrize("size", [32, 20])
def test_signs_of_any_size_are_stretched_to_a_square(tmp_path, size):
    sizes = [(15, 15), (25, 32), (60, 41), (33, 32), (32, 32)]
    train = [sign(k, k, size=sizes[k % len(sizes)]) for k in range(43)]
    write.gtsrb_original(tmp_path, train, SIGNS_TEST)
    images = GTSRB(size=size).load(tmp_path).train
    assert images.x.shape == (43, 3, size, size)
    for got, frame in zip(images.x, train, strict=True):
        image = Image.fromarray(frame.pixels.transpose(1, 2, 0))
        wanted = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        assert torch.equal(got, torch.tensor(wanted))


def test_signs_have_a_size():
    with pytest.raises(UsageError, match="above 0, got 0"):
        GTSRB(size=0)


@pytest.mark.parametrize("name", ["gtsrb", "gtsrb mirror"])
def test_frames_of_one_sign_are_one_group(tmp_path, name):
    splits = written(tmp_path, name).load(tmp_path)
    groups = splits.train.groups.tolist()
    wanted = [(frame.label, frame.track) for frame in SIGNS]
    assert len(set(groups)) == len(set(wanted)) == len(set(zip(groups, wanted, strict=True))) == 45
    assert splits.test.groups is None


def test_signs_are_held_out_by_the_track(tmp_path):
    train = [sign(5 * k + n, k, track, n) for k in range(43) for track in range(4) for n in range(2)]
    write.gtsrb_original(tmp_path, train, SIGNS_TEST)
    images = GTSRB().load(tmp_path).train
    kept, held = holdout(images.y, 0.25, 0, images.groups)
    assert images.subset(held).counts().tolist() == [2] * 43
    assert not set(images.subset(kept).groups.tolist()) & set(images.subset(held).groups.tolist())


def test_mirrored_signs_without_a_track_in_their_names_are_refused(tmp_path):
    """One group for all of them would leave nothing to hold out."""
    source = written(tmp_path, "gtsrb mirror")
    table = tmp_path / "gtsrb" / "Train.csv"
    table.write_text(table.read_text().replace("00042_00000_00001.png", "b.png"))
    (tmp_path / "gtsrb/Train/42/00042_00000_00001.png").rename(tmp_path / "gtsrb/Train/42/b.png")
    refused(source, tmp_path, "Train.csv", "b.png")


# Pickles that would do something.


def call(module, name, *arguments):
    return f"c{module}\n{name}\n".encode() + write.opcodes(arguments) + b"R"


def dotted(module, name, *arguments):
    """By the opcode of protocol 4, where names may have dots."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return words + b"\x93" + write.opcodes(arguments) + b"R"


def text(word):
    return b"X" + len(word).to_bytes(4, "little") + word


def hostile(canary):
    """Opcodes of one value each; every one of them makes the canary where pickles are executed."""
    path = str(canary).encode()
    touch = b"touch " + path
    python = f"open({str(canary)!r}, 'w').close()".encode()
    string = text(path)
    arguments = write.opcodes(touch)
    touched = call("os", "system", touch)
    return {
        "os.system": touched,
        "posix.system": call("posix", "system", touch),
        "builtins.eval": call("builtins", "eval", python),
        "builtins.exec": call("builtins", "exec", python),
        "Python 2's eval": b"\x80\2" + call("__builtin__", "eval", python),
        "subprocess.call": call("subprocess", "call", [b"touch", path]),
        "subprocess.Popen": call("subprocess", "Popen", [b"touch", path]) + call("os", "wait")[:-1] + b"R0",
        "numpy.savetxt": b"cnumpy\nsavetxt\n" + string + write.opcodes([1]) + b"\x86R",
        "numpy.memmap": b"cnumpy\nmemmap\n(" + string + text(b"u1") + text(b"w+") + b"K\0K\1tR",
        "a dotted name": dotted("shutil", "os.system", touch),
        "a dotted name of numpy": dotted("numpy.testing._private.utils", "os.system", touch),
        "copyreg": b"ccopyreg\nadd_extension\n("
        + text(b"os")
        + text(b"system")
        + b"K\xf0tR0\x82\xf0"
        + arguments
        + b"\x85R",
        "INST": b"(" + arguments + b"ios\nsystem\n",
        "OBJ": b"(cos\nsystem\n" + arguments + b"o",
        "in a list in a dictionary": b"}" + write.opcodes(b"a") + b"](" + touched + b"es",
        "in the arguments of a stand-in": b"cnumpy\ndtype\n(" + touched + b"tR",
        "in the arguments of itself": b"cbuiltins\nint\n(" + touched + b"tR",
        "as the content of an array": write.array((4, 3072), b"u1", touched),
        "in an array of objects": write.array((1,), b"O8", b"](" + touched + b"e"),
        "as a state": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n(K\0tU\1b\x87R" + touched + b"b",
        "behind what is thrown away": touched + b"0N",
        "as a key": b"}" + touched + b"Ns",
    }


KINDS = list(hostile("canary"))


def with_payload(payload, key=b"labels"):
    """A batch that is good but for one more value, which comes before the others."""
    x, y = BATCHES[0]
    batch = {b"batch_label": b"training batch 1 of 5", b"data": x.reshape(4, -1), b"labels": y.tolist()}
    rest = write.opcodes({name: value for name, value in batch.items() if name != key})
    return b"\x80\x04" + rest + write.opcodes(key) + payload + b"s."


def test_the_hostile_pickles_are_live(tmp_path):
    """What follows is worth something only if they would run; here they do, in another process."""
    for number, kind in enumerate(KINDS):
        (tmp_path / f"batch_{number}").write_bytes(with_payload(hostile(tmp_path / f"canary_{number}")[kind]))
    code = """if True:
        import contextlib, pathlib, pickle, sys
        for path in pathlib.Path(sys.argv[1]).glob("batch_*"):
            with contextlib.suppress(Exception):  # some end badly, having run
                pickle.loads(path.read_bytes(), encoding="bytes")
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, timeout=60)
    assert [kind for number, kind in enumerate(KINDS) if not (tmp_path / f"canary_{number}").exists()] == []


@pytest.mark.parametrize("file", ["data_batch_1", "batches.meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_pickle_is_executed(tmp_path, kind, file):
    write.cifar10_python(tmp_path, BATCHES, TEST)
    canary = tmp_path / "canary"
    (tmp_path / "cifar-10-batches-py" / file).write_bytes(with_payload(hostile(canary)[kind], b"label_names"))
    refused(CIFAR10(batches=1), tmp_path, file, "nothing was executed", "do not trust this file")
    assert not canary.exists()


@pytest.mark.parametrize(
    "name",
    [
        "numpy frombuffer",
        "numpy load",
        "numpy _reconstruct",
        "numpy dtype.__init__",
        "numpy ndarray.__reduce__",
        "numpy.core.multiarray scalar",
        "numpy.core.multiarray fromfile",
        "numpy.core.multiarray ndarray",
        "copyreg _reconstructor",
        "copy_reg _reconstructor",
        "_codecs encode",
        "collections OrderedDict",
    ],
)
def test_names_beyond_the_three_are_refused_even_if_harmless(tmp_path, name):
    module, name = name.split()
    path = tmp_path / "batch"
    for payload in (f"c{module}\n{name}\n".encode(), dotted(module, name)[:-1]):
        path.write_bytes(with_payload(payload))
        with pytest.raises(UsageError, match=f"{path} names {module}.{name}, which no CIFAR batch contains"):
            read_batch(path)


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
ARRAY = RECONSTRUCT + b"cnumpy\nndarray\n(K\0tU\1b\x87R"
PIXELS = write.opcodes(BATCHES[0][0].tobytes())


@pytest.mark.parametrize(
    "payload",
    [
        b"Pname\n",  # a persistent id
        write.opcodes(b"name") + b"Q",  # one on the stack
        b"\x82\x01",  # an extension that nobody registered
        b"h\x63",  # a memo that nobody wrote
        write.array((4,), b"O8", write.opcodes([1, 2, 3, 4])),
        write.array((4, 384), b"i8", PIXELS),
        write.array((4, 3072), b"O8", PIXELS, ({b"code": b"u1"},)),  # the state would change the type
        write.array((4, 3072), b"O8", PIXELS, {b"code": b"u1"}),
        write.array((4, 3072), b"O8", PIXELS, (None, {b"code": b"u1"})),
        write.array((4, 3073), b"u1", PIXELS),
        write.array((4, 2**31 - 1), b"u1", PIXELS),
        write.array((4, 3072), b"u1", b"N"),
        write.array((4, 3072), b"u1", write.opcodes([1])),
        write.array((b"4", b"3072"), b"u1", PIXELS),
        ARRAY,  # without a state
        ARRAY + write.opcodes({b"state": 1}) + b"b",
        ARRAY + write.opcodes((None, {b"__class__": 1})) + b"b",
        ARRAY + write.opcodes((1, (4, 3072), b"u1", 0, BATCHES[0][0].tobytes())) + b"b",  # a word for the type
        b"cnumpy\nndarray\n" + write.opcodes({b"state": 1}) + b"b",  # attributes of the class itself
        b"cnumpy\ndtype\n" + write.opcodes({b"code": b"u1"}) + b"b",
        b"cnumpy\ndtype\n" + write.opcodes((None, {b"code": b"u1"})) + b"b",
        ARRAY + b"(K\1(K\4M\0\x0ct" + b"cnumpy\ndtype\n)\x81" + b"\x89" + PIXELS + b"tb",  # a type never initialized
        RECONSTRUCT,  # the function instead of an array
        b"cnumpy\nndarray\n",
    ],
)
def test_tricks_with_the_stand_ins_are_refused(tmp_path, payload):
    write.cifar10_python(tmp_path, BATCHES, TEST)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(with_payload(payload, b"data"))
    refused(CIFAR10(batches=1), tmp_path, "data_batch_1")


@pytest.mark.parametrize(
    "state",
    [
        {b"__setstate__": b"x"},
        {b"state": 1},
        (None, {b"__setstate__": b"x"}),
        (None, {b"__defaults__": (1, 2)}),
        (None, {b"__code__": b"x"}),
        (None, {b"__class__": b"x"}),
        (None, {b"__dict__": {b"a": 1}}),
    ],
)
@pytest.mark.parametrize("target", [RECONSTRUCT, b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"])
def test_what_a_pickle_does_to_the_stand_ins_dies_with_it(tmp_path, target, state):
    """Names are text here, as they would have to be for attributes."""
    build = target + write.opcodes(state).replace(b"U", b"\x8c") + b"b0N"
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.write_bytes(with_payload(build, b"more"))
    write.cifar_batch(good, BATCHES[0], b"training batch 1 of 5")
    with contextlib.suppress(UsageError):
        np.testing.assert_array_equal(content(bad, read_batch, "a batch")["data"], BATCHES[0][0].reshape(4, -1))
    np.testing.assert_array_equal(read_batch(good)["data"], BATCHES[0][0].reshape(4, -1))
    assert np.dtype("u1").itemsize == 1 and not hasattr(np.ndarray, "state")


# The real files. What is expected comes from their bytes, by other means than the readers'.


def channel_means(x):
    return x.mean((0, 2, 3), dtype=np.float64) / 255


def agrees(images, x, y):
    assert images.x.shape == x.shape
    assert images.y.tolist() == list(y)
    np.testing.assert_allclose(images.channel_statistics()[0], channel_means(x), atol=1e-3)
    for row in (0, len(x) // 2, -1):
        np.testing.assert_array_equal(images.x[row].numpy(), x[row])


def says_what_is_missing(splits, dataset):
    whole = PUBLISHED[dataset]
    for name, images, number in (("training", splits.train, whole.train), ("test", splits.test, whole.test)):
        said = f"{len(images):,} of the {number:,} published {name} images"
        assert (said in splits.note) == (len(images) != number)


def test_real_cifar10(real_data):
    folder = real_data / "cifar-10-batches-py"
    batches = len(list(folder.glob("data_batch_?")))
    files = [*(f"data_batch_{number}" for number in range(1, batches + 1)), "test_batch"]
    assert {name: md5(folder / name) for name in files} == {name: PUBLISHED["cifar10"].md5[name] for name in files}

    def raw(name):
        data = (folder / name).read_bytes()
        pixels = data.index(b"T" + (10_000 * 3072).to_bytes(4, "little")) + 5
        labels = data.index(b"(K", data.index(b"U\x06labels")) + 1  # K and a byte each, after a thousand e and (
        x = np.frombuffer(data, np.uint8, 10_000 * 3072, pixels).reshape(-1, 3, 32, 32)
        return x, np.frombuffer(data, np.uint8, 20_020, labels).reshape(10, 2002)[:, 1:2000:2].reshape(-1)

    splits = CIFAR10(batches=batches).load(real_data)
    agrees(splits.train, *joined([raw(name) for name in files[:-1]]))
    agrees(splits.test, *raw("test_batch"))
    assert splits.train.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert splits.test.y[:5].tolist() == [3, 8, 8, 0, 6] and splits.test.y[-3:].tolist() == [5, 1, 7]
    assert splits.test.counts().tolist() == [1000] * 10
    assert splits.train.classes == tuple(write.THINGS)
    assert "differ" not in splits.note
    says_what_is_missing(splits, "cifar10")
    # Two batches have nearly the mean of all five.
    np.testing.assert_allclose(splits.train.channel_statistics()[0], [0.4914, 0.4822, 0.4465], atol=5e-3)


def test_real_svhn(real_data):
    def raw(path):
        """A header of 128 bytes, then zipped variables; the values are at the end of each, columns first."""
        data, place, values = path.read_bytes(), 128, []
        while place < len(data):
            kind, size = np.frombuffer(data, "<u4", 2, place)
            values.append(
                zlib.decompress(data[place + 8 : place + 8 + size])
                if kind == 15
                else data[place + 8 : place + 8 + size]
            )
            place += 8 + int(size)
        x, y = sorted(values, key=len, reverse=True)[:2]
        n = len(x) // 3072
        x = np.frombuffer(x[-n * 3072 :], np.uint8).reshape(n, 3, 32, 32).transpose(0, 1, 3, 2)
        padding = -n % 8
        return x, np.frombuffer(y[len(y) - padding - n : len(y) - padding], np.uint8) % 10

    splits = SVHN().load(real_data)
    for name, images in (("train", splits.train), ("test", splits.test)):
        agrees(images, *raw(real_data / "svhn" / f"{name}_32x32.mat"))
    assert splits.train.y[:6].tolist() == [1, 9, 2, 3, 2, 5] and splits.test.y[:4].tolist() == [5, 2, 1, 0]
    says_what_is_missing(splits, "svhn")
    # Whoever has a part of the images has a file of their own.
    assert ("differ from the published" in splits.note) == (len(splits.train) != 73_257)


def test_real_stl10(real_data):
    folder = real_data / "stl10_binary"
    splits = STL10().load(real_data)
    for name, images in (("train", splits.train), ("test", splits.test)):
        x = np.fromfile(folder / f"{name}_X.bin", np.uint8).reshape((96, 96, 3, -1), order="F").transpose(3, 2, 0, 1)
        agrees(images, x, np.fromfile(folder / f"{name}_y.bin", np.uint8) - 1)
        assert len(set(images.counts().tolist())) == 1
    assert splits.train.classes == tuple((folder / "class_names.txt").read_text().split())
    says_what_is_missing(splits, "stl10")


def test_real_gtsrb(real_data):
    def pixels(path):
        data = path.read_bytes()
        head = re.match(rb"P6\s(?:#.*\n)*(\d+) (\d+)\s255\s", data)
        width, height = map(int, head.groups())
        return np.frombuffer(data[head.end() :], np.uint8).reshape(height, width, 3).transpose(2, 0, 1)

    def rows(table, folder):
        with table.open() as file:
            return [(folder / row["Filename"], row) for row in csv.DictReader(file, delimiter=";")]

    root = real_data / "gtsrb"
    tables = sorted((root / "GTSRB/Final_Training/Images").glob("*/GT-*.csv"))
    train = [row for table in tables for row in rows(table, table.parent)]
    test = rows(root / "GT-final_test.csv", root / "GTSRB/Final_Test/Images")
    splits = GTSRB().load(real_data)
    for found, images in ((train, splits.train), (test, splits.test)):
        originals = [pixels(path) for path, _ in found]
        assert [(x.shape[2], x.shape[1]) for x in originals] == [(int(r["Width"]), int(r["Height"])) for _, r in found]
        assert images.y.tolist() == [int(row["ClassId"]) for _, row in found]
        assert images.x.shape == (len(found), 3, 32, 32)
        means = np.stack([x.mean((1, 2)) for x in originals]) / 255
        np.testing.assert_allclose(images.channel_statistics()[0], means.mean(0), atol=1e-3)
        np.testing.assert_allclose(images.x.double().mean((2, 3)).numpy() / 255, means, atol=2e-2)
        for x, original in zip(images.x, originals, strict=True):
            assert original.shape != (3, 32, 32) or np.array_equal(x.numpy(), original)
    assert splits.train.y[0] == 0 and splits.train.y[-1] == 42 and splits.test.y[0] == 16
    tracks = {(path.parent.name, path.name.split("_")[0]) for path, _ in train}
    assert len(splits.train.groups.unique()) == len(tracks)
    kept, held = holdout(splits.train.y, 0.1, 0, splits.train.groups)
    assert splits.train.subset(kept).counts().min() > 0 and len(held) > 0
    says_what_is_missing(splits, "gtsrb")

"""Datasets in their original formats: files written here come back, and files that are missing or damaged are named."""

import gzip
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

import dataset_writers as write
from doubly.data import CIFAR10, CIFAR100, MNIST, STL10, SVHN, FashionMNIST
from doubly.data.download.dataset_files import data_folder, md5
from doubly.data.download.published import PUBLISHED
from doubly.errors import UsageError

part = write.part
zipped = partial(gzip.compress, mtime=0)

BATCHES, TEST = [part(number, 4) for number in range(5)], part(9, 3)
HUNDRED, HUNDRED_TEST = part(10, 12, classes=100), part(11, 3, classes=100)
LARGE, LARGE_TEST = part(12, 3, (3, 96, 96)), part(13, 2, (3, 96, 96))
GRAY, GRAY_TEST = part(14, 5, (1, 28, 28)), part(15, 3, (1, 28, 28))
DIGITS = list("0123456789")
CLOTHES = ["T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
STL10_NAMES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]

FORMATS = {
    "cifar10 python": (CIFAR10(), lambda root: write.cifar10_python(root, BATCHES, TEST)),
    "cifar10 binary": (CIFAR10(), lambda root: write.cifar10_binary(root, BATCHES, TEST)),
    "cifar100 python": (CIFAR100(), lambda root: write.cifar100_python(root, HUNDRED, HUNDRED_TEST)),
    "cifar100 binary": (CIFAR100(), lambda root: write.cifar100_binary(root, HUNDRED, HUNDRED_TEST)),
    "svhn": (SVHN(), lambda root: write.svhn(root, BATCHES[0], TEST)),
    "svhn uncompressed": (SVHN(), lambda root: write.svhn(root, BATCHES[0], TEST, compressed=False)),
    "stl10": (STL10(), lambda root: write.stl10(root, LARGE, LARGE_TEST)),
    "mnist": (MNIST(), lambda root: write.mnist(root, GRAY, GRAY_TEST)),
    "mnist unzipped": (MNIST(), lambda root: write.mnist(root, GRAY, GRAY_TEST, zipped=False)),
    "fashion_mnist": (FashionMNIST(), lambda root: write.mnist(root, GRAY, GRAY_TEST, folder="fashion_mnist")),
}
each_format = pytest.mark.parametrize("name", FORMATS)


def written(root, name):
    source, make = FORMATS[name]
    make(root)
    return source


def joined(parts):
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def check_images(images, x, y):
    assert images.x.dtype is torch.uint8 and images.y.dtype is torch.int64
    assert torch.equal(images.x, torch.as_tensor(x))
    assert images.y.tolist() == list(y)


def refused(source, root, *texts):
    with pytest.raises(UsageError) as caught:
        source.load(root)
    for text in texts:
        assert text in str(caught.value)


EXPECTED = {  # training part, test part, names of the classes
    "cifar10": (joined(BATCHES), TEST, write.THINGS),
    "cifar100": (HUNDRED, HUNDRED_TEST, write.FINE),
    "svhn": (BATCHES[0], TEST, DIGITS),
    "stl10": (LARGE, LARGE_TEST, STL10_NAMES),
    "mnist": (GRAY, GRAY_TEST, DIGITS),
    "fashion_mnist": (GRAY, GRAY_TEST, CLOTHES),
}


@each_format
def test_what_was_written_comes_back(tmp_path, name):
    source = written(tmp_path, name)
    splits = source.load(tmp_path)
    train, test, classes = EXPECTED[name.split()[0]]
    check_images(splits.train, *train)
    check_images(splits.test, *test)
    assert list(splits.train.classes) == list(splits.test.classes) == classes
    assert splits.train.groups is None
    published = PUBLISHED[name.split()[0]]
    assert f"{len(train[1])} of the {published.train:,} published training images" in splits.note
    assert f"{len(test[1])} of the {published.test:,} published test images" in splits.note
    (folder,) = tmp_path.iterdir()
    assert source.load(folder).train.sha256() == splits.train.sha256()  # the files may lie in the root itself


def test_the_root_is_found_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path))
    check_images(written(tmp_path, "svhn").load().test, *TEST)
    assert data_folder(Path("given")) == Path("given")
    monkeypatch.delenv("DOUBLY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert data_folder() == Path("/caches/doubly")


def test_class_names_are_read_from_the_files(tmp_path):
    names = [f"kind_{k}" for k in range(10)]
    write.cifar10_python(tmp_path / "python", BATCHES, TEST, names)
    write.cifar10_binary(tmp_path / "binary", BATCHES, TEST, names)
    write.stl10(tmp_path, LARGE, LARGE_TEST, names)
    for source, root in ((CIFAR10(), "python"), (CIFAR10(), "binary"), (STL10(), ".")):
        assert source.load(tmp_path / root).train.classes == tuple(names)


def test_cifar10_can_be_read_in_part(tmp_path):
    for kind, suffix in (("python", ""), ("binary", ".bin")):
        root = tmp_path / kind
        getattr(write, f"cifar10_{kind}")(root, BATCHES[:2], TEST)
        refused(CIFAR10(), root, f"data_batch_3{suffix}", "missing", "--data.source.batches 2", "data fetch cifar10")
        splits = CIFAR10(batches=2).load(root)
        check_images(splits.train, *joined(BATCHES[:2]))
        check_images(splits.test, *TEST)
        assert "8 of the 50,000 published training images" in splits.note
    for batches in (0, 6, -1):
        with pytest.raises(UsageError, match=f"5 training batches, got batches={batches}"):
            CIFAR10(batches)


def test_a_folder_with_the_name_of_a_file_does_not_hide_the_binary_version(tmp_path):
    (tmp_path / "train").mkdir()
    check_images(written(tmp_path, "cifar100 binary").load(tmp_path).train, *HUNDRED)


def test_svhn_labels_may_be_doubles(tmp_path):
    """MATLAB's default type of numbers."""
    write.svhn(tmp_path, BATCHES[0], TEST)
    x, y = BATCHES[0]
    matrices = {"X": x.transpose(2, 3, 1, 0), "y": np.where(y == 0, 10.0, y)[:, None]}
    savemat(tmp_path / "svhn" / "train_32x32.mat", matrices)
    check_images(SVHN().load(tmp_path).train, x, y)


# --- published files are recognized by their checksums ---


def swap(folder, one, other):
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


def test_the_note_names_files_that_differ_and_is_empty_for_the_published_set(tmp_path, monkeypatch):
    write.svhn(tmp_path, BATCHES[0], BATCHES[1])
    folder = tmp_path / "svhn"
    digests = {name: md5(folder / name) for name in PUBLISHED["svhn"].md5}
    monkeypatch.setitem(PUBLISHED, "svhn", PUBLISHED["svhn"]._replace(md5=digests, train=4, test=4))
    assert SVHN().load(tmp_path).note == ""
    swap(folder, "train_32x32.mat", "test_32x32.mat")  # the same number of images, and labels that fit
    refused(SVHN(), tmp_path, "train_32x32.mat is the published file test_32x32.mat of svhn")
    write.svhn(tmp_path, part(50, 4), BATCHES[1])
    note = SVHN().load(tmp_path).note
    assert "train_32x32.mat differ from the published" in note
    assert "test_32x32.mat" not in note and "images" not in note


def test_files_of_another_dataset_are_refused(tmp_path, monkeypatch):
    """MNIST and Fashion-MNIST have files of equal names and sizes."""
    write.mnist(tmp_path, GRAY, GRAY_TEST)
    clothes = PUBLISHED["fashion_mnist"]
    digests = {**clothes.md5, "train-images-idx3-ubyte.gz": md5(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")}
    monkeypatch.setitem(PUBLISHED, "fashion_mnist", clothes._replace(md5=digests))
    refused(MNIST(), tmp_path, "mnist/train-images-idx3-ubyte.gz", "is the published file", "of fashion_mnist")


def test_all_files_are_taken_from_one_folder(tmp_path):
    write.mnist(tmp_path, GRAY, GRAY_TEST)
    write.mnist(tmp_path, GRAY_TEST, GRAY, folder="MNIST/raw")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    refused(MNIST(), tmp_path, "t10k-labels-idx1-ubyte.gz", "missing")


# --- missing, truncated and other files ---


@each_format
def test_each_file_that_is_missing_or_truncated_is_named(tmp_path, name):
    source = written(tmp_path, name)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        if path.name in ("coarse_label_names.txt", "class_names.txt"):  # not needed
            continue
        moved = path.rename(tmp_path / "moved")
        # Without its first file, nothing indicates the binary version.
        refused(source, tmp_path, "meta" if path.name in ("train.bin", "data_batch_1.bin") else path.name)
        moved.rename(path)
        content = path.read_bytes()
        size = len(content)
        for length in {0, 1, 5, size // 3 + 1, size // 2 + 1, size - 9, size - 1} & set(range(size)):
            if path.suffix != ".txt":
                path.write_bytes(content[:length])
                refused(source, tmp_path, path.name)
        path.write_bytes(content)
    source.load(tmp_path)


def test_binary_batches_cut_between_images_are_noted(tmp_path):
    for name, file, record in (("cifar10 binary", "test_batch.bin", 3073), ("cifar100 binary", "test.bin", 3074)):
        source = written(tmp_path, name)
        (path,) = tmp_path.rglob(file)
        path.write_bytes(path.read_bytes()[: 2 * record])
        assert "2 of the 10,000 published test images" in source.load(tmp_path).note


def test_other_files_of_the_same_name_are_refused(tmp_path):
    bad_names = [b"\xff\xfe%d" % k for k in range(100)]  # no UTF-8
    html, pickled = b"<html>Not found</html>" * 20, write.pickled
    for name, file, content, text in (
        ("cifar10 python", "data_batch_1", html, "replace it with the original"),
        ("cifar10 python", "data_batch_1", pickled([1, 2]), "no dictionary"),
        ("cifar10 python", "data_batch_1", pickled({b"labels": [1]}), "lacks rows of 3072 bytes"),
        ("cifar10 python", "batches.meta", pickled({b"names": [b"a"]}), "no label_names"),
        ("cifar10 python", "batches.meta", pickled({b"label_names": 3}), "no label_names"),
        ("cifar10 python", "batches.meta", pickled({b"label_names": bad_names}), "no label_names"),
        ("cifar10 binary", "batches.meta.txt", b"\n".join(bad_names), "class names"),
        ("cifar10 binary", "data_batch_1.bin", b"", "truncated: its 0 bytes"),
        ("cifar100 python", "meta", pickled({b"label_names": [b"a"]}), "no fine_label_names"),
        ("cifar100 binary", "fine_label_names.txt", b"\n".join(bad_names), "class names"),
        ("cifar100 binary", "test.bin", bytes(3073), "no multiple of 3074"),
        ("stl10", "class_names.txt", b"\n".join(bad_names), "class names"),
        ("svhn", "train_32x32.mat", html, "replace it with the original"),
        ("mnist", "train-images-idx3-ubyte.gz", html, "replace it with the original"),
        ("mnist", "train-images-idx3-ubyte.gz", zipped(b"\0\0\x0d\3" + bytes(100)), "no idx file of bytes"),
        ("mnist", "train-images-idx3-ubyte.gz", zipped(b"\0\0\x08\3" + b"\xff" * 12), "truncated: its header says"),
    ):
        root = tmp_path / name
        source = written(root, name)
        (folder,) = root.iterdir()
        (folder / file).write_bytes(content)
        refused(source, root, file, text)


def test_batches_with_odd_content_are_refused(tmp_path):
    write.cifar10_python(tmp_path, BATCHES, TEST)
    good = {"batch_label": b"training batch 1 of 5", "labels": [0] * 4, "data": np.zeros((4, 3072), np.uint8)}
    for change in (
        {"labels": [1, [2], 3]},
        {"labels": [[[[1]]]] * 4},
        {"labels": [b"cat"] * 4},
        {"labels": [None] * 4},
        {"labels": np.zeros(4, np.uint8)},
        {"batch_label": np.zeros(4, np.uint8)},
        {"batch_label": [b"training batch 1 of 5"]},
        {"data": np.zeros((4, 3071), np.uint8)},
        {"data": np.zeros((4, 3, 32, 32), np.uint8)},
        {"data": [0] * 4},
        {"data": b"0" * 3072},
    ):
        batch = write.pickled({key.encode(): value for key, value in (good | change).items()})
        (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(batch)
        refused(CIFAR10(batches=1), tmp_path, "data_batch_1")


def test_swapped_files_are_refused(tmp_path):
    for number, (name, one, other, text) in enumerate(
        (
            ("cifar10 python", "data_batch_1", "data_batch_2", "training batch 2 of 5"),
            ("cifar10 python", "data_batch_1", "test_batch", "testing batch 1 of 1"),
            ("cifar100 python", "train", "test", "testing batch 1 of 1"),
            ("mnist", "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "may be swapped"),
            ("mnist unzipped", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "may be swapped"),
            ("mnist", "train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", "3 images and 5 labels"),
            ("stl10", "train_X.bin", "train_y.bin", "truncated or swapped"),
            ("stl10", "train_X.bin", "test_X.bin", "truncated or swapped"),
        )
    ):
        root = tmp_path / str(number)
        source = written(root, name)
        (folder,) = root.iterdir()
        swap(folder, one, other)
        refused(source, root, one, text)


def test_the_same_images_twice_are_refused(tmp_path):
    for number, (source, make, *texts) in enumerate(
        (
            (CIFAR100(), lambda root: write.cifar100_python(root, HUNDRED, HUNDRED), "train and test"),
            (SVHN(), lambda root: write.svhn(root, TEST, TEST), "train and test"),
            (STL10(), lambda root: write.stl10(root, LARGE, LARGE), "train and test"),
            (MNIST(), lambda root: write.mnist(root, GRAY, GRAY), "train and test"),
            # A binary batch does not contain its number.
            (
                *(CIFAR10(), lambda root: write.cifar10_binary(root, [*BATCHES[:4], BATCHES[1]], TEST)),
                *("data_batch_2.bin", "data_batch_5.bin"),
            ),
            (
                *(CIFAR10(), lambda root: write.cifar10_binary(root, [TEST, *BATCHES[1:]], TEST)),
                *("data_batch_1.bin", "test_batch.bin"),
            ),
        )
    ):
        make(tmp_path / str(number))
        refused(source, tmp_path / str(number), *texts, "have the same images")


def shorter(x, y):
    return x, y[:-1]


def last(label, x, y):
    return x, np.r_[y[:-1], label]


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path):
    zero_based = {"X": BATCHES[0][0].transpose(2, 3, 1, 0), "y": np.arange(4, dtype=np.uint8)[:, None]}
    for number, (source, make, text) in enumerate(
        (
            (CIFAR10(1), lambda r: write.cifar10_python(r, [shorter(*BATCHES[0])], TEST), "data_batch_1: got 4 images"),
            (CIFAR10(1), lambda r: write.cifar10_python(r, BATCHES[:1], shorter(*TEST)), "test_batch: got 3 images"),
            (CIFAR100(), lambda r: write.cifar100_python(r, shorter(*HUNDRED), HUNDRED_TEST), "train: got 12 images"),
            (SVHN(), lambda r: write.svhn(r, BATCHES[0], shorter(*TEST)), "test_32x32.mat: got 3 images"),
            (STL10(), lambda r: write.stl10(r, LARGE, shorter(*LARGE_TEST)), "test_X.bin and test_y.bin"),
            (MNIST(), lambda r: write.mnist(r, shorter(*GRAY), GRAY_TEST), "train-images-idx3-ubyte.gz: got 5 images"),
            (CIFAR10(1), lambda r: write.cifar10_python(r, BATCHES[:1], last(10, *TEST)), "test_batch: labels"),
            (CIFAR10(1), lambda r: write.cifar10_python(r, [last(-1, *BATCHES[0])], TEST), "data_batch_1: labels"),
            (
                *(CIFAR10(2), lambda r: write.cifar10_binary(r, [BATCHES[0], last(10, *BATCHES[1])], TEST)),
                "data_batch_2.bin: labels",
            ),
            (CIFAR100(), lambda r: write.cifar100_binary(r, HUNDRED, last(100, *HUNDRED_TEST)), "test.bin: labels"),
            (SVHN(), lambda r: write.svhn(r, BATCHES[0], last(11, *TEST)), "test_32x32.mat has labels other than"),
            (
                *(SVHN(), lambda r: (write.svhn(r, TEST, TEST), savemat(r / "svhn" / "train_32x32.mat", zero_based))),
                "train_32x32.mat has labels other than SVHN's 1 to 10",
            ),
            (STL10(), lambda r: write.stl10(r, last(10, *LARGE), LARGE_TEST), "train_y.bin has labels from 1 to 11"),
            (STL10(), lambda r: write.stl10(r, LARGE, last(-1, *LARGE_TEST)), "test_y.bin has labels from 0 to"),
            (MNIST(), lambda r: write.mnist(r, GRAY, last(10, *GRAY_TEST)), "t10k-images-idx3-ubyte.gz: labels"),
        )
    ):
        make(tmp_path / str(number))
        refused(source, tmp_path / str(number), text)


def test_matlab_files_with_other_matrices_are_refused(tmp_path):
    write.svhn(tmp_path, BATCHES[0], TEST)
    x, ones = BATCHES[0][0].transpose(2, 3, 1, 0), np.ones((4, 1), np.uint8)
    for matrices in (
        {"X": x},
        {"y": ones},
        {"X": x.astype(float), "y": ones},
        {"X": BATCHES[0][0], "y": ones},
        {"X": {"a": 1}, "y": ones},
        *({"X": x, "y": y} for y in ("abcd", {"a": 1}, np.array([1, 2, np.nan, 3]), np.array([1, 2, 2.5, 3]))),
    ):
        savemat(tmp_path / "svhn" / "train_32x32.mat", matrices)
        refused(SVHN(), tmp_path, "train_32x32.mat")

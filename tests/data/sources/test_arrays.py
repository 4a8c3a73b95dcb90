import gc
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from doubly.data import Arrays
from doubly.errors import UsageError

OURS = ("x_train", "y_train", "x_test", "y_test")
MEDMNIST = ("train_images", "train_labels", "test_images", "test_labels")
FORMATS = ("npz", "safetensors")


def pixels(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def values(x=None, y=None, *, names=OURS, shape=(3, 6, 7)):
    """Nine images of three classes to train on and four to test on."""
    x = pixels(9, *shape) if x is None else x
    y = np.arange(9) % 3 if y is None else y
    x_test = pixels(4, *x.shape[1:], seed=1)
    x_test = (x_test / 255).astype(x.dtype) if x.dtype.kind == "f" else x_test.astype(x.dtype)
    return dict(zip(names, (x, y, x_test, np.array([2, 1, 0, 1])), strict=True))


@pytest.fixture
def write(tmp_path):
    """Write the arrays to a file data.SUFFIX, and return its folder."""

    def written(arrays, suffix="npz", classes=None):
        path = tmp_path / f"data.{suffix}"
        if suffix == "npz":
            np.savez(path, **arrays, **({} if classes is None else {"classes": np.array(classes)}))
        else:
            metadata = None if classes is None else {"classes": json.dumps(classes)}
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, metadata)
        return tmp_path

    return written


def load(root, suffix="npz", **options):
    return Arrays(f"data.{suffix}", **options).load(root)


def refused(root, *texts, suffix="npz", **options):
    with pytest.raises(UsageError) as caught:
        load(root, suffix, **options)
    for text in (f"data.{suffix}", *texts):
        assert text in str(caught.value)


def test_both_formats_and_both_ways_to_name_the_arrays(write):
    for suffix in FORMATS:
        for names in (OURS, MEDMNIST):
            arrays = values(names=names)
            others = {"val_images": pixels(2, 3, 6, 7), "val_labels": np.array([0, 99])}
            splits = load(write({**arrays, **others}, suffix), suffix)
            for part, x, y in ((splits.train, *names[:2]), (splits.test, *names[2:])):
                assert part.x.dtype is torch.uint8 and torch.equal(part.x, torch.from_numpy(arrays[x]))
                assert part.y.dtype is torch.int64 and part.y.tolist() == arrays[y].tolist()
                assert torch.equal(part.ids, torch.arange(len(part))) and part.classes == ("0", "1", "2")
            assert splits.note == ""


def test_channels_may_come_last_or_be_absent(write):
    for suffix in FORMATS:
        for channels in (1, 3, 4):
            arrays = values(shape=(6, 7, channels))
            splits = load(write(arrays, suffix), suffix)
            assert torch.equal(splits.train.x, torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2))
            assert splits.train.x.is_contiguous() and splits.test.x.shape == (4, channels, 6, 7)
        arrays = values(shape=(28, 28))
        assert torch.equal(load(write(arrays, suffix), suffix).train.x[:, 0], torch.tensor(arrays["x_train"]))
    for shape in ((3, 4, 4), (1, 6, 3), (3, 6, 4), (3, 2, 2)):  # narrow images with channels first
        arrays = values(shape=shape)
        assert torch.equal(load(write(arrays)).train.x, torch.from_numpy(arrays["x_train"]))


def test_floats_of_any_size_and_byte_order_become_float32(write):
    for kind in ("<f2", "<f4", "<f8", ">f4"):
        arrays = values((pixels(9, 3, 6, 7) / 255).astype(kind))
        for suffix in FORMATS if kind[0] == "<" else ("npz",):
            x = load(write(arrays, suffix), suffix).train.x
            assert x.dtype is torch.float32 and torch.equal(x, torch.from_numpy(arrays["x_train"].astype("<f4")))


def test_labels_may_be_a_column(write):
    for suffix in FORMATS:
        for kind in (np.uint8, np.int32, np.int64):
            flat = (np.arange(9) % 3).astype(kind)
            splits = load(write(values(y=flat[:, None]), suffix), suffix)
            assert splits.train.y.tolist() == flat.tolist() and splits.train.y.dtype is torch.int64


def test_class_names_come_from_the_option_or_the_file_or_are_numbers(write):
    for suffix in FORMATS:
        root = write(values(), suffix, ["ant", "bee", "käfer"])
        splits = load(root, suffix)
        assert splits.train.classes == splits.test.classes == ("ant", "bee", "käfer")
        assert load(root, suffix, classes=("x", "y", "z", "unused")).train.classes == ("x", "y", "z", "unused")
    assert load(write(values(), classes=[b"ant", b"bee", b"cow"])).train.classes == ("ant", "bee", "cow")
    splits = load(write({**values(), "y_test": np.array([0, 1, 2, 5])}))
    assert splits.train.classes == splits.test.classes == ("0", "1", "2", "3", "4", "5")
    arrays = {**values(y=np.array([4, *range(4), *range(4)])), "y_test": np.array([0, 1, 0, 1])}
    assert load(write(arrays)).test.classes == ("0", "1", "2", "3", "4")


def test_labels_and_class_names_that_do_not_fit_are_refused(write, tmp_path):
    for suffix in FORMATS:
        refused(write(values(), suffix, ["ant", "bee"]), "0 to 2", "0 to 1", suffix=suffix)
        refused(write(values(), suffix), "0 to 2", "0 to 1", suffix=suffix, classes=("ant", "bee"))
        refused(write({**values(), "y_test": np.array([0, 1, 0, 3])}, suffix, ["a", "b", "c"]), "0 to 3", suffix=suffix)
        for classes in ("abc", 3):
            refused(write(values(), suffix, classes), "classes", suffix=suffix)
    save_file(values(), tmp_path / "data.safetensors", {"classes": "ant, bee"})
    refused(tmp_path, "cannot be read", suffix="safetensors")


class Trap:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_the_file_is_refused_and_not_executed(write, tmp_path):
    sprung = tmp_path / "sprung"
    trap = np.empty(1, dtype=object)
    trap[0] = Trap(sprung)
    for name in ("x_train", "y_test", "classes", "unrelated"):
        root = write({**values(), name: trap})
        refused(root, "without pickles")
        assert not sprung.exists()
        with np.load(root / "data.npz", allow_pickle=True) as file:
            file[name]
        sprung.unlink()  # it would have run
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, trap)
    refused(tmp_path, "without pickles")
    trap.dump(tmp_path / "data.npz")
    refused(tmp_path, "without pickles")
    assert not sprung.exists()


def test_missing_arrays_and_files_are_named(write, tmp_path, monkeypatch):
    refused(tmp_path, "there is no file", "--data-root")
    for suffix in FORMATS:
        for missing in OURS:
            arrays = {name: array for name, array in values().items() if name != missing}
            part = missing.partition("_")[2]
            texts = (f"x_{part}", f"{part}_labels", ", ".join(sorted(arrays)))
            refused(write(arrays, suffix), *texts, suffix=suffix)
    monkeypatch.chdir(write(values()))
    assert len(load(None).train) == 9  # without a root, in the working directory


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # numpy leaves a broken archive open
def test_damaged_and_other_files_are_refused(write, tmp_path):
    for suffix in FORMATS:
        path = write(values(), suffix) / f"data.{suffix}"
        content = path.read_bytes()
        for cut in (0.0, 0.1, 0.5, 0.99):
            path.write_bytes(content[: int(cut * len(content))])
            refused(tmp_path, "cannot be read", "truncated", suffix=suffix)
        for other in (b"text", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"[]"):
            path.write_bytes(other)
            refused(tmp_path, "cannot be read", suffix=suffix)
    flipped = bytearray((write(values()) / "data.npz").read_bytes())
    flipped[400] ^= 1  # inside the first array
    (tmp_path / "data.npz").write_bytes(flipped)
    refused(tmp_path, "cannot be read")
    gc.collect()  # now, so that no later test gets that warning


def test_arrays_that_are_no_labeled_images_are_refused(write):
    for value in (1.5, -0.01, 255.0, float("nan")):
        x = np.zeros((9, 3, 6, 7), np.float32)
        x[4, 1, 2, 3] = value
        expected = ("1 of 9 have NaN pixels",) if value != value else (f"{value:g}", "divide gray levels by 255")
        refused(write(values(x)), *expected)
    for arrays, text in (
        (values(np.zeros((9, 3, 6, 7), np.int64)), "int64"),
        (values(np.zeros((9, 3, 6, 7), np.uint16)), "uint16"),
        (values(np.zeros((9, 3, 6, 7), bool)), "bool"),
        (values(np.zeros((9, 3, 6, 7), np.complex64)), "complex64"),
        (values(np.zeros((9, 3, 6, 7), "U1")), "uint8 or floats"),
        (values(pixels(9, 3 * 6 * 7)), "(N, C, H, W)"),
        (values(pixels(9, 5, 6, 7)), "1 to 4 channels"),
        ({**values(), "x_test": pixels(4, 3, 6, 8)}, "image shape"),
        ({**values(), "x_test": pixels(4, 6, 7)}, "image shape"),
        (values(y=np.arange(8) % 3), "9 images and 8 labels"),
        ({**values(), "x_train": pixels(0, 3, 6, 7), "y_train": np.arange(0)}, "at least one"),
        (values(y=np.eye(3, dtype=np.int64)[np.arange(9) % 3]), "one-hot"),
        (values(y=np.arange(9) % 3 - 1), "from -1 to 1"),
        (values(y=np.arange(9) + 10**6), "number the classes from 0"),
        (values(y=np.arange(9) / 9), "one integer per image"),
        (values(y=np.array(list("abcabcabc"))), "one integer per image"),
        (values(y=np.array([0.0] * 8 + [np.nan])), "one integer per image"),
        ({**values(), "y_train": np.array(1)}, "one integer per image"),
    ):
        refused(write(arrays), text)

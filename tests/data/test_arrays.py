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
both_formats = pytest.mark.parametrize("suffix", ["npz", "safetensors"])


def pixels(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def values(x=None, y=None, *, names=OURS, shape=(3, 6, 7)):
    """Nine images of three classes to train on and four to test on."""
    x = pixels(9, *shape) if x is None else x
    y = np.arange(9) % 3 if y is None else y
    return dict(
        zip(names, (x, y, pixels(4, *x.shape[1:], seed=1).astype(x.dtype), np.array([2, 1, 0, 1])), strict=True)
    )


@pytest.fixture
def write(tmp_path):
    """The arrays in a file data.SUFFIX; returns its folder."""

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


@both_formats
@pytest.mark.parametrize("names", [OURS, MEDMNIST], ids=["ours", "medmnist"])
def test_both_formats_and_both_ways_to_name_the_arrays(write, suffix, names):
    arrays = values(names=names)
    splits = load(write(arrays, suffix), suffix)
    for part, n, m in ((splits.train, names[0], names[1]), (splits.test, names[2], names[3])):
        assert part.x.dtype is torch.uint8 and torch.equal(part.x, torch.from_numpy(arrays[n]))
        assert part.y.dtype is torch.int64 and part.y.tolist() == arrays[m].tolist()
        assert torch.equal(part.ids, torch.arange(len(part))) and part.classes == ("0", "1", "2")
    assert splits.note == ""


@both_formats
def test_other_arrays_are_passed_over(write, suffix):
    arrays = values(names=MEDMNIST)
    more = {"val_images": pixels(2, 3, 6, 7), "val_labels": np.array([0, 99])}
    splits = load(write({**arrays, **more}, suffix), suffix)
    assert len(splits.train) == 9 and splits.train.classes == ("0", "1", "2")


@both_formats
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channels_may_come_last(write, suffix, channels):
    arrays = values(shape=(6, 7, channels))
    splits = load(write(arrays, suffix), suffix)
    assert splits.train.x.shape == (9, channels, 6, 7)
    assert torch.equal(splits.train.x, torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2))
    assert splits.train.x.is_contiguous() and splits.test.x.shape == (4, channels, 6, 7)


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 6, 3), (3, 6, 4), (3, 2, 2)])
def test_narrow_images_with_channels_first_stay_as_they_are(write, shape):
    arrays = values(shape=shape)
    assert torch.equal(load(write(arrays)).train.x, torch.from_numpy(arrays["x_train"]))


@both_formats
def test_gray_images_need_no_channel(write, suffix):
    arrays = values(shape=(28, 28))
    splits = load(write(arrays, suffix), suffix)
    assert splits.train.x.shape == (9, 1, 28, 28) and torch.equal(splits.train.x[:, 0], torch.tensor(arrays["x_train"]))


@both_formats
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_floats_stay_floats(write, suffix, kind):
    arrays = values((pixels(9, 3, 6, 7) / 255).astype(kind))
    arrays["x_test"] = (pixels(4, 3, 6, 7) / 255).astype(kind)
    splits = load(write(arrays, suffix), suffix)
    assert splits.train.x.dtype is torch.float32
    assert torch.equal(splits.train.x, torch.from_numpy(arrays["x_train"]).float())


@both_formats
@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_labels_may_be_a_column(write, suffix, kind):
    flat = (np.arange(9) % 3).astype(kind)
    splits = load(write(values(y=flat[:, None]), suffix), suffix)
    assert splits.train.y.tolist() == flat.tolist() and splits.train.y.dtype is torch.int64


def test_one_hot_labels_are_refused(write):
    refused(write(values(y=np.eye(3, dtype=np.int64)[np.arange(9) % 3])), "one-hot")


# Names of the classes


@both_formats
def test_the_file_may_name_the_classes(write, suffix):
    splits = load(write(values(), suffix, ["ant", "bee", "käfer"]), suffix)
    assert splits.train.classes == splits.test.classes == ("ant", "bee", "käfer")


@both_formats
def test_the_option_comes_before_the_file(write, suffix):
    root = write(values(), suffix, ["ant", "bee", "cow"])
    assert load(root, suffix, classes=("x", "y", "z", "never seen")).train.classes == ("x", "y", "z", "never seen")


def test_without_names_the_classes_of_both_parts_are_numbered(write):
    arrays = {**values(), "y_test": np.array([0, 1, 2, 5])}
    splits = load(write(arrays))
    assert splits.train.classes == splits.test.classes == ("0", "1", "2", "3", "4", "5")
    arrays = {**values(y=np.array([4, *range(4), *range(4)])), "y_test": np.array([0, 1, 0, 1])}
    assert load(write(arrays)).test.classes == ("0", "1", "2", "3", "4")


@both_formats
def test_a_label_outside_the_names_is_refused(write, suffix):
    refused(write(values(), suffix, ["ant", "bee"]), "0 to 2", "0 to 1", suffix=suffix)
    refused(write(values(), suffix), "0 to 2", "0 to 1", suffix=suffix, classes=("ant", "bee"))
    refused(write({**values(), "y_test": np.array([0, 1, 0, 3])}, suffix, ["a", "b", "c"]), "0 to 3", suffix=suffix)


def test_a_label_below_0_is_refused(write):
    refused(write(values(y=np.arange(9) % 3 - 1)), "from -1 to 1")


def test_names_in_bytes_are_decoded(write):
    assert load(write(values(), classes=[b"ant", b"bee", b"cow"])).train.classes == ("ant", "bee", "cow")


@pytest.mark.parametrize(
    ("suffix", "classes"), [("npz", "abc"), ("npz", 3), ("safetensors", 3), ("safetensors", "abc")]
)
def test_names_that_are_no_list_are_refused(write, suffix, classes):
    refused(write(values(), suffix, classes), "classes", suffix=suffix)


def test_names_that_are_no_json_are_refused(tmp_path):
    save_file(values(), tmp_path / "data.safetensors", {"classes": "ant, bee"})
    refused(tmp_path, "cannot be read", suffix="safetensors")


# What is refused


class Trap:
    """Unpickling it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["x_train", "y_test", "classes", "unrelated"])
def test_a_pickle_in_the_file_runs_nothing_and_is_refused(write, tmp_path, name):
    trap = np.empty(1, dtype=object)
    trap[0] = Trap(tmp_path / "sprung")
    root = write({**values(), name: trap})
    refused(root, "without pickles")
    assert not (tmp_path / "sprung").exists()
    with np.load(root / "data.npz", allow_pickle=True) as file:
        file[name]
    assert (tmp_path / "sprung").exists()  # it would have run


def test_a_bare_pickle_runs_nothing_and_is_refused(tmp_path):
    trap = np.empty(1, dtype=object)
    trap[0] = Trap(tmp_path / "sprung")
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, trap)
    refused(tmp_path, "without pickles")
    trap.dump(tmp_path / "data.npz")
    refused(tmp_path, "without pickles")
    assert not (tmp_path / "sprung").exists()


@both_formats
@pytest.mark.parametrize("missing", OURS)
def test_a_missing_array_is_refused_with_what_there_is(write, suffix, missing):
    arrays = {name: array for name, array in values().items() if name != missing}
    part = missing.partition("_")[2]
    refused(write(arrays, suffix), f"x_{part}", f"{part}_labels", ", ".join(sorted(arrays)), suffix=suffix)


def test_a_missing_file_is_refused_with_the_remedy(tmp_path):
    refused(tmp_path, "there is no file", "--data-root")
    (tmp_path / "data.npz").mkdir()
    refused(tmp_path, "there is no file")


def test_without_a_root_the_file_is_looked_for_here(write, monkeypatch):
    monkeypatch.chdir(write(values()))
    assert len(load(None).train) == 9


@both_formats
@pytest.mark.parametrize("cut", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # numpy leaves a broken archive open
def test_a_truncated_file_is_refused(write, suffix, cut):
    root = write(values(), suffix)
    path = root / f"data.{suffix}"
    path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
    refused(root, "cannot be read", "cut short", suffix=suffix)
    gc.collect()  # here, so that no later test gets that warning


def test_a_flipped_bit_in_an_archive_is_refused(write):
    root = write(values())
    content = bytearray((root / "data.npz").read_bytes())
    content[400] ^= 1  # inside the first array
    (root / "data.npz").write_bytes(content)
    refused(root, "cannot be read")


@pytest.mark.parametrize("content", [b"text", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"[]"])
@both_formats
def test_another_file_is_refused(tmp_path, suffix, content):
    (tmp_path / f"data.{suffix}").write_bytes(content)
    refused(tmp_path, "cannot be read", suffix=suffix)


@both_formats
@pytest.mark.parametrize("value", [1.5, -0.01, 255.0, float("nan")])
def test_floats_out_of_range_are_refused_with_the_remedy(write, suffix, value):
    x = np.zeros((9, 3, 6, 7), np.float32)
    x[4, 1, 2, 3] = value
    refused(write(values(x), suffix), f"{value:g}", "divide gray levels by 255", suffix=suffix)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (values(np.zeros((9, 3, 6, 7), np.int64)), "int64"),
        (values(np.zeros((9, 3, 6, 7), np.uint16)), "uint16"),
        (values(np.zeros((9, 3, 6, 7), bool)), "bool"),
        (values(np.zeros((9, 3, 6, 7), np.complex64)), "complex64"),
        (values(y=np.arange(8) % 3), "9 images and 8 labels"),
        (values(y=np.arange(9) / 9), "one integer per image"),
        ({**values(), "x_test": pixels(4, 3, 6, 8)}, "image shape"),
        ({**values(), "x_test": pixels(4, 6, 7)}, "image shape"),
        (values(pixels(9, 3 * 6 * 7)), "(N, C, H, W)"),
        ({**values(), "y_train": np.array(1)}, "one integer per image"),
        ({**values(), "x_train": pixels(0, 3, 6, 7), "y_train": np.arange(0)}, "at least one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_are_no_labeled_images_are_refused(write, arrays, text):
    refused(write(arrays), text)


@pytest.mark.parametrize("y", [np.array(list("abcabcabc")), np.array([0.0] * 8 + [np.nan])], ids=["text", "nan"])
def test_labels_that_are_no_numbers_are_refused(write, y):
    refused(write(values(y=y)), "one integer per image")


def test_pixels_that_are_text_are_refused(write):
    refused(write(values(np.zeros((9, 3, 6, 7), "U1"))), "uint8 or floats")


def test_either_byte_order_is_read(write):
    arrays = values((pixels(9, 3, 6, 7) / 255).astype(">f4"))
    arrays["x_test"] = (pixels(4, 3, 6, 7) / 255).astype(">f4")
    assert torch.equal(load(write(arrays)).train.x, torch.from_numpy(arrays["x_train"].astype("<f4")))

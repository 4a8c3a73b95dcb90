"""The real files, where DOUBLY_DATA names a folder with them. What is expected is read from their bytes by other means
than the readers'."""

import csv
import re
import zlib

import numpy as np

from doubly.data import CIFAR10, GTSRB, STL10, SVHN
from doubly.data.download.dataset_files import md5
from doubly.data.download.published import PUBLISHED
from doubly.data.holdout import holdout

THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def channel_means(x):
    return x.mean((0, 2, 3), dtype=np.float64) / 255


def check_images(images, x, y):
    assert images.x.shape == x.shape
    assert images.y.tolist() == list(y)
    np.testing.assert_allclose(images.channel_statistics()[0], channel_means(x), atol=1e-3)
    for row in (0, len(x) // 2, -1):
        np.testing.assert_array_equal(images.x[row].numpy(), x[row])


def check_note(splits, dataset):
    published = PUBLISHED[dataset]
    for name, images, count in (("training", splits.train, published.train), ("test", splits.test, published.test)):
        text = f"{len(images):,} of the {count:,} published {name} images"
        assert (text in splits.note) == (len(images) != count)


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
    check_images(splits.train, *(np.concatenate(part) for part in zip(*map(raw, files[:-1]), strict=True)))
    check_images(splits.test, *raw("test_batch"))
    assert splits.train.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert splits.test.y[:5].tolist() == [3, 8, 8, 0, 6] and splits.test.y[-3:].tolist() == [5, 1, 7]
    assert splits.test.counts().tolist() == [1000] * 10
    assert splits.train.classes == THINGS
    assert "differ" not in splits.note
    check_note(splits, "cifar10")
    # Two batches have nearly the mean of all five.
    np.testing.assert_allclose(splits.train.channel_statistics()[0], [0.4914, 0.4822, 0.4465], atol=5e-3)


def test_real_svhn(real_data):
    def raw(path):
        """Read a header of 128 bytes and zipped variables; the values are at the end of each, columns first."""
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
        check_images(images, *raw(real_data / "svhn" / f"{name}_32x32.mat"))
    assert splits.train.y[:6].tolist() == [1, 9, 2, 3, 2, 5] and splits.test.y[:4].tolist() == [5, 2, 1, 0]
    check_note(splits, "svhn")
    # A part of the images is a file of its own.
    assert ("differ from the published" in splits.note) == (len(splits.train) != 73_257)


def test_real_stl10(real_data):
    folder = real_data / "stl10_binary"
    splits = STL10().load(real_data)
    for name, images in (("train", splits.train), ("test", splits.test)):
        x = np.fromfile(folder / f"{name}_X.bin", np.uint8).reshape((96, 96, 3, -1), order="F").transpose(3, 2, 0, 1)
        check_images(images, x, np.fromfile(folder / f"{name}_y.bin", np.uint8) - 1)
        assert len(set(images.counts().tolist())) == 1
    assert splits.train.classes == tuple((folder / "class_names.txt").read_text().split())
    check_note(splits, "stl10")


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
    for expected, images in ((train, splits.train), (test, splits.test)):
        originals = [pixels(path) for path, _ in expected]
        assert [(x.shape[2], x.shape[1]) for x in originals] == [
            (int(r["Width"]), int(r["Height"])) for _, r in expected
        ]
        assert images.y.tolist() == [int(row["ClassId"]) for _, row in expected]
        assert images.x.shape == (len(expected), 3, 32, 32)
        means = np.stack([x.mean((1, 2)) for x in originals]) / 255
        np.testing.assert_allclose(images.channel_statistics()[0], means.mean(0), atol=1e-3)
        np.testing.assert_allclose(images.x.double().mean((2, 3)).numpy() / 255, means, atol=2e-2)
        for x, original in zip(images.x, originals, strict=True):
            assert original.shape != (3, 32, 32) or np.array_equal(x.numpy(), original)
    assert splits.train.y[0] == 0 and splits.train.y[-1] == 42 and splits.test.y[0] == 16
    tracks = {(path.parent.name, path.name.split("_")[0]) for path, _ in train}
    assert len(splits.train.groups.unique()) == len(tracks)
    rest, held_out = holdout(splits.train.y, 0.1, 0, splits.train.groups)
    assert splits.train.subset(rest).counts().min() > 0 and len(held_out) > 0
    check_note(splits, "gtsrb")

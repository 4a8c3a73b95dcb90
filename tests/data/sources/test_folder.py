import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from doubly.data import ImageFolder
from doubly.data.mapped_pixels import MappedPixels
from doubly.data.sources.decoding import decode_image
from doubly.data.sources.folder import free_memory
from doubly.errors import UsageError

BYTES = 3 * 5 * 6  # of one picture


def plain(*color):
    return Image.new("RGB", (6, 5), color)


def refused(root, *texts, **options):
    with pytest.raises(UsageError) as caught:
        ImageFolder(**options).load(root)
    for text in texts:
        assert str(text) in str(caught.value)


def test_one_directory_per_class_in_train_and_test(root, noise, monkeypatch):
    splits = ImageFolder().load(root)
    assert splits.train.classes == splits.test.classes == ("ant", "bee", "cow")
    assert splits.train.counts().tolist() == [7, 8, 9] and splits.test.counts().tolist() == [2, 2, 2]
    assert splits.train.x.dtype is torch.uint8 and splits.train.x.shape == (24, 3, 5, 6)
    assert torch.equal(splits.train.ids, torch.arange(24)) and splits.train.groups is None and splits.note == ""
    for images, row, name in ((splits.train, 8, ("train", "bee", 1)), (splits.test, 5, ("test", "cow", 1))):
        assert torch.equal(images.x[row], torch.tensor(np.array(noise(*name))).permute(2, 0, 1))
    monkeypatch.chdir(root.parent)  # which is the data root by default
    for again in (ImageFolder(path="data").load(root.parent), ImageFolder(path="data").load()):
        assert again.train.sha256() == splits.train.sha256()


def test_the_parts_of_a_split_may_have_other_names(root, save, noise):
    before = ImageFolder().load(root)
    old = ("train", "test")
    for new in (
        *(("train", "valid"), ("training", "testing"), ("train", "validation"), ("train", "val")),
        *(("Train", "TEST"), ("train", "Valid")),
    ):
        for source, target in zip(old, new, strict=True):
            (root / source).rename(root / target)
        after, old = ImageFolder().load(root), new
        assert (after.train.sha256(), after.test.sha256()) == (before.train.sha256(), before.test.sha256())
    shutil.copytree(root / "Valid", root / "test")  # test has precedence
    save(root / "Valid" / "ant" / "more.png", noise("more"))
    assert len(ImageFolder().load(root).test) == 6


def test_without_a_split_a_part_of_each_class_is_the_test_set(tmp_path, save):
    for label, count in (("few", 10), ("many", 40), ("single", 1)):
        for number in range(count):
            save(tmp_path / label / f"{number:02d}.png", plain(number, len(label), 0))
    splits = ImageFolder().load(tmp_path)
    assert splits.test.counts().tolist() == [2, 8, 0] and splits.train.counts().tolist() == [8, 32, 1]
    assert torch.equal(torch.cat([splits.train.ids, splits.test.ids]).sort().values, torch.arange(51))
    for part in (splits.train, splits.test):
        assert part.classes == ("few", "many", "single")
        expected = [number if number < 10 else number - 10 if number < 50 else 0 for number in part.ids.tolist()]
        assert part.x[:, 0, 0, 0].tolist() == expected
    again = ImageFolder().load(tmp_path)
    assert torch.equal(again.test.ids, splits.test.ids) and again.test.sha256() == splits.test.sha256()
    assert ImageFolder(test_share=0.4).load(tmp_path).test.counts().tolist() == [4, 16, 0]


def test_train_may_be_a_class_but_not_the_part_of_an_incomplete_split(root, tmp_path, save, noise):
    for label in ("bus", "train", "tram"):
        for number in range(5):
            save(tmp_path / "traffic" / label / f"{number}.png", noise(label, number))
    splits = ImageFolder().load(tmp_path / "traffic")
    assert splits.train.classes == ("bus", "train", "tram") and splits.test.counts().tolist() == [1, 1, 1]
    old = ("train", "test")
    for new in (("train", "unlabeled"), ("Train", "dev"), ("train", "training"), ("test", "val")):
        for source, target in zip(old, new, strict=True):
            (root / source).rename(root / f"{target}_")
        for target in new:
            (root / f"{target}_").rename(root / target)
        refused(root, root, "name the parts train and test")
        old = new


def test_nested_folders_hidden_files_and_suffixes_in_capitals(tmp_path, save):
    for label in ("a", "b"):
        for part in ("train", "test"):
            save(tmp_path / part / label / "1.png", plain(10, 0, 0))
    train = tmp_path / "train"
    save(train / "a" / "deep" / "er" / "2.PNG", plain(20, 0, 0))
    save(train / "a" / "3.JpEg", plain(30, 30, 30))
    save(train / "a" / ".4.png", plain(40, 0, 0))
    save(train / "a" / ".ipynb_checkpoints" / "1-checkpoint.png", plain(50, 0, 0))  # Jupyter's copies
    (train / "a" / "notes.txt").write_text("no picture")
    (train / "a" / "._1.png").write_bytes(b"what macOS leaves in archives")
    (train / ".git").mkdir()
    (train / "README.png").write_bytes(b"a file beside the classes")
    splits = ImageFolder().load(tmp_path)
    assert splits.train.classes == ("a", "b")
    assert splits.train.x[:, 0, 0, 0].tolist() == [10, 30, 20, 10]  # 1.png, 3.JpEg, deep/er/2.PNG; and 1.png of b


def test_a_size_makes_mixed_pictures_alike(root, save, noise):
    path = root / "train" / "ant" / "0.png"
    save(path, noise("large", width=20, height=31))
    for fit in ("crop", "stretch"):
        splits = ImageFolder(size=4, fit=fit).load(root)
        assert splits.train.x.shape == (24, 3, 4, 4) and splits.test.x.shape == (6, 3, 4, 4)
        assert (splits.train.x[0].numpy() == decode_image(path, 4, fit)).all()
    refused(root, "20x31", "6x5", "--data.source.size")


def test_the_memory_allowed_decides_where_the_images_are(root, monkeypatch):
    for memory, kind in ((24 * BYTES, torch.Tensor), (24 * BYTES - 1, MappedPixels)):
        splits = ImageFolder(memory=memory / 2**30).load(root)
        assert isinstance(splits.train.x, kind) and isinstance(splits.test.x, torch.Tensor)
    assert isinstance(ImageFolder(size=1, memory=24 * 3 / 2**30).load(root).train.x, torch.Tensor)
    assert free_memory() > 2**20
    for free, kind in ((48 * BYTES, torch.Tensor), (48 * BYTES - 2, MappedPixels)):  # half of it, by default
        monkeypatch.setattr("doubly.data.sources.folder.free_memory", lambda free=free: float(free))
        assert isinstance(ImageFolder().load(root).train.x, kind)


def test_the_free_memory_is_guessed_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr("doubly.data.sources.folder.Path.read_text", lambda *arguments: "MemTotal: 1 kB")
    assert free_memory() == 4 * 2**30


def test_folders_that_are_no_dataset_are_refused(root, tmp_path, save, noise):
    refused(tmp_path, tmp_path / "nowhere", "--data-root", "path inside", path="nowhere")
    (tmp_path / "file").write_text("no folder")
    refused(tmp_path, tmp_path / "file", "no folder", path="file")
    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", "it has 0")
    save(tmp_path / "one" / "a" / "0.png", noise(0))
    refused(tmp_path / "one", tmp_path / "one", "two or more classes", "it has 1")
    for part in ("train", "test"):
        save(root / part / "dog" / "0.png", noise("dog"))
        refused(root, root / "train", root / "test", "'dog'", "different classes")
        shutil.rmtree(root / part / "dog")
        files = list((root / part / "bee").iterdir())
        for path in files:
            path.rename(path.with_suffix(".txt"))
        refused(root, root / part / "bee", "no images", ".png", "remove it")
        for path in files:
            path.with_suffix(".txt").rename(path)
    (root / "train" / "ant" / "0.png").write_bytes(b"")  # the first one is also read to see how large they are
    refused(root, root / "train" / "ant" / "0.png", "cannot be read as an image")
    save(root / "train" / "ant" / "0.png", noise("good"))
    for path in (root / "test").rglob("*.png"):
        save(path, noise("odd", width=8))
    refused(root, "image shape", "(3, 5, 6)", "(3, 5, 8)")


def test_settings_that_are_refused():
    nan = float("nan")
    for name, values in (("size", (0, -3)), ("test_share", (0.0, 1.0, nan)), ("memory", (-1.0, nan))):
        for value in values:
            with pytest.raises(UsageError, match=name):
                ImageFolder(**{name: value})

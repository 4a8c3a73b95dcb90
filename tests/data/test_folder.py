import os
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from doubly.data import ImageFolder, PadCropFlip
from doubly.data import mapped as mapped_module
from doubly.data.decoding import decoded, decoded_all
from doubly.data.folder import _free_memory
from doubly.data.loader import batches
from doubly.data.mapped import DAYS, Mapped, mapped
from doubly.errors import UsageError

WIDTH, HEIGHT = 6, 5
BYTES = 3 * HEIGHT * WIDTH
PER_SHARD = 4  # where a test makes the shards small


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing may land in the cache of whoever runs the tests."""
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path):
    """Three classes of 7, 8 and 9 noisy pictures to train on, 2 each to test on: 24 and 6."""
    place = tmp_path / "data"
    for part, counts in (("train", (7, 8, 9)), ("test", (2, 2, 2))):
        for label, count in zip(("ant", "bee", "cow"), counts, strict=True):
            for number in range(count):
                save(place / part / label / f"{number}.png", noise(part, label, number))
    return place


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(mapped_module, "SHARD", PER_SHARD * BYTES + 7)  # the 7 bytes hold no further picture
    monkeypatch.setattr("doubly.data.folder.decoded_all", by_threes)


def by_threes(files, size, fit):
    """Chunks that end elsewhere than the shards do."""
    return decoded_all(files, size, fit, chunk=3)


def noise(*name, width=WIDTH, height=HEIGHT):
    random = np.random.default_rng(list(repr(name).encode()))
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def plain(color, width=WIDTH, height=HEIGHT):
    return Image.new("RGB", (width, height), color)


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def channels_first(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def refused(work, *texts):
    with pytest.raises(UsageError) as caught:
        work()
    for text in texts:
        assert str(text) in str(caught.value)
    return str(caught.value)


# Which files make up which set


def test_one_directory_per_class_in_train_and_test(root):
    splits = ImageFolder().load(root)
    assert splits.train.classes == splits.test.classes == ("ant", "bee", "cow")
    assert splits.train.counts().tolist() == [7, 8, 9] and splits.test.counts().tolist() == [2, 2, 2]
    assert splits.train.x.dtype is torch.uint8 and splits.train.x.shape == (24, 3, HEIGHT, WIDTH)
    assert torch.equal(splits.train.ids, torch.arange(24)) and splits.train.groups is None and splits.note == ""
    assert torch.equal(splits.train.x[8], channels_first(noise("train", "bee", 1)))
    assert torch.equal(splits.test.x[5], channels_first(noise("test", "cow", 1)))


def test_val_stands_in_for_test_and_yields_to_it(root):
    expected = ImageFolder().load(root).test
    shutil.copytree(root / "test", root / "val")
    save(root / "val" / "ant" / "more.png", noise("more"))
    assert len(ImageFolder().load(root).test) == 6
    (root / "val" / "ant" / "more.png").unlink()
    shutil.rmtree(root / "test")
    assert ImageFolder().load(root).test.sha256() == expected.sha256()


def test_the_folder_is_looked_for_inside_the_data_root(root):
    assert ImageFolder(path="data").load(root.parent).train.sha256() == ImageFolder().load(root).train.sha256()


def test_without_a_root_the_folder_is_looked_for_here(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    assert ImageFolder(path="data").load().train.sha256() == ImageFolder().load(root).train.sha256()


def test_without_a_split_a_part_of_each_class_is_the_test_set(tmp_path):
    for label, count in (("few", 10), ("many", 40), ("single", 1)):
        for number in range(count):
            save(tmp_path / "d" / label / f"{number:02d}.png", plain((number, len(label), 0)))
    splits = ImageFolder().load(tmp_path / "d")
    assert splits.test.counts().tolist() == [2, 8, 0] and splits.train.counts().tolist() == [8, 32, 1]
    assert torch.equal(torch.cat([splits.train.ids, splits.test.ids]).sort().values, torch.arange(51))
    for part in (splits.train, splits.test):
        assert part.classes == ("few", "many", "single")
        expected = [number if number < 10 else number - 10 if number < 50 else 0 for number in part.ids.tolist()]
        assert part.x[:, 0, 0, 0].tolist() == expected
    again = ImageFolder().load(tmp_path / "d")
    assert torch.equal(again.test.ids, splits.test.ids) and again.test.sha256() == splits.test.sha256()
    assert ImageFolder(test_share=0.4).load(tmp_path / "d").test.counts().tolist() == [4, 16, 0]


def test_train_may_be_the_name_of_a_class(tmp_path):
    for label in ("bus", "train", "tram"):
        for number in range(5):
            save(tmp_path / "d" / label / f"{number}.png", noise(label, number))
    splits = ImageFolder().load(tmp_path / "d")
    assert splits.train.classes == ("bus", "train", "tram") and splits.test.counts().tolist() == [1, 1, 1]


@pytest.mark.parametrize("names", [("train", "valid"), ("training", "testing"), ("train", "validation")])
def test_the_parts_of_a_split_may_have_other_names(root, names):
    before = ImageFolder().load(root)
    for old, new in zip(("train", "test"), names, strict=True):
        (root / old).rename(root / new)
    after = ImageFolder().load(root)
    assert (after.train.sha256(), after.test.sha256()) == (before.train.sha256(), before.test.sha256())


@pytest.mark.parametrize("names", [("Train", "TEST"), ("train", "Valid")])
def test_the_parts_of_a_split_may_be_capitalised(root, names):
    before = ImageFolder().load(root)
    for old, new in zip(("train", "test"), names, strict=True):
        (root / old).rename(root / new)
    assert ImageFolder().load(root).test.sha256() == before.test.sha256()


@pytest.mark.parametrize("names", [("test", "val"), ("train", "training"), ("train", "unlabelled"), ("Train", "dev")])
def test_the_parts_of_a_split_are_no_classes(root, names):
    for old, new in zip(("train", "test"), names, strict=True):
        (root / old).rename(root / f"{new}_")
    for new in names:
        (root / f"{new}_").rename(root / new)
    refused(lambda: ImageFolder().load(root), root)


def test_nested_folders_hidden_files_and_suffixes_in_capitals(tmp_path):
    place = tmp_path / "d"
    for label in ("a", "b"):
        for part in ("train", "test"):
            save(place / part / label / "1.png", plain((10, 0, 0)))
    save(place / "train" / "a" / "deep" / "er" / "2.PNG", plain((20, 0, 0)))
    save(place / "train" / "a" / "3.JpEg", plain((30, 30, 30)))
    save(place / "train" / "a" / ".4.png", plain((40, 0, 0)))
    (place / "train" / "a" / "notes.txt").write_text("no picture")
    (place / "train" / "a" / "._1.png").write_bytes(b"what macOS leaves in archives")
    (place / "train" / ".git").mkdir()
    (place / "train" / "README.png").write_bytes(b"a file beside the classes")
    splits = ImageFolder().load(place)
    assert splits.train.classes == ("a", "b")
    assert splits.train.x[:, 0, 0, 0].tolist() == [10, 30, 20, 10]  # 1.png, 3.JpEg, deep/er/2.PNG; and 1.png of b


def test_hidden_folders_are_passed_over(root):
    # Jupyter keeps copies there: in a folder without a split they would land on both sides.
    save(root / "train" / "ant" / ".ipynb_checkpoints" / "0-checkpoint.png", noise("train", "ant", 0))
    assert ImageFolder().load(root).train.counts().tolist() == [7, 8, 9]


# Decoding


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "ppm", "webp", "bmp", "tif", "tiff", "gif"])
def test_formats(tmp_path, suffix):
    image = plain((200, 40, 120))
    image.paste((10, 220, 90), (0, 0, 3, HEIGHT))
    options = {"lossless": True} if suffix == "webp" else {"quality": 100, "subsampling": 0} if "j" in suffix else {}
    save(tmp_path / f"a.{suffix}", image, **options)
    found = decoded(tmp_path / f"a.{suffix}", None, "crop")
    assert found.dtype == np.uint8 and found.shape == (3, HEIGHT, WIDTH)
    off = np.abs(found.astype(int) - np.array(image).transpose(2, 0, 1)).max()
    assert off <= (12 if "j" in suffix else 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_gray_becomes_three_equal_channels(tmp_path, mode):
    gray = noise("gray").convert("L").convert(mode)
    save(tmp_path / "a.png", gray)
    found = decoded(tmp_path / "a.png", None, "crop")
    assert found.shape == (3, HEIGHT, WIDTH)
    assert (found == np.array(gray.convert("L"))).all()


def test_a_portable_gray_map(tmp_path):
    gray = noise("gray").convert("L")
    save(tmp_path / "a.pgm", gray)
    assert (decoded(tmp_path / "a.pgm", None, "crop") == np.array(gray)).all()


def two_colors():
    image = Image.new("P", (WIDTH, HEIGHT), 0)
    image.putpalette([200, 10, 20, 5, 210, 30])
    image.paste(1, (0, 0, 2, HEIGHT))
    return image


@pytest.mark.parametrize("suffix", ["png", "gif", "bmp"])
def test_palettes_are_looked_up(tmp_path, suffix):
    save(tmp_path / f"a.{suffix}", two_colors())
    found = decoded(tmp_path / f"a.{suffix}", None, "crop")
    assert found[:, 0, 0].tolist() == [5, 210, 30] and found[:, 0, 2].tolist() == [200, 10, 20]


def test_palettes_with_transparent_colors_pass_without_a_warning(tmp_path):
    save(tmp_path / "a.png", two_colors(), transparency=bytes([255, 128]))
    assert decoded(tmp_path / "a.png", None, "crop")[:, 0, 0].tolist() == [5, 210, 30]


def test_transparency_is_dropped(tmp_path):
    image = noise("color")
    image.putalpha(Image.new("L", image.size, 77))
    save(tmp_path / "a.png", image)
    assert (decoded(tmp_path / "a.png", None, "crop") == np.array(noise("color")).transpose(2, 0, 1)).all()


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (6, lambda a: np.rot90(a, -1)),
        (8, lambda a: np.rot90(a, 1)),
    ],
)
def test_pictures_stand_as_the_camera_was_held(tmp_path, orientation, turned):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = noise("photo")
    save(tmp_path / "a.png", image, exif=exif)
    assert (decoded(tmp_path / "a.png", None, "crop") == turned(np.array(image)).transpose(2, 0, 1)).all()
    save(tmp_path / "a.jpg", image, exif=exif)
    assert decoded(tmp_path / "a.jpg", None, "crop").shape[1:] == turned(np.array(image)).shape[:2]


def marked():
    """24 wide and 12 high, black, with red and blue ends and a white square of 8 by 8 in the middle."""
    image = plain((0, 0, 0), 24, 12)
    image.paste((255, 0, 0), (0, 0, 4, 12))
    image.paste((0, 0, 255), (20, 0, 24, 12))
    image.paste((255, 255, 255), (8, 2, 16, 10))
    return image


def extent(bright):
    """(rows, columns) from the first to the last bright pixel."""
    return tuple(int(np.ptp(np.nonzero(bright)[axis])) + 1 for axis in (0, 1))


@pytest.mark.parametrize("upright", [False, True])
def test_crop_keeps_proportions_and_stretch_keeps_the_margins(tmp_path, upright):
    save(tmp_path / "a.png", marked().transpose(Image.Transpose.ROTATE_90) if upright else marked())
    cropped, stretched = (decoded(tmp_path / "a.png", 6, fit) for fit in ("crop", "stretch"))
    assert cropped.shape == stretched.shape == (3, 6, 6)
    white = {fit: (found > 127).all(0) for fit, found in (("crop", cropped), ("stretch", stretched))}
    assert extent(white["crop"]) == (4, 4)
    assert extent(white["stretch"]) == ((2, 4) if upright else (4, 2))
    colored = {fit: found.max(0) != found.min(0) for fit, found in (("crop", cropped), ("stretch", stretched))}
    assert not colored["crop"].any() and colored["stretch"].any()


def test_small_pictures_grow_and_fitting_ones_stay(tmp_path):
    save(tmp_path / "a.png", noise("small", width=4, height=4))
    assert decoded(tmp_path / "a.png", 9, "crop").shape == (3, 9, 9)
    for fit in ("crop", "stretch"):
        assert (decoded(tmp_path / "a.png", 4, fit) == decoded(tmp_path / "a.png", None, fit)).all()


def test_a_size_makes_mixed_pictures_alike(root):
    save(root / "train" / "ant" / "0.png", noise("large", width=20, height=31))
    splits = ImageFolder(size=4).load(root)
    assert splits.train.x.shape == (24, 3, 4, 4) and splits.test.x.shape == (6, 3, 4, 4)
    assert (splits.train.x[0].numpy() == decoded(root / "train" / "ant" / "0.png", 4, "crop")).all()
    stretched = ImageFolder(size=4, fit="stretch").load(root)
    assert (stretched.train.x[0].numpy() == decoded(root / "train" / "ant" / "0.png", 4, "stretch")).all()
    assert not torch.equal(stretched.train.x, splits.train.x)


def test_mixed_sizes_are_refused_with_the_remedy(root):
    odd = root / "train" / "bee" / "3.png"
    save(odd, noise("odd", width=7))
    refused(lambda: ImageFolder().load(root), odd, "7x5", "6x5", root / "train" / "ant" / "0.png", "--data.source.size")


def test_mixed_sizes_are_refused_across_chunks(root):
    files = sorted((root / "train" / "cow").iterdir())
    save(files[7], noise("odd", height=9))
    refused(lambda: list(decoded_all(files, None, "crop", chunk=7)), files[7], "6x9", "--data.source.size")


def test_a_train_set_of_another_size_than_the_test_set_is_refused(root):
    for path in (root / "test").rglob("*.png"):
        save(path, noise("odd", width=8))
    refused(lambda: ImageFolder().load(root), "image shape", "(3, 5, 6)", "(3, 5, 8)")


def test_chunks_come_in_order(root):
    files = sorted((root / "train").rglob("*.png"))
    chunks = list(decoded_all(files, None, "crop", chunk=5))
    assert [len(chunk) for chunk in chunks] == [5, 5, 5, 5, 4]
    assert (np.concatenate(chunks) == np.stack([decoded(path, None, "crop") for path in files])).all()


def sixteen_bits(path):
    Image.fromarray(np.full((HEIGHT, WIDTH), 40_000, np.uint16)).save(path)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_gray_of_16_bits_is_refused(root, suffix):
    path = root / "train" / "cow" / f"5.{suffix}"
    sixteen_bits(path)
    refused(lambda: ImageFolder().load(root), path, "more than 8 bits")


def test_gray_of_floats_is_refused(root):
    path = root / "train" / "cow" / "5.tif"
    Image.fromarray(np.full((HEIGHT, WIDTH), 0.5, np.float32)).save(path)
    refused(lambda: ImageFolder().load(root), path, "more than 8 bits")


@pytest.mark.parametrize("suffix", ["png", "jpg", "ppm", "bmp", "webp", "tif", "gif"])
def test_a_truncated_picture_is_named(root, suffix):
    path = root / "train" / "cow" / f"5.{suffix}"
    save(path, noise("cut", width=40, height=40))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    refused(lambda: ImageFolder(size=5).load(root), path, "cannot be read as an image")


@pytest.mark.parametrize("content", [b"", b"a text", b"\x89PNG\r\n\x1a\n" + bytes(40)])
@pytest.mark.parametrize("name", ["0.png", "5.png"])  # the first one is also read to see how large they are
def test_an_unreadable_picture_is_named(root, content, name):
    path = root / "train" / "ant" / name
    path.write_bytes(content)
    refused(lambda: ImageFolder().load(root), path, "cannot be read as an image", "put it in again")


def test_pictures_of_far_too_many_pixels_are_refused(root, monkeypatch):
    path = root / "train" / "bee" / "2.png"
    save(path, noise("bomb", width=30, height=30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 449)  # Pillow raises above twice its limit
    refused(lambda: ImageFolder(size=5).load(root), path, "far too many pixels")


def test_pictures_of_too_many_pixels_do_not_pass_in_silence(root, monkeypatch):
    save(root / "train" / "bee" / "2.png", noise("bomb", width=30, height=30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 899)  # Pillow warns between its limit and twice that
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # as for users: these tests turn warnings into errors
        try:
            ImageFolder(size=5).load(root)
        except UsageError as problem:
            assert "2.png" in str(problem)
        else:
            assert any(issubclass(warning.category, Image.DecompressionBombWarning) for warning in said)


@pytest.mark.parametrize("problem", ["bits", "pixels"])
def test_a_whole_file_is_not_called_cut_short(root, monkeypatch, problem):
    path = root / "train" / "bee" / "2.png"
    if problem == "bits":
        sixteen_bits(path)
    else:
        save(path, noise("bomb", width=30, height=30))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 449)
    assert "cut short" not in refused(lambda: ImageFolder(size=5).load(root), path)


# What is no dataset


def test_a_missing_folder(tmp_path):
    refused(lambda: ImageFolder(path="nowhere").load(tmp_path), tmp_path / "nowhere", "--data-root", "path inside")
    (tmp_path / "file").write_text("no folder")
    refused(lambda: ImageFolder(path="file").load(tmp_path), tmp_path / "file", "no folder")


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_empty_class_is_named(root, part):
    for path in (root / part / "bee").iterdir():
        path.rename(path.with_suffix(".txt"))
    refused(lambda: ImageFolder().load(root), root / part / "bee", "no images", ".png", "remove it")


def test_one_class_only(tmp_path):
    save(tmp_path / "one" / "a" / "0.png", noise(0))
    refused(lambda: ImageFolder().load(tmp_path / "one"), tmp_path / "one", "two or more classes", "it has 1")
    for part in ("train", "test"):
        save(tmp_path / "both" / part / "a" / "0.png", noise(part))
    refused(lambda: ImageFolder().load(tmp_path / "both"), tmp_path / "both" / "train", "it has 1")
    (tmp_path / "none").mkdir()
    refused(lambda: ImageFolder().load(tmp_path / "none"), "it has 0")


@pytest.mark.parametrize("part", ["train", "test"])
def test_classes_that_differ_are_named(root, part):
    save(root / part / "dog" / "0.png", noise("dog"))
    refused(lambda: ImageFolder().load(root), root / "train", root / "test", "'dog'")


def test_a_renamed_class_is_refused_though_there_are_as_many(root):
    (root / "test" / "cow").rename(root / "test" / "dog")
    refused(lambda: ImageFolder().load(root), "different classes")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 0}, "size"),
        ({"size": -3}, "size"),
        ({"test_share": 0.0}, "test_share"),
        ({"test_share": 1.0}, "test_share"),
        ({"test_share": float("nan")}, "test_share"),
        ({"memory": -1.0}, "memory"),
        ({"memory": float("nan")}, "memory"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, text):
    refused(lambda: ImageFolder(**options), text)


# More than fits into memory


def pair(root, **options):
    """The same training set in memory and on disk."""
    inside, outside = (ImageFolder(memory=memory, **options).load(root).train for memory in (1.0, 0.0))
    assert isinstance(inside.x, torch.Tensor) and isinstance(outside.x, Mapped)
    return inside, outside


def same_batches(one, other, **options):
    first, second = (list(batches(images, 5, seed=1, epoch=2, **options)) for images in (one, other))
    return len(first) == len(second) > 0 and all(
        torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride()
        for p, q in zip(first, second, strict=True)
        for a, b in zip(p, q, strict=True)
    )


def test_what_is_on_disk_is_what_would_be_in_memory(root, small_shards):
    inside, outside = pair(root)
    assert len(outside.x.shards) == 6 and [len(shard) for shard in outside.x.shards] == [PER_SHARD] * 6
    assert outside.x.shape == inside.x.shape and outside.x.dtype is torch.uint8 and outside.x.ndim == 4
    assert outside.x.numel() == inside.x.numel() and len(outside.x) == len(outside) == 24
    assert torch.equal(outside.x[:], inside.x) and torch.equal(outside.y, inside.y)
    assert torch.equal(outside.ids, inside.ids) and outside.classes == inside.classes
    assert outside.sha256() == inside.sha256()
    assert outside.channel_statistics() == inside.channel_statistics()
    assert torch.equal(outside.counts(), inside.counts())


@pytest.mark.parametrize("augment", [None, PadCropFlip(1)])
@pytest.mark.parametrize("probabilities", [None, torch.tensor([0.6, 0.3, 0.1])])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_are_the_same_from_disk(root, small_shards, augment, probabilities, start, channels_last):
    inside, outside = pair(root)
    options = {"augment": augment, "probabilities": probabilities, "start": start, "channels_last": channels_last}
    assert same_batches(inside, outside, **options)
    some = [20, 3, 4, 5, 19, 8, 9, 0, 23, 11, 12, 13]
    assert same_batches(inside.subset(some), outside.subset(some), **options)
    assert same_batches(inside.to("cpu"), outside.to("cpu"), **options)


def test_a_folder_without_a_split_is_the_same_from_disk(root, small_shards):
    inside, outside = (ImageFolder(path="train", memory=memory).load(root) for memory in (1.0, 0.0))
    for one, other in ((inside.train, outside.train), (inside.test, outside.test)):
        assert isinstance(other.x, Mapped) and one.sha256() == other.sha256() and torch.equal(one.ids, other.ids)
    assert all(a is b for a, b in zip(outside.train.x.shards, outside.test.x.shards, strict=True))


def test_the_memory_allowed_decides(root):
    needed = 24 * BYTES
    for memory, kind in ((needed / 2**30, torch.Tensor), ((needed - 1) / 2**30, Mapped)):
        splits = ImageFolder(memory=memory).load(root)
        assert isinstance(splits.train.x, kind) and isinstance(splits.test.x, torch.Tensor)


def test_unasked_half_of_the_free_memory_is_allowed(root, monkeypatch):
    assert _free_memory() > 2**20
    for free, kind in ((48 * BYTES, torch.Tensor), (48 * BYTES - 2, Mapped)):
        monkeypatch.setattr("doubly.data.folder._free_memory", lambda free=free: float(free))
        assert isinstance(ImageFolder().load(root).train.x, kind)


def test_the_size_that_is_asked_for_counts_and_not_that_of_the_files(root):
    assert isinstance(ImageFolder(size=1, memory=24 * 3 / 2**30).load(root).train.x, torch.Tensor)


def test_a_subset_copies_nothing(root, small_shards):
    _, outside = pair(root)
    mask = outside.y == 1
    parts = (outside.subset(mask), outside.subset([3, 1]), outside.subset([]), outside.to("cpu"))
    for part in (*parts, parts[0].subset([2, 0]).to("cpu").subset([1])):
        assert isinstance(part.x, Mapped)
        assert all(a is b for a, b in zip(part.x.shards, outside.x.shards, strict=True))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_the_shards_stay_on_disk(root, small_shards, cache):
    _, outside = pair(root)
    files = sorted((cache / "shards").glob("*/*.bin"))
    assert len(files) == 6 + 2 and len(outside.x.shards) == 6
    # The test set of that load is gone, and with it what was mapped of it.
    assert sum(str(path) in Path("/proc/self/maps").read_text() for path in files) >= 6


def test_what_is_read_belongs_to_the_reader(root, small_shards, cache):
    _, outside = pair(root)
    before = outside.sha256()
    outside.x[:4].zero_()
    outside.x[torch.tensor([5])].zero_()
    assert outside.sha256() == before == ImageFolder(memory=0).load(root).train.sha256()


def test_subsets_from_disk(root, small_shards):
    inside, outside = pair(root)
    mask = torch.arange(24) % 3 == 1
    for index in ([23, 0, 7, 7, 8], [], mask, mask.numpy(), torch.zeros(24, dtype=torch.bool), range(4, 8), [-1, 2]):
        index = list(index) if isinstance(index, range) else index
        one, other = inside.subset(index), outside.subset(index)
        assert torch.equal(other.x[:], one.x) and torch.equal(other.ids, one.ids) and torch.equal(other.y, one.y)
        assert other.sha256() == one.sha256() and other.x.shape == one.x.shape
        assert torch.equal(other.pixels(slice(None)), one.pixels(slice(None)))
    one, other = (images.subset(mask).subset([6, 1, 2]).subset([True, False, True]) for images in (inside, outside))
    assert other.ids.tolist() == one.ids.tolist() == [19, 7] and torch.equal(other.x[:], one.x)


indices = st.integers(-8, 7)


@given(
    st.integers(1, 9),
    st.one_of(
        st.lists(indices, max_size=12).map(lambda rows: torch.tensor(rows, dtype=torch.int64)),
        st.lists(st.booleans(), min_size=8, max_size=8).map(torch.tensor),
        st.builds(slice, st.none() | indices, st.none() | indices, st.none() | st.integers(1, 3)),
    ),
)
def test_the_shards_index_like_one_tensor(length, index):
    x = torch.arange(8 * 4, dtype=torch.uint8).view(8, 1, 2, 2)
    shards = Mapped.of(x.split(length))
    assert torch.equal(shards[index], x[index])
    assert shards.to("cpu")[index].device.type == "cpu"
    if isinstance(index, torch.Tensor):
        part = shards.subset(index)
        assert torch.equal(part[:], x[index]) and part.shape == x[index].shape and len(part) == len(x[index])
        assert torch.equal(part[1:3], x[index][1:3]) and part.numel() == x[index].numel()


# The files behind it


def forbidden(*arguments):
    raise AssertionError("it was built before: nothing is decoded")


def test_shards_are_built_once(root, monkeypatch, cache):
    expected = ImageFolder(memory=0).load(root).train.sha256()
    assert len(list((cache / "shards").iterdir())) == 2
    stamps = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    monkeypatch.setattr("doubly.data.decoding.decoded", forbidden)
    assert ImageFolder(memory=0).load(root).train.sha256() == expected
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == stamps


def rewritten(root):
    save(root / "train" / "cow" / "4.png", noise("other"))


def touched(root):
    path = root / "train" / "cow" / "4.png"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))


def swapped_with_the_same_time(root):
    path = root / "train" / "cow" / "4.png"
    stamp = path.stat().st_mtime_ns
    save(path, noise("other"), dpi=(72, 72))  # a few bytes more
    os.utime(path, ns=(stamp, stamp))


def added(root):
    save(root / "train" / "cow" / "9.png", noise("added"))


def removed(root):
    (root / "train" / "cow" / "4.png").unlink()


def moved(root):
    (root / "train" / "cow" / "4.png").rename(root / "train" / "ant" / "x.png")


@pytest.mark.parametrize("change", [rewritten, touched, swapped_with_the_same_time, added, removed, moved])
def test_shards_are_built_again_after_a_change(root, small_shards, cache, change):
    ImageFolder(memory=0).load(root)
    built = set((cache / "shards").iterdir())
    change(root)
    inside, outside = pair(root)
    assert outside.sha256() == inside.sha256() and torch.equal(outside.x[:], inside.x)
    assert len(set((cache / "shards").iterdir()) - built) == 1  # the test set has not changed


@pytest.mark.parametrize("options", [{"size": 4}, {"size": 5}, {"size": 4, "fit": "stretch"}])
def test_each_size_and_fit_has_its_own_shards(root, small_shards, options):
    for load in ({}, options, {"size": 4}):
        inside, outside = pair(root, **load)
        assert outside.sha256() == inside.sha256()


@pytest.mark.parametrize("relative", [False, True])
def test_the_same_names_elsewhere_are_another_set(tmp_path, monkeypatch, relative):
    for project in ("one", "other"):
        for label in ("a", "b"):
            for number in range(5):
                # As from an archive: equal times; and files without compression are equally large.
                save(path := tmp_path / project / "d" / label / f"{number}.ppm", noise(project, label, number))
                os.utime(path, (1e9, 1e9))
        monkeypatch.chdir(tmp_path / project)
        root = None if relative else tmp_path / project
        outside, inside = (ImageFolder(path="d", memory=memory).load(root).train for memory in (0, 1))
        assert outside.sha256() == inside.sha256()


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_a_build_cut_short_leaves_nothing_that_looks_whole(root, small_shards, monkeypatch, cache, problem):
    seen = []

    def cut(files, size, fit):
        for chunk in by_threes(files, size, fit):
            seen.append(len(list(cache.rglob("*.bin"))))
            if len(seen) == 5:
                raise problem
            yield chunk

    with monkeypatch.context() as patch:
        patch.setattr("doubly.data.folder.decoded_all", cut)
        with pytest.raises(problem):
            ImageFolder(memory=0).load(root)
    assert seen[-1] > 0  # it was in the middle
    assert list((cache / "shards").iterdir()) == []
    inside, outside = pair(root)
    assert outside.sha256() == inside.sha256()


def test_a_build_that_was_killed_is_begun_again(root, small_shards, monkeypatch, cache):
    def killed(files, size, fit):
        chunks = by_threes(files, size, fit)
        yield next(chunks)
        yield next(chunks)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("doubly.data.folder.decoded_all", killed)
        patch.setattr(mapped_module.shutil, "rmtree", lambda *arguments, **options: None)  # no time to clean up
        with pytest.raises(KeyboardInterrupt):
            ImageFolder(memory=0).load(root)
    (left,) = (cache / "shards").iterdir()
    assert list(left.glob("*.bin"))
    (left / "00009.bin").write_bytes(bytes(BYTES))  # from a longer set
    inside, outside = pair(root)
    assert outside.sha256() == inside.sha256()
    assert not left.exists()


def test_an_unreadable_picture_is_named_by_a_build_and_leaves_nothing(root, small_shards, cache):
    path = root / "train" / "cow" / "4.png"
    path.write_bytes(b"")
    refused(lambda: ImageFolder(memory=0).load(root), path)
    assert list((cache / "shards").iterdir()) == []


def cut_by(count):
    def cut(path):
        path.write_bytes(path.read_bytes()[:-count])

    return cut


def grown(path):
    path.write_bytes(path.read_bytes() + bytes(BYTES))


def emptied(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("number", [0, 2, 5])
@pytest.mark.parametrize(
    "damage",
    [
        cut_by(1),
        cut_by(BYTES),
        cut_by(2 * BYTES + 1),
        grown,
        Path.unlink,
        emptied,
    ],
)
def test_a_damaged_shard_is_refused_with_the_remedy(root, small_shards, cache, number, damage):
    expected = ImageFolder(memory=0).load(root).train.sha256()
    path = sorted((cache / "shards").glob(f"*/{number:05d}.bin"), key=lambda path: len(list(path.parent.iterdir())))[-1]
    damage(path)
    refused(lambda: ImageFolder(memory=0).load(root), path.parent, "damaged", "delete it")
    shutil.rmtree(path.parent)
    assert ImageFolder(memory=0).load(root).train.sha256() == expected


def test_two_shards_whose_damage_adds_up_to_nothing_are_refused(root, small_shards, cache):
    ImageFolder(memory=0).load(root)
    (folder,) = (path for path in (cache / "shards").iterdir() if (path / "00005.bin").exists())
    cut_by(BYTES)(folder / "00001.bin")
    grown(folder / "00003.bin")
    refused(lambda: ImageFolder(memory=0).load(root), folder, "damaged", "delete it")


@pytest.mark.parametrize("text", ["", None, "3 5 x", "3 0 6"])
def test_a_damaged_shape_is_refused_with_the_remedy(root, small_shards, cache, text):
    ImageFolder(memory=0).load(root)
    for path in (cache / "shards").glob("*/shape"):
        path.unlink() if text is None else path.write_text(text)
    refused(lambda: ImageFolder(memory=0).load(root), "damaged", "delete it")


def test_all_shards_gone_are_refused_with_the_remedy(root, cache):
    ImageFolder(memory=0).load(root)
    for path in cache.rglob("*.bin"):
        path.unlink()
    refused(lambda: ImageFolder(memory=0).load(root), "damaged", "delete it")


def chunked(x, length=3):
    return (part.numpy() for part in x.split(length))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("limit", [1, BYTES, 4 * BYTES, 5 * BYTES - 1, 2**20])
def test_shards_of_any_length(tmp_path, monkeypatch, count, limit):
    monkeypatch.setattr(mapped_module, "SHARD", limit)
    x = torch.randint(0, 256, (count, 3, HEIGHT, WIDTH), dtype=torch.uint8)
    found = mapped(tmp_path / "new" / "s", chunked(x), count)
    assert torch.equal(found[:], x)
    assert len(found.shards) == -(-count // max(1, limit // BYTES))
    again = mapped(tmp_path / "new" / "s", iter(()), count)
    assert torch.equal(again[:], x)


@pytest.mark.parametrize("pause", [1, 4])
def test_two_processes_may_build_the_same_shards(tmp_path, monkeypatch, pause):
    """As the ranks of one training do: the second builds all of it while the first is at work."""
    monkeypatch.setattr(mapped_module, "SHARD", 2 * BYTES)
    x = torch.randint(0, 256, (11, 3, HEIGHT, WIDTH), dtype=torch.uint8)

    def slow():
        for number, chunk in enumerate(chunked(x), start=1):
            yield chunk
            if number == pause:
                assert torch.equal(mapped(tmp_path / "s", chunked(x), 11)[:], x)

    assert torch.equal(mapped(tmp_path / "s", slow(), 11)[:], x)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_cache_that_cannot_be_written_is_refused_with_the_remedy(root, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "file"))
    refused(lambda: ImageFolder(memory=0).load(root), tmp_path / "file", "DOUBLY_CACHE")


def test_the_environment_says_where_the_shards_go(root, monkeypatch, tmp_path):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "elsewhere"))
    ImageFolder(memory=0).load(root)
    assert len(list((tmp_path / "elsewhere" / "shards").iterdir())) == 2 and not (tmp_path / "cache").exists()
    ImageFolder(memory=1).load(root)
    assert len(list((tmp_path / "elsewhere" / "shards").iterdir())) == 2


def test_shards_that_nobody_uses_make_room(root, cache):
    def names():
        return {path.name for path in (cache / "shards").iterdir()}

    long_ago = time.time() - (DAYS + 1) * 86400
    ImageFolder(memory=0.0, size=4).load(root)
    old = names()
    (cache / "shards" / "notes").mkdir()
    for path in (cache / "shards").iterdir():
        os.utime(path, (long_ago, long_ago))
    ImageFolder(memory=0.0, size=4).load(root)  # which is a use
    ImageFolder(memory=0.0, size=5).load(root)
    assert names() > old | {"notes"}
    for name in old:
        os.utime(cache / "shards" / name, (long_ago, long_ago))
    ImageFolder(memory=0.0, size=6).load(root)
    assert not names() & old and "notes" in names()

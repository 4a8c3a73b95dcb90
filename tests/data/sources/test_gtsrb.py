"""Traffic signs: both layouts, tables that are damaged, and the tracks of a sign."""

import numpy as np
import pytest
import torch
from PIL import Image

import dataset_writers as write
from doubly.data import GTSRB
from doubly.data.holdout import holdout
from doubly.errors import UsageError

sign = write.sign

# Two frames of each sign, and a second track of the first two classes.
FRAMES = [sign(2 * k + n, k, 0, n) for k in range(43) for n in (0, 1)] + [
    sign(100 + 2 * k + n, k, 1, n) for k in (0, 1) for n in (0, 1)
]
SIGNS = sorted(FRAMES, key=lambda frame: frame[1:])
SIGNS_TEST = [sign(200 + k, label) for k, label in enumerate((16, 0, 42))]


@pytest.fixture
def original(tmp_path):
    write.gtsrb_original(tmp_path, SIGNS, SIGNS_TEST)
    return tmp_path / "gtsrb"


def check_images(images, frames):
    assert torch.equal(images.x, torch.as_tensor(np.stack([frame.pixels for frame in frames])))
    assert images.y.tolist() == [frame.label for frame in frames]


def refused(root, *texts):
    with pytest.raises(UsageError) as caught:
        GTSRB().load(root)
    for text in texts:
        assert text in str(caught.value)


def loaded(root, layout):
    getattr(write, f"gtsrb_{layout}")(root, SIGNS, SIGNS_TEST)
    return GTSRB().load(root)


@pytest.mark.parametrize("layout", ["original", "mirror"])
def test_signs_come_back_from_both_layouts(tmp_path, layout):
    splits = loaded(tmp_path, layout)
    check_images(splits.train, SIGNS)
    check_images(splits.test, SIGNS_TEST)
    assert len(splits.train.classes) == 43 and len(set(splits.train.classes)) == 43
    names = {14: "stop", 13: "give way", 17: "no entry", 1: "speed limit 30", 38: "keep right", 40: "roundabout"}
    assert {k: splits.train.classes[k] for k in names} == names
    assert "90 of the 39,209 published training images" in splits.note
    assert "3 of the 12,630 published test images" in splits.note


@pytest.mark.parametrize("layout", ["original", "mirror"])
def test_frames_of_one_sign_are_one_group(tmp_path, layout):
    splits = loaded(tmp_path, layout)
    groups = splits.train.groups.tolist()
    tracks = [(frame.label, frame.track) for frame in SIGNS]
    assert len(set(groups)) == len(set(tracks)) == len(set(zip(groups, tracks, strict=True))) == 45
    assert splits.test.groups is None


def test_signs_are_held_out_by_the_track(tmp_path):
    train = [sign(5 * k + n, k, track, n) for k in range(43) for track in range(4) for n in range(2)]
    write.gtsrb_original(tmp_path, train, SIGNS_TEST)
    images = GTSRB().load(tmp_path).train
    rest, held_out = (images.subset(rows) for rows in holdout(images.y, 0.25, 0, images.groups))
    assert held_out.counts().tolist() == [2] * 43
    assert not set(rest.groups.tolist()) & set(held_out.groups.tolist())


def test_signs_of_any_size_are_stretched_to_a_square(tmp_path):
    sizes = [(15, 15), (25, 32), (60, 41), (33, 32), (32, 32)]
    train = [sign(k, k, size=sizes[k % len(sizes)]) for k in range(43)]
    write.gtsrb_original(tmp_path, train, SIGNS_TEST)
    for size in (32, 20):
        images = GTSRB(size=size).load(tmp_path).train
        assert images.x.shape == (43, 3, size, size)
        for pixels, frame in zip(images.x, train, strict=True):
            image = Image.fromarray(frame.pixels.transpose(1, 2, 0))
            expected = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
            assert torch.equal(pixels, torch.tensor(expected))
    with pytest.raises(UsageError, match="above 0, got 0"):
        GTSRB(size=0)


def test_the_test_labels_are_found_where_people_put_them(original):
    path = original / "GT-final_test.csv"
    for folder in ("GTSRB", "GTSRB/Final_Test/Images"):
        path = path.rename(original / folder / "GT-final_test.csv")
        check_images(GTSRB().load(original.parent).test, SIGNS_TEST)


def test_tables_that_are_missing_or_truncated_are_named(original, tmp_path):
    tables = [original / "GT-final_test.csv", original / "GTSRB/Final_Training/Images/00042/GT-00042.csv"]
    for path in tables:
        content = path.read_bytes()
        path.unlink()
        refused(tmp_path, path.name)
        line = content.rstrip(b"\r\n")
        last = len(line) - line.rindex(b"\n") - 1
        for missing in range(2, last, 3):  # a class number of two digits may lose one unnoticed
            path.write_bytes(line[:-missing])
            refused(tmp_path, path.name)
        path.write_bytes(content)
    for content, text in (
        (b"", "replace it with GTSRB's original"),
        (b"\xff\xfe\0", "cannot be read as a table"),
        # The archive of the test images has such a table, under nearly the same name.
        (
            b"\n".join(line.rpartition(b";")[0] for line in tables[0].read_bytes().splitlines()),
            "GTSRB_Final_Test_GT.zip",
        ),
    ):
        tables[0].write_bytes(content)
        refused(tmp_path, "GT-final_test.csv", text)


def test_the_tables_of_a_mirror_are_needed_in_full(tmp_path):
    write.gtsrb_mirror(tmp_path, SIGNS, SIGNS_TEST)
    folder = tmp_path / "gtsrb"
    (folder / "Test.csv").rename(folder / "moved")
    refused(tmp_path, "Test.csv", "missing")
    (folder / "moved").rename(folder / "Test.csv")
    content = (folder / "Train.csv").read_text()
    # In one group for all, a sign without a track would leave nothing to hold out.
    (folder / "Train/42/00042_00000_00001.png").rename(folder / "Train/42/b.png")
    (folder / "Train.csv").write_text(content.replace("00042_00000_00001.png", "b.png"))
    refused(tmp_path, "Train.csv", "b.png", "not numbered")
    (folder / "Train.csv").write_text("Width,Height,Path\n1,2,a.png\n")
    refused(tmp_path, "no lines with Path and ClassId")
    (folder / "Train.csv").unlink()
    refused(tmp_path, "Final_Training/Images", "missing")


def test_classes_outside_0_to_42_are_refused(tmp_path):
    write.gtsrb_original(tmp_path / "original", SIGNS, [sign(0, 43)])
    refused(tmp_path / "original", "GT-final_test.csv has the class 43")
    write.gtsrb_mirror(tmp_path / "mirror", [*SIGNS, sign(0, 43)], SIGNS_TEST)
    refused(tmp_path / "mirror", "Train.csv has the class 43")


def test_a_test_set_that_is_the_training_set_is_refused(tmp_path):
    write.gtsrb_original(tmp_path, SIGNS, SIGNS)
    refused(tmp_path, "train and test have the same images")


def test_files_with_other_names_are_refused(original, tmp_path):
    images = original / "GTSRB/Final_Training/Images"
    table = images / "00003" / "GT-00003.csv"
    content = table.read_text()
    table.write_text((images / "00004" / "GT-00004.csv").read_text())
    refused(tmp_path, "GT-00003.csv", "class 4", "original names")
    (images / "00003/00000_00001.ppm").rename(images / "00003/left.ppm")
    table.write_text(content.replace("00000_00001.ppm", "left.ppm"))
    refused(tmp_path, "GT-00003.csv", "left.ppm", "not numbered")


def test_signs_that_are_missing_or_unreadable_are_named(original, tmp_path):
    for place in ("Final_Training/Images/00007/00000_00001.ppm", "Final_Test/Images/00002.ppm"):
        path = original / "GTSRB" / place
        content = path.read_bytes()
        for other in (b"", content[:100], b"<html>Not found</html>"):
            path.write_bytes(other)
            refused(tmp_path, path.name, "cannot be read as an image")
        path.unlink()
        refused(tmp_path, path.name, "missing", "unpack the archive again")
        path.write_bytes(content)

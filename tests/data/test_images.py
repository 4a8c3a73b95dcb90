import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from doubly.data import Images, Splits
from doubly.errors import UsageError


def colorful(n=20, classes=4):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 5, 6), generator=random, dtype=torch.uint8)
    return Images.of(x, torch.arange(n) % classes)


def test_uint8_stays_uint8_and_names_and_ids_have_defaults():
    images = colorful()
    assert images.x.dtype is torch.uint8 and images.y.dtype is torch.int64
    assert images.classes == ("0", "1", "2", "3")
    assert torch.equal(images.ids, torch.arange(20))
    assert len(images) == 20 and images.counts().tolist() == [5, 5, 5, 5]


def test_floats_become_float32_and_uint8_is_scaled_only_by_pixels():
    x = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    images = Images.of(x, [0, 1, 2], ["a", "b", "c"])
    assert images.x.dtype is torch.float32
    assert torch.equal(images.pixels(slice(None)), x.float())
    images = colorful()
    assert torch.equal(images.pixels(torch.tensor([3, 1])), images.x[[3, 1]].float() / 255)


def test_gray_images_get_a_channel_and_read_only_arrays_are_accepted():
    array = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    array.flags.writeable = False
    images = Images.of(array[:, ::-1], np.array([0, 1], dtype=np.uint8))
    assert images.x.shape == (2, 1, 4, 4)
    assert images.x[0, 0, 0].tolist() == [12, 13, 14, 15]


def test_pixels_and_labels_that_are_refused():
    for x, message in (
        (torch.full((2, 1, 4, 4), 1.5), r"floats in \[0,1\] or uint8.*first layer"),
        (torch.full((2, 1, 4, 4), -0.1), r"floats in \[0,1\] or uint8"),
        (torch.tensor([0.5, float("nan")]).view(2, 1, 1, 1), "have NaN pixels"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.int64), "torch.int64"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.bool), "torch.bool"),
        (np.zeros((2, 1, 4, 4), "U1"), "uint8 or floats"),
        (torch.zeros(2, 16), r"\(N, C, H, W\)"),
        (torch.zeros(2, 3, 0, 4), r"\(N, C, H, W\)"),
        (torch.zeros(2, 32, 32, 3), "permute"),
        (torch.zeros(3, 1, 4, 4), "3 images and 2 labels"),
    ):
        with pytest.raises(UsageError, match=message):
            Images.of(x, [0, 1])
    for y, message in (
        ([0, -1], "from -1 to 0"),
        ([0, 2], "from 0 to 2, allowed is 0 to 1"),
        (torch.tensor([0.0, 1.0]), "float"),
        (torch.eye(2).long(), "one-hot"),
        (torch.tensor([True, False]), "bool"),
        (["cat", "dog"], "not names"),
        ([[0], [1, 2]], "one integer per image"),
        ([], "2 images and 0 labels"),
    ):
        with pytest.raises(UsageError, match=message):
            Images.of(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), y, ["a", "b"])


def test_a_subset_has_the_order_of_its_indices_and_the_ids_of_its_images():
    images = colorful()
    part = images.subset([7, 2]).subset(torch.tensor([1]))
    assert part.ids.tolist() == [2] and part.y.tolist() == [2]
    assert torch.equal(part.x[0], images.x[2]) and part.classes == images.classes
    assert part.counts().tolist() == [0, 0, 1, 0]
    assert len(images.subset([])) == 0
    assert torch.equal(images.subset(images.y == 3).ids, torch.tensor([3, 7, 11, 15, 19]))
    assert images.subset(np.array([4])).ids.tolist() == [4]


def test_a_subset_has_the_groups_of_its_images():
    y, groups = torch.arange(12) % 2, torch.arange(12) // 4 * 2 + torch.arange(12) % 2
    images = Images(torch.zeros(12, 1, 1, 1, dtype=torch.uint8), y, ("a", "b"), groups=groups)
    assert torch.equal(images.subset(y == 1).subset([2, 0]).to("cpu").groups, groups[[5, 1]])
    assert Images.of(images.x, y).subset([0]).groups is None


def test_channel_statistics_are_those_of_all_pixels():
    for n in (1, 20, 700):  # 700 of 3x40x40 need more than one chunk
        x = torch.randint(0, 256, (n, 3, 40, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        values = x.double() / 255
        for images in (Images.of(x, [0] * n), Images.of(values, [0] * n)):
            mean, std = images.channel_statistics()
            assert mean == pytest.approx(values.mean((0, 2, 3)).tolist(), abs=1e-6)
            assert std == pytest.approx(values.std((0, 2, 3), correction=0).tolist(), abs=1e-6)


def test_checksums_differ_where_the_images_do():
    images = colorful()
    assert images.sha256() == colorful().sha256() == images.to("cpu").sha256()
    assert images.fingerprint() == colorful().fingerprint()
    others = [
        images,
        Images(images.x ^ 1, images.y, images.classes),
        Images(images.x, images.y.flip(0), images.classes),
        Images(images.x, images.y, ("a", "b", "c", "d")),
        Images(images.x.view(20, 3, 6, 5), images.y, images.classes),
        images.subset(range(19)),
    ]
    assert len({other.sha256() for other in others}) == len({other.fingerprint() for other in others}) == 6
    moved = Images(images.x, images.y, images.classes, images.ids + 1)
    assert moved.sha256() == images.sha256() and moved.fingerprint() != images.fingerprint()


class Pairs(list):
    """A map-style dataset with class names."""

    classes = ("left", "right")


def test_tensors_arrays_and_pil_images_of_a_dataset_are_read_alike():
    chw = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8)
    hwc = chw.permute(1, 2, 0).contiguous().numpy()
    images = Images.from_dataset(Pairs([(chw, 0), (hwc, np.int64(1)), (Image.fromarray(hwc), torch.tensor(1))]))
    assert images.classes == ("left", "right") and images.y.tolist() == [0, 1, 1]
    assert all(torch.equal(image, chw) for image in images.x)
    gray = Images.from_dataset([(torch.rand(4, 5), 0), (torch.rand(1, 4, 5), 1)])
    assert gray.x.shape == (2, 1, 4, 5) and gray.x.dtype is torch.float32
    assert torch.equal(Images.from_dataset([(Image.fromarray(hwc[..., 0]), 0)]).x[0, 0], chw[0])


def test_datasets_that_are_refused():
    for dataset, message in (
        ([], "no images"),
        ([(torch.zeros(1, 4, 4), 0), (torch.zeros(1, 5, 5), 0)], "one shape"),
        ([(np.zeros((3, 32, 32), dtype=np.uint8), 0)], "transpose"),
        ([(np.zeros((4, 4), dtype=np.float64) + 2, 0)], "divide gray levels"),
        ([(torch.zeros(1, 4, 4), -3)], "from -3"),
        ([(torch.zeros(1, 4, 4), 0.7)], "one integer per image"),
        ([(Image.new("P", (4, 5)), 0)], "got 'P'"),
    ):
        with pytest.raises(UsageError, match=message):
            Images.from_dataset(dataset)


def test_splits_must_agree_in_classes_and_shape():
    images = colorful()
    Splits(images, images.subset([0]))
    for other in (Images.of(images.x[:2], [0, 1]), Images(images.x[:, :1], images.y, images.classes)):
        with pytest.raises(UsageError, match="agree in classes"):
            Splits(images, other)


def test_importing_data_loads_no_optional_library():
    code = "import sys, doubly.data; print([m for m in ('sklearn', 'torchvision', 'PIL', 'scipy') if m in sys.modules])"
    path = [str(folder) for folder in sys.path]
    output = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path = {path}; {code}"], capture_output=True, text=True
    )
    assert output.stdout.strip() == "[]", output.stderr

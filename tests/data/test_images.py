import subprocess
import sys

import numpy as np
import pytest
import torch

from doubly.data import Images, Splits
from doubly.errors import UsageError


def colorful(n=20, classes=4):
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 5, 6), generator=random, dtype=torch.uint8)
    return Images.of(x, torch.arange(n) % classes)


def test_of_keeps_bytes_and_fills_in_names_and_ids():
    images = colorful()
    assert images.x.dtype is torch.uint8 and images.y.dtype is torch.int64
    assert images.classes == ("0", "1", "2", "3")
    assert torch.equal(images.ids, torch.arange(20))
    assert len(images) == 20 and images.counts().tolist() == [5, 5, 5, 5]


def test_of_keeps_floats_as_floats():
    x = torch.rand(3, 1, 4, 4, dtype=torch.float64)
    images = Images.of(x, [0, 1, 2], ["a", "b", "c"])
    assert images.x.dtype is torch.float32
    assert torch.equal(images.pixels(slice(None)), x.float())


def test_bytes_become_floats_only_when_asked_for():
    images = colorful()
    rows = torch.tensor([3, 1])
    assert torch.equal(images.pixels(rows), images.x[[3, 1]].float() / 255)


def test_gray_images_get_a_channel_and_read_only_arrays_are_fine():
    array = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    array.flags.writeable = False
    images = Images.of(array[:, ::-1], np.array([0, 1], dtype=np.uint8))
    assert images.x.shape == (2, 1, 4, 4)
    assert images.x[0, 0, 0].tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.full((2, 1, 4, 4), 1.5), r"floats in \[0,1\] or uint8.*first layer"),
        (torch.full((2, 1, 4, 4), -0.1), r"floats in \[0,1\] or uint8"),
        (torch.tensor([0.5, float("nan")]).view(2, 1, 1, 1), "nan"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.int64), "torch.int64"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.bool), "torch.bool"),
        (torch.zeros(2, 16), r"\(N, C, H, W\)"),
        (torch.zeros(2, 3, 0, 4), r"\(N, C, H, W\)"),
        (torch.zeros(2, 32, 32, 3), "permute"),
        (torch.zeros(3, 1, 4, 4), "3 images and 2 labels"),
    ],
)
def test_of_refuses_images(x, text):
    with pytest.raises(UsageError, match=text):
        Images.of(x, [0, 1])


@pytest.mark.parametrize(
    ("y", "text"),
    [
        ([0, -1], "from -1 to 0"),
        ([0, 2], "from 0 to 2, allowed is 0 to 1"),
        (torch.tensor([0.0, 1.0]), "float"),
        (torch.eye(2).long(), "one-hot"),
        (torch.tensor([True, False]), "bool"),
        (["cat", "dog"], "not names"),
        ([], "2 images and 0 labels"),
    ],
)
def test_of_refuses_labels(y, text):
    with pytest.raises(UsageError, match=text):
        Images.of(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), y, ["a", "b"])


def test_subset_keeps_order_names_and_origin():
    images = colorful()
    part = images.subset([7, 2]).subset(torch.tensor([1]))
    assert part.ids.tolist() == [2] and part.y.tolist() == [2]
    assert torch.equal(part.x[0], images.x[2]) and part.classes == images.classes
    assert part.counts().tolist() == [0, 0, 1, 0]
    assert len(images.subset([])) == 0
    assert torch.equal(images.subset(images.y == 3).ids, torch.tensor([3, 7, 11, 15, 19]))
    assert images.subset(np.array([4])).ids.tolist() == [4]


@pytest.mark.parametrize("n", [1, 20, 700])  # 700 of 3x40x40 need more than one chunk
def test_channel_statistics(n):
    x = torch.randint(0, 256, (n, 3, 40, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for images in (Images.of(x, [0] * n), Images.of(x.double() / 255, [0] * n)):
        mean, std = images.channel_statistics()
        values = x.double() / 255
        assert mean == pytest.approx(values.mean((0, 2, 3)).tolist(), abs=1e-6)
        assert std == pytest.approx(values.std((0, 2, 3), correction=0).tolist(), abs=1e-6)


def test_sha256_tells_contents_apart():
    images = colorful()
    assert images.sha256() == colorful().sha256() == images.to("cpu").sha256()
    others = [
        Images(images.x ^ 1, images.y, images.classes),
        Images(images.x, images.y.flip(0), images.classes),
        Images(images.x, images.y, ("a", "b", "c", "d")),
        Images(images.x.view(20, 3, 6, 5), images.y, images.classes),
        images.subset(range(19)),
    ]
    assert len({images.sha256(), *(other.sha256() for other in others)}) == 6


class Pairs(list):
    """A map-style dataset."""


class FakePIL:
    """What `Images` uses of a PIL image."""

    def __init__(self, array, mode):
        self.array, self.mode = array, mode

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_from_dataset_reads_tensors_arrays_and_pil_images_alike():
    chw = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8)
    hwc = chw.permute(1, 2, 0).contiguous().numpy()
    dataset = Pairs([(chw, 0), (hwc, np.int64(1)), (FakePIL(hwc, "RGB"), torch.tensor(1))])
    dataset.classes = ["left", "right"]
    images = Images.from_dataset(dataset)
    assert images.classes == ("left", "right") and images.y.tolist() == [0, 1, 1]
    assert all(torch.equal(image, chw) for image in images.x)


def test_from_dataset_reads_a_real_pil_image():
    image = pytest.importorskip("PIL.Image")
    array = np.arange(20, dtype=np.uint8).reshape(4, 5)
    images = Images.from_dataset([(image.fromarray(array), 0)])
    assert torch.equal(images.x[0, 0], torch.from_numpy(array))
    with pytest.raises(UsageError, match="got 'P'"):
        Images.from_dataset([(image.fromarray(array).convert("P"), 0)])


def test_from_dataset_reads_gray_floats():
    images = Images.from_dataset([(torch.rand(4, 5), 0), (torch.rand(1, 4, 5), 1)])
    assert images.x.shape == (2, 1, 4, 5) and images.x.dtype is torch.float32


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ([], "no images"),
        ([(torch.zeros(1, 4, 4), 0), (torch.zeros(1, 5, 5), 0)], "one shape"),
        ([(np.zeros((3, 32, 32), dtype=np.uint8), 0)], "transpose"),
        ([(np.zeros((4, 4), dtype=np.float64) + 2, 0)], "divide gray levels"),
        ([(torch.zeros(1, 4, 4), -3)], "from -3"),
        ([(torch.zeros(1, 4, 4), 0.7)], "one integer per image"),
    ],
)
def test_from_dataset_refuses(dataset, text):
    with pytest.raises(UsageError, match=text):
        Images.from_dataset(dataset)


def test_splits_agree():
    images = colorful()
    Splits(images, images.subset([0]))
    with pytest.raises(UsageError, match="agree in classes"):
        Splits(images, Images.of(images.x[:2], [0, 1]))
    with pytest.raises(UsageError, match="agree in classes"):
        Splits(images, Images(images.x[:, :1], images.y, images.classes))


def test_importing_data_stays_light():
    code = "import sys, doubly.data; print([m for m in ('sklearn', 'torchvision', 'PIL', 'scipy') if m in sys.modules])"
    path = [str(folder) for folder in sys.path]
    output = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path = {path}; {code}"], capture_output=True, text=True
    )
    assert output.stdout.strip() == "[]", output.stderr

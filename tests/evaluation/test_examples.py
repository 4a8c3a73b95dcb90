"""Attacked images as files: whole gray levels inside the threat, exact arrays, and their scores."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.examples import AttackedImages, quantized, save_examples
from doubly.threat import L2Ball, LinfBall


def column(values):
    return torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=30),
    st.integers(1, 32),
    st.lists(st.floats(-1, 1), min_size=30, max_size=30),
)
def test_gray_levels_never_leave_the_ball(levels, reach, shifts):
    clean, radius = column(levels) / 255, reach / 255
    attacked = (clean + radius * column(shifts[: len(levels)])).clamp(0, 1)
    result = (quantized(attacked, clean, LinfBall(radius)).double() * 255).flatten()
    assert torch.allclose(result, result.round(), atol=1e-4)
    assert result.min() >= 0 and result.max() <= 255
    assert ((result.round() - torch.tensor(levels)).abs() <= reach).all()
    assert ((result - 255 * attacked.double().flatten()).abs() <= 0.5 + 1e-3).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(1.01, 20), st.booleans())
def test_images_between_gray_levels_stay_inside_the_ball_too(pixels, reach, up):
    clean, radius = column(pixels), reach / 255
    result = quantized((clean + (radius if up else -radius)).clamp(0, 1), clean, LinfBall(radius))
    assert ((result - clean).abs() <= radius + 1e-6).all()


def test_an_l2_ball_is_only_rounded():
    clean, attacked = column([0.0]), column([0.1])
    assert quantized(attacked, clean, L2Ball(0.01)).item() == pytest.approx(26 / 255)
    assert quantized(attacked, clean, LinfBall(0.01)).item() == pytest.approx(2 / 255)


class IsBetweenLevels:
    """Remembers its images; predicts 1 where the first pixel is not a whole gray level."""

    def __init__(self):
        self.images = []

    def __call__(self, x):
        self.images.append(x)
        level = 255 * x[:, 0, 0, 0]
        return ((level - level.round()).abs() > 1e-3).long()


def five_images(channels=1, threat=None):
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(256, (5, channels, 4, 3), generator=generator) / 255
    attacked = (clean + 0.05 * (2 * torch.rand(clean.shape, generator=generator) - 1)).clamp(0, 1)
    images = Images(clean, torch.arange(5) % 2, ("a", "b"), 10 * torch.arange(5) + 3)
    return AttackedImages("pgd", torch.arange(5), attacked, threat or LinfBall(0.05)), images


def test_pictures_are_scored_as_they_are_read_back(tmp_path):
    for channels in (1, 3):
        (attacked, images), predict = five_images(channels), IsBetweenLevels()
        folder = tmp_path / str(channels)
        result = save_examples(folder, "png", attacked, images, predict)
        files = sorted(folder.iterdir())
        assert [file.name for file in files] == [f"{10 * i + 3:06d}-class{i % 2:03d}.png" for i in range(5)]
        expected = quantized(attacked.x, images.x, LinfBall(0.05))
        for file, image in zip(files, expected, strict=True):
            with Image.open(file) as picture:
                pixels = np.asarray(picture).reshape(4, 3, channels)
            assert picture.size == (3, 4) and picture.mode == ("L" if channels == 1 else "RGB")
            np.testing.assert_array_equal(pixels.transpose(2, 0, 1), (255 * image).round().numpy())
        assert torch.allclose(predict.images[0], expected, atol=1e-6)
        before = float((IsBetweenLevels()(attacked.x) == images.y).float().mean())
        scores = {"accuracy": pytest.approx(3 / 5), "accuracy_before": before}
        assert result == {"format": "png", "n": 5, "outside": 0, **scores} and before < 0.5


def test_arrays_keep_every_bit(tmp_path):
    for channels in (1, 4):
        attacked, images = five_images(channels)
        result = save_examples(tmp_path, "npz", attacked, images, IsBetweenLevels())
        with np.load(tmp_path / "examples.npz", allow_pickle=False) as arrays:
            assert torch.equal(torch.from_numpy(arrays["x"]), attacked.x)
            assert arrays["y"].tolist() == images.y.tolist() and arrays["ids"].tolist() == images.ids.tolist()
        assert result["accuracy"] == result["accuracy_before"] and result["format"] == "npz"


def test_images_outside_a_ball_without_a_gray_level_are_counted(tmp_path):
    clean, label = column([100.5]) / 255, torch.tensor([0])
    attacked = AttackedImages("pgd", label, clean, LinfBall(0.3 / 255))
    result = save_examples(tmp_path, "png", attacked, Images(clean, label, ("a",)), lambda x: label)
    assert result["outside"] == 1


def test_the_folder_holds_the_pictures_of_the_last_evaluation_only(tmp_path):
    attacked, images = five_images()
    save_examples(tmp_path, "png", attacked, images, IsBetweenLevels())
    save_examples(tmp_path, "png", attacked._replace(x=attacked.x[:2]), images.subset([0, 1]), IsBetweenLevels())
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_refusals(tmp_path):
    for image_format, channels, message in (
        ("png", 4, "these images have 4: save them as npz"),
        ("jpg", 1, "png or npz, got 'jpg'"),
        ("PNG", 1, "png or npz, got 'PNG'"),
    ):
        with pytest.raises(UsageError, match=message):
            save_examples(tmp_path, image_format, *five_images(channels), IsBetweenLevels())

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from doubly.errors import UsageError
from doubly.evaluation.examples import quantized, save_examples
from doubly.threat import L2Ball, LinfBall

LEVELS = st.lists(st.integers(0, 255), min_size=1, max_size=30)


def column(values):
    return torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)


@given(LEVELS, st.integers(1, 32), st.lists(st.floats(-1, 1), min_size=30, max_size=30))
def test_gray_levels_never_leave_the_ball(levels, reach, shifts):
    clean = column(levels) / 255
    radius = reach / 255
    attacked = (clean + radius * column(shifts[: len(levels)])).clamp(0, 1)
    found = (quantized(attacked, clean, LinfBall(radius)).double() * 255).flatten()
    assert torch.allclose(found, found.round(), atol=1e-4)
    assert found.min() >= 0 and found.max() <= 255
    assert ((found.round() - torch.tensor(levels)).abs() <= reach).all()
    assert ((found - 255 * attacked.double().flatten()).abs() <= 0.5 + 1e-3).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(1.01, 20), st.booleans())
def test_images_between_gray_levels_stay_within_the_ball_too(pixels, reach, up):
    clean, radius = column(pixels), reach / 255
    found = quantized((clean + (radius if up else -radius)).clamp(0, 1), clean, LinfBall(radius))
    assert ((found - clean).abs() <= radius + 1e-6).all()


def test_a_ball_without_a_gray_level_is_not_left_in_silence(tmp_path):
    clean = column([100.5]) / 255
    label = torch.tensor([0])
    found = save_examples(tmp_path, "png", clean, clean, label, label, LinfBall(0.3 / 255), lambda x: label)
    assert found["outside"] == 1


def test_an_l2_ball_is_only_rounded():
    clean, attacked = column([0.0]), column([0.1])
    assert quantized(attacked, clean, L2Ball(0.01)).item() == pytest.approx(26 / 255)
    assert quantized(attacked, clean, LinfBall(0.01)).item() == pytest.approx(2 / 255)


def images(channels=1, n=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(256, (n, channels, 4, 3), generator=generator) / 255
    attacked = (clean + 0.05 * (2 * torch.rand(clean.shape, generator=generator) - 1)).clamp(0, 1)
    return attacked, clean, torch.arange(n) % 2, 10 * torch.arange(n) + 3


class Answer:
    """Remembers what it was asked; 0 where the first pixel is a whole gray level."""

    def __init__(self):
        self.asked = []

    def __call__(self, x):
        self.asked.append(x)
        level = 255 * x[:, 0, 0, 0]
        return ((level - level.round()).abs() > 1e-3).long()


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_scored_as_they_are_read_back(tmp_path, channels):
    attacked, clean, y, ids = images(channels)
    answer = Answer()
    found = save_examples(tmp_path / "new", "png", attacked, clean, y, ids, LinfBall(0.05), answer)
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in files] == [f"{10 * i + 3:06d}-class{i % 2:03d}.png" for i in range(5)]
    expected = quantized(attacked, clean, LinfBall(0.05))
    for file, image in zip(files, expected, strict=True):
        with Image.open(file) as picture:
            pixels = np.asarray(picture).reshape(4, 3, channels)
        assert picture.size == (3, 4) and picture.mode == ("L" if channels == 1 else "RGB")
        np.testing.assert_array_equal(pixels.transpose(2, 0, 1), (255 * image).round().numpy())
    assert torch.allclose(answer.asked[0], expected, atol=1e-6)
    before = float((Answer()(attacked) == y).float().mean())
    accuracies = {"accuracy": pytest.approx(3 / 5), "accuracy_before": before}
    assert found == {"format": "png", "n": 5, "outside": 0, **accuracies}
    assert before < 0.5


@pytest.mark.parametrize("channels", [1, 4])
def test_arrays_keep_every_bit(tmp_path, channels):
    attacked, clean, y, ids = images(channels)
    found = save_examples(tmp_path, "npz", attacked, clean, y, ids, LinfBall(0.05), Answer())
    with np.load(tmp_path / "examples.npz", allow_pickle=False) as kept:
        assert torch.equal(torch.from_numpy(kept["x"]), attacked)
        assert kept["y"].tolist() == y.tolist() and kept["ids"].tolist() == ids.tolist()
    assert found["accuracy"] == found["accuracy_before"] and found["format"] == "npz"


def test_a_picture_has_one_channel_or_three(tmp_path):
    with pytest.raises(UsageError, match="these images have 4: save them as npz"):
        save_examples(tmp_path, "png", *images(4), LinfBall(0.05), Answer())


@pytest.mark.parametrize("kind", ["jpg", "PNG"])
def test_an_unknown_format_is_one_sentence(tmp_path, kind):
    with pytest.raises(UsageError, match=kind):
        save_examples(tmp_path, kind, *images(), LinfBall(0.05), Answer())


def test_the_folder_holds_the_pictures_of_this_evaluation(tmp_path):
    attacked, clean, y, ids = images()
    save_examples(tmp_path, "png", attacked, clean, y, ids, LinfBall(0.05), Answer())
    save_examples(tmp_path, "png", attacked[:2], clean[:2], y[:2], ids[:2], LinfBall(0.05), Answer())
    assert len(list(tmp_path.glob("*.png"))) == 2

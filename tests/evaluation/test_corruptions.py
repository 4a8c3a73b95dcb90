"""Corrupted images as CIFAR-10-C has them: accuracies by hand, and refusals."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from doubly import LinfBall, evaluate
from doubly.errors import UsageError
from doubly.evaluation.result import EvalResult


class Brightest(nn.Module):
    """The class is the channel with the highest sum."""

    def forward(self, x):
        return 5 * x.mean((2, 3))


def write(folder, **changes):
    """Write fog, which turns the first images into other classes, one more by each severity, and harmless rain."""
    y = np.arange(12) % 3
    rain = np.zeros((5, 12, 4, 4, 3), np.uint8)
    rain[:, np.arange(12), :, :, y] = 200
    fog = rain.copy()
    for severity in range(5):
        fog[severity, : severity + 1] = fog[severity, : severity + 1][..., [1, 2, 0]]
    arrays = {"rain": rain.reshape(60, 4, 4, 3), "fog": fog.reshape(60, 4, 4, 3), "labels": np.tile(y, 5), **changes}
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=True)
    return torch.from_numpy(rain[0]).permute(0, 3, 1, 2), torch.from_numpy(y)


def test_accuracies_by_corruption_and_severity_are_those_by_hand(tmp_path, cli):
    data = write(tmp_path / "c")
    result = evaluate(
        Brightest(), data, LinfBall(0.1), ["fgsm"], corruptions=tmp_path / "c", output=tmp_path / "out", trust=False
    )
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["corruptions"]
    fog, rain = found["corruptions"]["fog"], found["corruptions"]["rain"]
    assert rain["severities"] == [1] * 5 and rain["tail"] == 1 and found["n"] == 12
    assert fog["severities"] == pytest.approx([11 / 12, 10 / 12, 9 / 12, 8 / 12, 7 / 12])
    assert fog["accuracy"] == pytest.approx(0.75) and found["accuracy"] == pytest.approx(0.875)
    # Class 0 loses images 0 and 3 of its four: in 5 and 2 of five severities.
    assert found["per_class"]["0"] == pytest.approx(1 - 7 / 40) and found["tail_classes"] == ["0"]
    assert fog["tail"] == pytest.approx(1 - 7 / 20) and fog["tails"] == pytest.approx([0.75, 0.75, 0.75, 0.5, 0.5])
    assert EvalResult.load(tmp_path / "out").corruptions == result.corruptions
    fewer = evaluate(Brightest(), data, LinfBall(0.1), [], corruptions=str(tmp_path / "c"), images=3, trust=False)
    assert fewer.corruptions["n"] == 3


def test_folders_that_do_not_fit_are_refused_in_a_sentence(tmp_path):
    data = write(tmp_path / "c")
    zeros = np.zeros((60, 4, 4, 3), np.uint8)
    cases = [
        ({"fog": zeros.astype(np.float32)}, r"fog.npy has float32 of shape \(60, 4, 4, 3\), and needs uint8"),
        (
            {"fog": zeros[:, :2]},
            r"fog.npy has uint8 of shape \(60, 2, 4, 3\), and needs uint8 of shape \(60, 4, 4, 3\)",
        ),
        ({"fog": zeros[:59], "rain": zeros[:59]}, r"has 59 images and 60 labels: it needs five severities"),
        ({"labels": np.full(60, 3)}, r"has labels from 3 to 3 and the data 3 classes: give corruptions of this data"),
        ({"labels": np.zeros(60)}, r"labels.npy must hold one whole number per image, got float64"),
        ({"labels": np.array([{}] * 60)}, r"labels.npy cannot be read as an array"),
    ]
    for changes, sentence in cases:
        write(tmp_path / "c", **changes)
        with pytest.raises(UsageError, match=sentence):
            evaluate(Brightest(), data, LinfBall(0.1), [], corruptions=tmp_path / "c", trust=False)
    (tmp_path / "c" / "labels.npy").write_bytes(b"\x93NUMPY damaged")
    for folder, sentence in (
        ("c", "cannot be read as an array"),
        ("d", "there is no folder"),
        (".", "needs labels.npy"),
    ):
        with pytest.raises(UsageError, match=sentence):
            evaluate(Brightest(), data, LinfBall(0.1), [], corruptions=tmp_path / folder, trust=False)

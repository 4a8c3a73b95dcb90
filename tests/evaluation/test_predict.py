"""Predictions, losses and margins of clean and attacked images, and the check of the attacked images."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD, Attack
from doubly.bilevel import NormalizedStep, SignStep
from doubly.data import Images
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.predict import predict
from doubly.seeding import generator
from doubly.threat import L2Ball, LinfBall, Threat


class RowMeans(nn.Module):
    """Logits are four times the mean of each row of the image."""

    def __init__(self, classes=3):
        super().__init__()
        self.weight = nn.Parameter(4 * torch.eye(3)[:classes])

    def forward(self, x):
        return x.mean((1, 3)) @ self.weight.T


@dataclass(frozen=True)
class Shift(Attack):
    """Adds a constant, whatever the threat."""

    size: float
    threat: Threat = LinfBall(0.1)  # noqa: RUF009

    def __call__(self, model, x, y, generator):
        return torch.full_like(x, self.size)


def images(n=11, dtype=torch.float32):
    y = torch.arange(n) % 3
    x = 0.2 + 0.6 * torch.rand(n, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    return Images.of((255 * x).round().to(torch.uint8) if dtype is torch.uint8 else x, y)


def test_losses_and_classes_are_those_of_the_attacked_images():
    for dtype in (torch.uint8, torch.float32):
        data, network, attack = images(dtype=dtype), RowMeans(), PGD(LinfBall(0.1), 5, SignStep(0.01))
        done = []
        result = predict(network, data, {"pgd": attack}, seed=4, chunk_size=4, on_images=done.append)
        x = data.pixels(slice(None))
        attacked = []
        for index, start in enumerate(range(0, 11, 4)):
            part, y = x[start : start + 4], data.y[start : start + 4]
            attacked.append(part + attack(network, part, y, generator(4, 0, index, "evaluation")))
        for name, point in (("clean", x), ("pgd", torch.cat(attacked))):
            logits = network(point).detach()
            np.testing.assert_array_equal(result.classes[name], logits.argmax(1).numpy())
            losses = F.cross_entropy(logits, data.y, reduction="none")
            np.testing.assert_allclose(result.losses[name], losses, rtol=1e-5)
        assert result.losses["pgd"].dtype == np.float64 and result.losses["pgd"].mean() > result.losses["clean"].mean()
        assert done == [4, 8, 11]


def test_margins_are_those_of_a_linear_network_by_hand():
    """Rows of gray 0.5, 0.25 and 0.125 have the logits 2, 1 and 0.5."""
    x = torch.tensor([0.5, 0.25, 0.125]).view(1, 1, 3, 1).expand(3, 1, 3, 3)

    @dataclass(frozen=True)
    class DarkenFirstRow(Shift):
        def __call__(self, model, x, y, generator):
            return -torch.tensor([0.25, 0.0, 0.0]).view(3, 1).expand_as(x)

    result = predict(RowMeans(), Images.of(x, torch.arange(3)), {"dark": DarkenFirstRow(0.25)}, chunk_size=2)
    assert result.margins["clean"].tolist() == [1.0, -1.0, -1.5] and result.margins["clean"].dtype == np.float64
    assert result.margins["dark"].tolist() == [0.0, 0.0, -0.5]  # the two first rows are now equal


def test_a_margin_is_negative_where_the_prediction_is_wrong():
    data = images(200)
    result = predict(RowMeans(), data, {"pgd": PGD(LinfBall(0.1), 5, SignStep(0.05)), "shift": Shift(0.05)})
    assert set(result.margins) == {"clean", "pgd", "shift"}
    for name, margins in result.margins.items():
        wrong = result.classes[name] != data.y.numpy()
        assert (margins != 0).all() and wrong.any() and not wrong.all()
        np.testing.assert_array_equal(margins < 0, wrong)
    only = predict(RowMeans(1), images().subset([0, 3, 6]), {"shift": Shift(0.05)})  # of a single class
    assert (only.margins["clean"] == np.inf).all() and (only.margins["shift"] == np.inf).all()


def test_all_attacks_start_at_the_same_points():
    start = PGD(LinfBall(0.1), 0)
    result = predict(RowMeans(), images(), {"one": start, "two": start})
    np.testing.assert_array_equal(result.losses["one"], result.losses["two"])


def test_only_the_requested_attacked_images_are_kept():
    data, keep = images(), torch.tensor([0, 3, 4, 10])
    for chunk_size in (1, 4, 11, 500):
        result = predict(RowMeans(), data, {"shift": Shift(0.05)}, chunk_size=chunk_size, keep=keep)
        assert torch.equal(result.attacked["shift"], data.pixels(keep) + 0.05)
        assert predict(RowMeans(), data, {"shift": Shift(0.05)}, chunk_size=chunk_size).attacked == {}


def test_attacked_images_are_checked_against_their_threat():
    for attack, outside, largest in (
        (Shift(0.1, LinfBall(0.1)), 0, 1.0),
        (Shift(0.1, LinfBall(0.05)), 11, 2.0),
        (Shift(0.1, L2Ball(0.3)), 0, 1.0),
        (Shift(0.1, L2Ball(0.1)), 11, 3.0),
        (Shift(0.9, LinfBall(1.0)), 11, 0.9),
        (Shift(-0.9, LinfBall(1.0)), 11, 0.9),
        (PGD(LinfBall(0.1), 5, SignStep(0.05)), 0, 1.0),
        (PGD(L2Ball(0.2), 5, NormalizedStep(0.1)), 0, 1.0),
    ):
        result = predict(RowMeans(), images(), {"attack": attack}, chunk_size=4).examples
        assert result["outside"] == outside and result["changed"] == 0 and result["n"] == 11
        assert result["largest"] == pytest.approx(largest, rel=1e-5)
    result = predict(RowMeans(), images(), {"in": Shift(0.05), "out": Shift(0.2)}).examples
    assert result == {"n": 22, "asked": 22, "outside": 11, "changed": 0, "largest": pytest.approx(2.0, rel=1e-5)}


def test_predictions_that_depend_on_the_batch_are_counted():
    class Order(RowMeans):
        def forward(self, x):
            return super().forward(x) + 5 * F.one_hot(torch.arange(len(x)) % 3, 3)

    result = predict(Order(), images(9), {"shift": Shift(0.05)}).examples
    assert result["changed"] == 6  # the others have the same remainder from either end

    class Tie(RowMeans):
        def forward(self, x):
            rounding = 1e-6 * F.one_hot(torch.arange(len(x)) % 2, 3)  # another class leads in the reversed batch
            return 0 * super().forward(x) + torch.tensor([1.0, 1.0, -1.0]) + rounding

    assert predict(Tie(), images(8), {"shift": Shift(0.05)}).examples["changed"] == 0


def test_refusals():
    class Pole(RowMeans):
        def forward(self, x):
            return super().forward(x) / (x.amax((1, 2, 3), keepdim=False)[:, None] < 0.9).float()

    for call, kind, message in (
        (lambda: predict(RowMeans(), images(), {}, chunk_size=0), UsageError, "at least 1 image, got 0"),
        (lambda: predict(Pole(), images(), {"shift": Shift(0.15)}), NonFiniteError, "the model's logits"),
        (lambda: predict(RowMeans(2), images(), {}), UsageError, "returns 2 logits"),
    ):
        with pytest.raises(kind, match=message):
            call()

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import FGSM, NFGSM, PGD
from doubly.bilevel import NormalizedStep, SignStep
from doubly.data import Images
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.predict import answers
from doubly.seeding import generator
from doubly.threat import L2Ball, LinfBall


class Counted(nn.Module):
    """Scores by the mean of each row of the image."""

    def __init__(self, classes=3):
        super().__init__()
        self.weight = nn.Parameter(4 * torch.eye(3)[:classes])
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x.mean((1, 3)) @ self.weight.T


class Shift:
    """Adds a constant, whatever the ball."""

    def __init__(self, size, threat=None):
        self.size = size
        if threat is not None:
            self.threat = threat

    def __call__(self, model, x, y, generator):
        return torch.full_like(x, self.size)


def images(n=11, dtype=torch.float32, low=0.2, high=0.8):
    y = torch.arange(n) % 3
    x = low + (high - low) * torch.rand(n, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    x = (255 * x).round().to(torch.uint8) if dtype is torch.uint8 else x
    return Images.of(x, y)


PGD5 = PGD(LinfBall(0.1), 5, SignStep(0.05))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_losses_and_answers_are_those_of_the_attacked_images(dtype):
    data, network, attack = images(dtype=dtype), Counted(), PGD(LinfBall(0.1), 5, SignStep(0.01))
    found = answers(network, data, {"pgd": attack}, seed=4, chunk=4)
    x = data.pixels(slice(None))
    expected = []
    for index, start in enumerate(range(0, 11, 4)):
        part, y = x[start : start + 4], data.y[start : start + 4]
        expected.append(part + attack(network, part, y, generator(4, 0, index, "evaluation")))
    for name, point in (("clean", x), ("pgd", torch.cat(expected))):
        logits = network(point).detach()
        np.testing.assert_array_equal(found.classes[name], logits.argmax(1).numpy())
        np.testing.assert_allclose(found.losses[name], F.cross_entropy(logits, data.y, reduction="none"), rtol=1e-5)
    assert found.losses["pgd"].dtype == np.float64 and found.losses["pgd"].mean() > found.losses["clean"].mean()


def test_margins_are_those_of_a_linear_network_by_hand():
    """Rows of gray 0.5, 0.25 and 0.125 score 2, 1 and 0.5."""
    x = torch.tensor([0.5, 0.25, 0.125]).view(1, 1, 3, 1).expand(3, 1, 3, 3)
    darker = torch.tensor([0.25, 0.0, 0.0]).view(3, 1)

    def down(model, x, y, generator):
        return -darker.expand_as(x)

    found = answers(Counted(), Images.of(x, torch.arange(3)), {"down": down}, chunk=2)
    assert found.margins["clean"].tolist() == [1.0, -1.0, -1.5] and found.margins["clean"].dtype == np.float64
    assert found.margins["down"].tolist() == [0.0, 0.0, -0.5]  # the two first rows are now alike


def test_a_margin_is_negative_where_the_answer_is_wrong():
    data = images(200)
    found = answers(Counted(), data, {"pgd": PGD5, "shift": Shift(0.05)}, chunk=64)
    assert set(found.margins) == {"clean", "pgd", "shift"}
    for name, margins in found.margins.items():
        wrong = found.classes[name] != data.y.numpy()
        assert (margins != 0).all() and wrong.any() and not wrong.all()
        np.testing.assert_array_equal(margins < 0, wrong)


def test_the_margin_of_the_only_class_is_infinite():
    found = answers(Counted(1), images().subset([0, 3, 6]), {"shift": Shift(0.05)})
    assert (found.margins["clean"] == np.inf).all() and (found.margins["shift"] == np.inf).all()


def test_attacks_begin_at_the_same_points():
    found = answers(Counted(), images(), {"one": PGD5, "two": PGD5})
    np.testing.assert_array_equal(found.losses["one"], found.losses["two"])


@pytest.mark.parametrize("chunk", [1, 4, 11, 500])
def test_kept_images_are_those_that_were_asked_for(chunk):
    data, keep = images(), torch.tensor([0, 3, 4, 10])
    found = answers(Counted(), data, {"shift": Shift(0.05)}, chunk=chunk, keep=keep)
    assert torch.equal(found.attacked["shift"], data.pixels(keep) + 0.05)
    assert answers(Counted(), data, {"shift": Shift(0.05)}, chunk=chunk).attacked == {}


@pytest.mark.parametrize(
    ("attack", "outside", "largest"),
    [
        (Shift(0.1, LinfBall(0.1)), 0, 1.0),
        (Shift(0.1, LinfBall(0.05)), 11, 2.0),
        (Shift(0.1, L2Ball(0.3)), 0, 1.0),
        (Shift(0.1, L2Ball(0.1)), 11, 3.0),
        (Shift(0.9, LinfBall(1.0)), 11, 0.9),
        (Shift(-0.9, LinfBall(1.0)), 11, 0.9),
        (PGD5, 0, 1.0),
        (PGD(L2Ball(0.2), 5, NormalizedStep(0.1)), 0, 1.0),
    ],
)
def test_attacked_images_are_checked_again(attack, outside, largest):
    found = answers(Counted(), images(), {"attack": attack}, chunk=4).examples
    assert found["outside"] == outside and found["changed"] == 0 and found["n"] == 11
    assert found["largest"] == pytest.approx(largest, rel=1e-5)


def test_checks_of_several_attacks_add_up():
    attacks = {"in": Shift(0.05, LinfBall(0.1)), "out": Shift(0.2, LinfBall(0.1))}
    found = answers(Counted(), images(), attacks).examples
    assert found == {"n": 22, "asked": 22, "outside": 11, "changed": 0, "largest": pytest.approx(2.0, rel=1e-5)}


def test_an_answer_that_depends_on_the_batch_is_counted():
    class Order(Counted):
        def forward(self, x):
            return super().forward(x) + 5 * F.one_hot(torch.arange(len(x)) % 3, 3)

    found = answers(Order(), images(9), {"shift": Shift(0.05, LinfBall(0.1))}).examples
    assert found["changed"] == 6  # the others have the same remainder from either end


def test_what_leaves_the_ball_by_design_is_refused_before_anything_is_asked():
    network = Counted()
    with pytest.raises(UsageError, match="n_fgsm leaves the ball"):
        answers(network, images(), {"fgsm": FGSM(LinfBall(0.1)), "n_fgsm": NFGSM(LinfBall(0.1))})
    assert network.calls == 0


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_has_an_image(chunk):
    with pytest.raises(UsageError, match=f"at least 1 image, got {chunk}"):
        answers(Counted(), images(), {}, chunk=chunk)


def test_logits_that_are_not_finite_under_attack_are_one_sentence():
    class Pole(Counted):
        def forward(self, x):
            return super().forward(x) / (x.amax((1, 2, 3), keepdim=False)[:, None] < 0.9).float()

    with pytest.raises(NonFiniteError, match="the model's logits"):
        answers(Pole(), images(), {"shift": Shift(0.15)})


def test_a_label_that_the_network_does_not_know_is_one_sentence():
    with pytest.raises(UsageError, match="returns 2 logits"):
        answers(Counted(2), images(), {})


def test_an_attack_that_names_no_ball_is_not_said_to_stay_in_one():
    found = answers(Counted(), images(), {"mine": Shift(0.15)}).examples
    assert found["largest"] != 0 or found["n"] == 0

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import (
    AdamStep,
    BarrierStep,
    FirstThen,
    GradientStep,
    MomentumStep,
    NormalizedStep,
    SignStep,
)
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.attacks import pgd20
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.intervals import wilson
from doubly.evaluation.radius_curve import curve, curve_attack
from doubly.evaluation.result import EvalResult
from doubly.rundir import read_json
from doubly.threat import L2Ball, LinfBall


class Linear(nn.Module):
    """Class 1 where <w, x - 1/2> exceeds 0: an attack of radius e turns those with a margin below e |w|, dual norm."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        score = 4 * ((x - 0.5) * self.weight).sum((1, 2, 3))
        return torch.stack([-score, score], 1)


MEAN = Linear(torch.full((1, 2, 2), 0.25))
GRAY = torch.tensor([0.1, 0.45, 0.48, 0.52, 0.55, 0.9, 0.3])  # the last one is wrong from the start
IMAGES = Images.of(GRAY.view(-1, 1, 1, 1).expand(-1, 1, 2, 2), torch.tensor([0, 0, 0, 1, 1, 1, 1]), ["dark", "light"])


def drawn(n=300):
    """Images about gray, which no attack here takes to 0 or 1, one in ten with the wrong label; and a network."""
    generator = torch.Generator().manual_seed(0)
    x = 0.45 + 0.1 * torch.rand(n, 1, 3, 3, generator=generator)
    network = Linear(torch.randn(1, 3, 3, generator=generator))
    y = network(x).argmax(1)
    return network, Images.of(x, torch.where(torch.arange(n) % 10 == 0, 1 - y, y))


@pytest.mark.parametrize("ball", [LinfBall(0.03), L2Ball(0.06)])
def test_known_answers(ball):
    found = curve(MEAN, IMAGES, pgd20(ball), EvalConfig())
    radii = [share * ball.radius for share in (0, 0.25, 0.5, 1, 1.5, 2, 3, 4)]
    assert [point["epsilon"] for point in found["points"]] == radii and found["n"] == 7
    right = [6, 6, 6, 4, 4, 2, 2, 2]
    assert [point["accuracy"] for point in found["points"]] == [count / 7 for count in right]
    assert [point["tail_30"] for point in found["points"]] == [0.75, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.25]
    assert [point["interval"] for point in found["points"]] == [list(wilson(count, 7)) for count in right]
    assert found["attack"]["threat"]["radius"] == ball.radius and found["attack"]["steps"] == 20


@pytest.mark.parametrize(("ball", "order"), [(LinfBall(0.01), 1), (L2Ball(0.03), 2)])
def test_a_linear_network_loses_what_the_closed_form_says(ball, order):
    network, data = drawn()
    points = curve(network, data, pgd20(ball), EvalConfig(chunk=128))["points"]
    distance = (network(data.x)[:, 1] / 4 / network.weight.norm(order)).detach().numpy()
    signed = np.where(data.y == 1, distance, -distance)
    assert [point["accuracy"] for point in points] == [float(np.mean(signed > point["epsilon"])) for point in points]
    accuracies = [point["accuracy"] for point in points]
    assert accuracies == sorted(accuracies, reverse=True) and accuracies[0] == 0.9 and accuracies[-1] < 0.3


def test_the_curve_is_of_some_images_and_begins_at_their_clean_accuracy():
    network, data = drawn()
    found = evaluate(network, data, LinfBall(0.01), ["pgd"], curve_images=50)
    rows = validation(data.y, 50, 0)
    right = (network(data.x[rows]).argmax(1) == data.y[rows]).float().mean()
    assert found.curve["n"] == 50 and found.curve["points"][0]["accuracy"] == pytest.approx(float(right))
    assert found.curve["points"][0]["accuracy"] != found.sa


def test_on_all_images_the_draws_are_those_of_the_evaluation():
    """One short step: where it ends depends on where it began."""
    network, data = drawn()
    attack = PGD(LinfBall(0.04), 1, SignStep(0.001))
    found = evaluate(network, data, attacks=[attack], curve_images=10**6, chunk=70, seed=5)
    other = evaluate(network, data, attacks=[attack], curve_images=300, chunk=70, seed=6)
    assert found.curve["points"][0]["accuracy"] == found.sa and found.curve["points"][3]["accuracy"] == found.ra_pgd
    assert found.curve["points"] != other.curve["points"]


@pytest.mark.parametrize(
    "rule",
    [SignStep(), AdamStep(), MomentumStep(), FirstThen(), BarrierStep(), NormalizedStep(), GradientStep()],
    ids=lambda rule: type(rule).__name__,
)
def test_any_step_that_has_a_size_will_do(rule):
    points = curve(MEAN, IMAGES, PGD(LinfBall(0.03), 3, rule), EvalConfig())["points"]
    assert len(points) == 8 and points[-1]["accuracy"] <= points[0]["accuracy"] == 6 / 7


def test_no_radius_is_larger_than_the_image_range():
    points = curve(MEAN, IMAGES, pgd20(LinfBall(0.5)), EvalConfig())["points"]
    assert [point["epsilon"] for point in points] == [0, 0.125, 0.25, 0.5, 0.75, 1.0]
    assert len(curve(MEAN, IMAGES, pgd20(L2Ball(0.5)), EvalConfig())["points"]) == 8


@pytest.mark.parametrize(
    ("attacks", "radius", "steps"),
    [
        ([PGD(LinfBall(0.1), 3)], 0.1, 3),
        (["margin"], 8 / 255, 20),
        ({"pgd": FGSM(LinfBall(0.1))}, 0.1, 20),
        ([], 8 / 255, 20),
    ],
    ids=["own", "margin", "other", "clean"],
)
def test_the_attack_is_the_evaluation_s_or_the_usual_one(tmp_path, attacks, radius, steps):
    found = evaluate(MEAN, IMAGES, attacks=attacks, curve_images=4, output=tmp_path, trust=False)
    about = found.curve["attack"]
    assert (about["threat"]["radius"], about["steps"], found.curve["n"]) == (radius, steps, 4)
    assert read_json(tmp_path / "evaluation.json")["curve"] == found.curve == EvalResult.load(tmp_path).curve


def test_a_tail_of_another_share_does_not_go_by_the_name_of_30():
    found = curve(MEAN, IMAGES, pgd20(LinfBall(0.03)), EvalConfig(tail_share=0.5))
    assert all(set(point) == {"epsilon", "accuracy", "interval"} for point in found["points"])


def test_without_being_asked_for_there_is_no_curve(tmp_path):
    assert "curve" not in evaluate(MEAN, IMAGES, attacks=["pgd"], output=tmp_path).summary()
    assert EvalResult.load(tmp_path).curve == {}


class Sizeless:
    def init(self, delta):
        return {}

    def step(self, gradient, delta, constraint, state):
        return -0.01 * gradient.sign(), state


@dataclass(frozen=True)
class Anything:
    def around(self, x):
        return LinfBall(1.0).around(x)

    def scaled(self, share):
        return self


@pytest.mark.parametrize(
    ("attack", "said"),
    [(PGD(LinfBall(0.1), 2, Sizeless()), "Sizeless has no size"), (PGD(Anything(), 2), "needs a ball")],
)
def test_what_cannot_be_varied_is_said_before_anything_is_attacked(attack, said):
    class Asked(Linear):
        def forward(self, x):
            raise AssertionError("asked")

    with pytest.raises(UsageError, match=said):
        evaluate(Asked(torch.ones(1, 2, 2)), IMAGES, attacks=[attack], curve_images=3)


def test_without_a_ball_there_is_no_radius_to_vary():
    with pytest.raises(UsageError, match="needs a ball"):
        curve_attack({}, None)
    own = replace(pgd20(LinfBall(0.1)), steps=7)
    assert curve_attack({"pgd": own}, None) == own

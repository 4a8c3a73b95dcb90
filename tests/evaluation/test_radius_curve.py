"""Accuracy against the radius, for linear networks whose closed form is known."""

import numpy as np
import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import STEP_RULES, SignStep, StepRule
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.data.holdout import stratified_subset
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.attacks import reference_pgd
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.intervals import wilson
from doubly.evaluation.radius_curve import radius_curve
from doubly.evaluation.result import EvalResult
from doubly.rundir import read_json
from doubly.threat import L2Ball, LinfBall


class Linear(nn.Module):
    """Predicts 1 where <w, x - 1/2> exceeds 0; an attack of radius e breaks margins below e |w|, in the dual norm."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        score = 4 * ((x - 0.5) * self.weight).sum((1, 2, 3))
        return torch.stack([-score, score], 1)


MEAN = Linear(torch.full((1, 2, 2), 0.25))
GRAY = torch.tensor([0.1, 0.45, 0.48, 0.52, 0.55, 0.9, 0.3])  # the last one is wrong without an attack
IMAGES = Images.of(GRAY.view(-1, 1, 1, 1).expand(-1, 1, 2, 2), torch.tensor([0, 0, 0, 1, 1, 1, 1]), ["dark", "light"])


def random_problem(n=300):
    """Images around gray, which no attack here moves to 0 or 1, one in ten with the wrong label; and a network."""
    generator = torch.Generator().manual_seed(0)
    x = 0.45 + 0.1 * torch.rand(n, 1, 3, 3, generator=generator)
    network = Linear(torch.randn(1, 3, 3, generator=generator))
    y = network(x).argmax(1)
    return network, Images.of(x, torch.where(torch.arange(n) % 10 == 0, 1 - y, y))


def test_accuracies_that_are_known_by_hand():
    for threat in (LinfBall(0.03), L2Ball(0.06)):
        result = radius_curve(MEAN, IMAGES, reference_pgd(threat), EvalConfig())
        radii = [factor * threat.radius for factor in (0, 0.25, 0.5, 1, 1.5, 2, 3, 4)]
        assert [point["epsilon"] for point in result["points"]] == radii and result["n"] == 7
        correct = [6, 6, 6, 4, 4, 2, 2, 2]
        assert [point["accuracy"] for point in result["points"]] == [count / 7 for count in correct]
        assert [point["tail_30"] for point in result["points"]] == [0.75, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.25]
        assert [point["interval"] for point in result["points"]] == [list(wilson(count, 7)) for count in correct]
        assert result["attack"]["threat"]["radius"] == threat.radius and result["attack"]["steps"] == 20
    result = radius_curve(MEAN, IMAGES, reference_pgd(LinfBall(0.03)), EvalConfig(tail_share=0.5))
    assert all(set(point) == {"epsilon", "accuracy", "interval"} for point in result["points"])  # not called 30


def test_a_linear_network_loses_what_its_closed_form_says():
    network, data = random_problem()
    for threat, dual_norm in ((LinfBall(0.01), 1), (L2Ball(0.03), 2)):
        points = radius_curve(network, data, reference_pgd(threat), EvalConfig(chunk_size=128))["points"]
        distance = (network(data.x)[:, 1] / 4 / network.weight.norm(dual_norm)).detach().numpy()
        signed = np.where(data.y == 1, distance, -distance)
        accuracies = [point["accuracy"] for point in points]
        assert accuracies == [float(np.mean(signed > point["epsilon"])) for point in points]
        assert accuracies == sorted(accuracies, reverse=True) and accuracies[0] == 0.9 and accuracies[-1] < 0.3


def test_a_part_of_the_images_is_in_the_proportions_of_the_classes():
    network, data = random_problem()
    result = evaluate(network, data, LinfBall(0.01), ["pgd"], curve_images=50, trust=False)
    rows = stratified_subset(data.y, 50, 0)
    accuracy = (network(data.x[rows]).argmax(1) == data.y[rows]).float().mean()
    assert result.curve["n"] == 50 and result.curve["points"][0]["accuracy"] == pytest.approx(float(accuracy))
    assert result.curve["points"][0]["accuracy"] != result.sa


def test_on_all_images_the_random_numbers_are_those_of_the_evaluation():
    """One short step: where it ends depends on where it starts."""
    network, data = random_problem()
    weak = PGD(LinfBall(0.04), 1, SignStep(0.001))
    settings = {"attacks": [weak], "chunk_size": 70, "trust": False, "callbacks": [Callback()]}
    result = evaluate(network, data, **settings, curve_images=10**6, seed=5)
    other = evaluate(network, data, **settings, curve_images=300, seed=6)
    assert result.curve["points"][0]["accuracy"] == result.sa and result.curve["points"][3]["accuracy"] == result.ra_pgd
    assert result.curve["points"] != other.curve["points"]


def test_every_step_rule_can_be_scaled():
    for rule in STEP_RULES.values():
        points = radius_curve(MEAN, IMAGES, PGD(LinfBall(0.03), 3, rule()), EvalConfig())["points"]
        assert len(points) == 8 and points[-1]["accuracy"] <= points[0]["accuracy"] == 6 / 7


def test_no_radius_is_larger_than_the_threat_allows():
    points = radius_curve(MEAN, IMAGES, reference_pgd(LinfBall(0.5)), EvalConfig())["points"]
    assert [point["epsilon"] for point in points] == [0, 0.125, 0.25, 0.5, 0.75, 1.0]
    assert len(radius_curve(MEAN, IMAGES, reference_pgd(L2Ball(0.5)), EvalConfig())["points"]) == 8


def test_the_attack_is_the_evaluations_pgd_or_else_the_reference_and_is_saved(tmp_path):
    for attacks, radius, steps in (
        ([PGD(LinfBall(0.1), 3)], 0.1, 3),
        (["margin"], 8 / 255, 20),
        ({"pgd": FGSM(LinfBall(0.1))}, 0.1, 20),
        ([], 8 / 255, 20),
    ):
        result = evaluate(MEAN, IMAGES, attacks=attacks, curve_images=4, output=tmp_path, trust=False)
        attack = result.curve["attack"]
        assert (attack["threat"]["radius"], attack["steps"], result.curve["n"]) == (radius, steps, 4)
        assert read_json(tmp_path / "evaluation.json")["curve"] == result.curve == EvalResult.load(tmp_path).curve
    assert "curve" not in evaluate(MEAN, IMAGES, attacks=["pgd"], output=tmp_path, trust=False).summary()


def test_steps_without_a_size_are_refused_before_any_attack():
    class Sizeless(StepRule):
        def scaled(self, factor):
            raise TypeError("Sizeless has no size")

    class NotCalled(Linear):
        def forward(self, x):
            raise AssertionError("called")

    attack = PGD(LinfBall(0.1), 2, Sizeless())
    with pytest.raises(UsageError, match="Sizeless has no size"):
        evaluate(NotCalled(torch.ones(1, 2, 2)), IMAGES, attacks=[attack], curve_images=3)

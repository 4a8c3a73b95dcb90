"""In fp16 the gradients of the input keep their size; CPU autocast stands in for CUDA's."""

import pytest
import torch
from torch import nn

from doubly.attacks import PGD, attacked
from doubly.bilevel import GradientStep, SignStep
from doubly.losses import CrossEntropy
from doubly.threat import LinfBall


def fp16():
    return torch.autocast("cpu", torch.float16, cache_enabled=False)


@pytest.fixture
def sure():
    """(network, x, y): the further down a sample is, the surer the network is of it, to p = 1 - 1e-13."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    x = torch.rand(8, 1, 4, 4)
    scale = torch.linspace(1, 30, 8)

    class Surer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = model

        def forward(self, x):
            logits = self.inside(x)
            return logits + torch.stack([scale, 0 * scale, 0 * scale], 1).to(logits)

    return Surer(), x, torch.zeros(8, dtype=torch.int64)


def gradient(model, x, y, mode):
    point = x.clone().requires_grad_()
    with attacked(model, mode):
        return torch.autograd.grad(CrossEntropy()(model(1 * point), y).sum(), point)[0]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_gradients_that_fp16_would_lose_are_kept(sure, mode):
    exact = gradient(*sure, mode)
    with fp16():
        kept = gradient(*sure, mode)
    error = (kept - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert exact[-1].abs().max() < 1e-12
    assert error[:3].max() < 0.02
    assert mode == "train" or error.max() < 0.02  # one factor for all cannot do that


def test_without_the_factor_they_are_lost(sure):
    model, x, y = sure
    point = x.clone().requires_grad_()
    with fp16():
        lost = torch.autograd.grad(CrossEntropy()(model(point), y).sum(), point)[0]
    assert (lost[4:] == 0).all()


@pytest.mark.parametrize("rule", [SignStep(0.05), GradientStep(1e12)])
def test_the_attack_moves_samples_that_the_network_is_sure_of(sure, rule):
    attack = PGD(LinfBall(0.1), 2, rule, start="zero")
    exact = attack(*sure, torch.Generator())
    with fp16():
        found = attack(*sure, torch.Generator())
    assert found[-1].abs().max() > 0.01
    assert ((found - exact).abs() < 0.01).float().mean() > 0.98


def test_nothing_is_left_behind_and_parameters_outside_see_no_factor(sure):
    model, x, y = sure
    with fp16():
        gradient(model, x, y, "eval")
        assert not model._forward_hooks
        found = torch.autograd.grad(CrossEntropy()(model(x), y)[0], model.inside[3].bias)[0]
    assert found.abs().max() < 1


def test_a_sample_without_a_gradient_has_none(sure):
    model, x, y = sure
    with torch.no_grad(), fp16(), attacked(model, "eval"):
        assert model(x).shape == (8, 3)
    with fp16():
        assert (gradient(lambda_zero(), x, y, "eval") == 0).all()


def lambda_zero():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.zeros_(model[1].weight)
    return model

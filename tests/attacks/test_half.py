"""In fp16 the gradients of the input keep their size; CPU autocast stands in for CUDA's."""

import pytest
import torch
from torch import nn

from doubly.attacks import PGD, attack_context
from doubly.bilevel import GradientStep, SignStep
from doubly.losses import CrossEntropy
from doubly.threat import LinfBall


def fp16():
    return torch.autocast("cpu", torch.float16, cache_enabled=False)


class Confident(nn.Module):
    """The higher the index of a sample, the surer the network is of it, up to p = 1 - 1e-13."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        logits = self.inside(x)
        scale = torch.linspace(1, 30, 8)
        return logits + torch.stack([scale, 0 * scale, 0 * scale], 1).to(logits)


@pytest.fixture
def problem():
    """Return a network, images and labels."""
    torch.manual_seed(0)
    return Confident(), torch.rand(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64)


def gradient(model, x, y, mode):
    point = x.clone().requires_grad_()
    with attack_context(model, mode):
        return torch.autograd.grad(CrossEntropy()(model(1 * point), y).sum(), point)[0]


def test_gradients_that_fp16_would_round_to_zero_are_kept(problem):
    model, x, y = problem
    point = x.clone().requires_grad_()
    with fp16():
        unscaled = torch.autograd.grad(CrossEntropy()(model(point), y).sum(), point)[0]
    assert (unscaled[4:] == 0).all()
    for mode in ("eval", "train"):
        exact = gradient(*problem, mode)
        with fp16():
            scaled = gradient(*problem, mode)
        error = (scaled - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        assert exact[-1].abs().max() < 1e-12
        assert error[:3].max() < 0.02
        assert mode == "train" or error.max() < 0.02  # one factor for the batch cannot do that


def test_the_attack_moves_samples_that_the_network_is_sure_of(problem):
    for rule in (SignStep(0.05), GradientStep(1e12)):
        attack = PGD(LinfBall(0.1), 2, rule, start="zero")
        exact = attack(*problem, torch.Generator())
        with fp16():
            delta = attack(*problem, torch.Generator())
        assert delta[-1].abs().max() > 0.01
        assert ((delta - exact).abs() < 0.01).float().mean() > 0.98


def test_no_hook_remains_and_gradients_of_parameters_are_not_scaled(problem):
    model, x, y = problem
    with fp16():
        gradient(model, x, y, "eval")
        assert not model._forward_hooks
        bias_gradient = torch.autograd.grad(CrossEntropy()(model(x), y)[0], model.inside[3].bias)[0]
    assert bias_gradient.abs().max() < 1


def test_a_gradient_of_zero_stays_zero_and_without_gradients_nothing_is_scaled(problem):
    model, x, y = problem
    with torch.no_grad(), fp16(), attack_context(model, "eval"):
        assert model(x).shape == (8, 3)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.zeros_(flat[1].weight)
    with fp16():
        assert (gradient(flat, x, y, "eval") == 0).all()

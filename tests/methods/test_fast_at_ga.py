"""Gradient alignment, on a network whose input gradient is known in closed form."""

import pytest
import torch
from torch import nn

from doubly.attacks import FGSM
from doubly.errors import UsageError
from doubly.methods import AT, FastATGA
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import gradients

ATTACK = FGSM(LinfBall(0.1), reach=1.25)


class Quadratic(nn.Module):
    """Two logits, 0 and a quadratic function of the input: gradients that turn, in closed form."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[2.0, -1.0, 0.5, 1.5]], dtype=torch.float64))
        self.tilt = nn.Parameter(torch.tensor([[0.3, 0.2, -0.4, 0.1]], dtype=torch.float64))

    def forward(self, x):
        flat = x.flatten(1)
        first = (0.5 * self.scale * flat.square() + self.tilt * flat).sum(1)
        return torch.stack([first, torch.zeros_like(first)], 1)


def batch(count=5):
    generator = torch.Generator().manual_seed(2)
    x = 0.3 + 0.4 * torch.rand(count, 1, 2, 2, generator=generator, dtype=torch.float64)
    return Batch(x, torch.arange(count) % 2, torch.arange(count))


def test_the_penalty_is_one_minus_the_mean_cosine_of_the_two_input_gradients(monkeypatch):
    monkeypatch.setattr("doubly.seeding.BatchGenerator.uniform", lambda self, like: torch.full_like(like, 0.9))
    model, samples = Quadratic(), batch()
    result = FastATGA(ATTACK, strength=0.7).objective(model, samples, {}, TrainStep())
    # The input gradient of cross-entropy is (p_1 - [y = 0]) times that of the first logit, so it has its direction.
    flat, noise = samples.x.flatten(1), 0.1 * 0.8
    sign = torch.where(samples.y == 0, -1.0, 1.0)[:, None]
    at_image = sign * (model.scale * flat + model.tilt).detach()  # a constant
    at_noise = sign * (model.scale * (flat + noise) + model.tilt)
    cosine = (at_image * at_noise).sum(1) / (at_image.norm(dim=1) * at_noise.norm(dim=1))
    penalty = 0.7 * (1 - cosine.mean())
    plain = AT(ATTACK).objective(model, samples, {}, TrainStep())
    assert torch.allclose(result.loss, plain.loss + penalty, rtol=1e-10)
    assert result.record["alignment"].item() == pytest.approx(cosine.mean().item(), rel=1e-10)
    expected = gradients(plain.loss + penalty, model)
    assert all(torch.allclose(a, b, rtol=1e-8) for a, b in zip(gradients(result.loss, model), expected, strict=True))


def test_without_strength_it_is_fgsm_training():
    model = Quadratic()
    plain = gradients(AT(ATTACK).objective(model, batch(), {}, TrainStep()).loss, model)
    none = gradients(FastATGA(ATTACK, strength=0.0).objective(model, batch(), {}, TrainStep()).loss, model)
    assert all(torch.equal(a, b) for a, b in zip(plain, none, strict=True))


def test_samples_without_a_gradient_do_not_count(monkeypatch):
    monkeypatch.setattr("doubly.seeding.BatchGenerator.uniform", lambda self, like: torch.full_like(like, 0.9))
    model, samples = Quadratic(), batch()
    model.tilt.data.zero_()
    samples.x[0] = 0.0  # where the first logit has no gradient
    result = FastATGA(ATTACK).objective(model, samples, {}, TrainStep())
    rest = FastATGA(ATTACK).objective(model, Batch(*(part[1:] for part in samples)), {}, TrainStep())
    assert result.loss.isfinite() and all(g.isfinite().all() for g in gradients(result.loss, model))
    assert result.record["alignment"].item() == pytest.approx(rest.record["alignment"].item(), rel=1e-12)
    samples.x.zero_()
    assert FastATGA(ATTACK).objective(model, samples, {}, TrainStep()).record["alignment"] == 1


def test_a_negative_strength_is_refused():
    with pytest.raises(UsageError, match="must not be negative"):
        FastATGA(strength=-1.0)

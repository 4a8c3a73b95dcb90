import pytest
import torch
from torch import nn

from doubly.attacks import NFGSM
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.threat import LinfBall

EPS = 0.1


def problem():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    return model, 0.5 * torch.ones(6, 1, 2, 2, dtype=torch.float64), torch.arange(6) % 3


def test_delta_is_the_noise_plus_one_sign_step_and_leaves_the_ball():
    model, x, y = problem()
    delta = NFGSM(LinfBall(EPS))(model, x, y, torch.Generator().manual_seed(1))
    noise = 2 * EPS * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).double() - 1)
    point = (x + noise).requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(point), y, reduction="sum"), point)
    assert torch.allclose(delta, noise + EPS * gradient.sign(), atol=1e-12)
    assert delta.abs().max() > 2 * EPS  # by design
    without_noise = NFGSM(LinfBall(EPS), noise=0.0)(model, x, y, torch.Generator())
    assert torch.allclose(without_noise.abs(), torch.full_like(x, EPS))  # FGSM


def test_delta_is_cut_to_the_image_range():
    model, x, y = problem()
    for level in (0.0, 1.0):
        image = torch.full_like(x, level)
        delta = NFGSM(LinfBall(EPS))(model, image, y, torch.Generator().manual_seed(0))
        assert (image + delta).min() >= 0 and (image + delta).max() <= 1


def test_scaling_shortens_noise_and_step():
    assert NFGSM(LinfBall(EPS)).scaled(0.5) == NFGSM(LinfBall(EPS / 2))


def test_refused_settings():
    for settings, message in [
        ({"reach": 0.0}, "reach > 0"),
        ({"noise": -1.0}, "noise >= 0"),
        ({"loss": TradesLoss()}, "N-FGSM knows one set of logits"),
    ]:
        with pytest.raises(UsageError, match=message):
            NFGSM(**settings)

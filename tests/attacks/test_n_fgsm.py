import pytest
import torch
from torch import nn

from doubly.attacks import NFGSM
from doubly.errors import UsageError
from doubly.threat import LinfBall

EPS = 0.1


def setting():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    return model, 0.5 * torch.ones(6, 1, 2, 2, dtype=torch.float64), torch.arange(6) % 3


def test_delta_is_the_noise_plus_one_sign_step_and_leaves_the_ball(monkeypatch):
    drawn = torch.rand(6, 1, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    monkeypatch.setattr("doubly.distributed.collectives.uniform", lambda like, generator: drawn)
    model, x, y = setting()
    found = NFGSM(LinfBall(EPS))(model, x, y, torch.Generator())
    noise = 2 * EPS * (2 * drawn - 1)
    point = (x + noise).requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(point), y, reduction="sum"), point)
    assert torch.allclose(found, noise + EPS * gradient.sign(), atol=1e-12)
    assert found.abs().max() > 2 * EPS  # by design


def test_it_is_cut_to_the_image_range():
    model, x, y = setting()
    for level in (0.0, 1.0):
        image = torch.full_like(x, level)
        delta = NFGSM(LinfBall(EPS))(model, image, y, torch.Generator().manual_seed(0))
        assert (image + delta).min() >= 0 and (image + delta).max() <= 1


def test_without_noise_it_is_fgsm():
    model, x, y = setting()
    delta = NFGSM(LinfBall(EPS), noise=0.0)(model, x, y, torch.Generator())
    assert torch.allclose(delta.abs(), torch.full_like(delta, EPS))


def test_warm_up_shortens_noise_and_step():
    assert NFGSM(LinfBall(EPS)).scaled(0.5) == NFGSM(LinfBall(EPS / 2))


def test_no_step_at_all_is_refused():
    with pytest.raises(UsageError, match="reach > 0"):
        NFGSM(reach=0.0)

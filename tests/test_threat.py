import pytest
import torch

from doubly.bilevel import Ball, Box
from doubly.errors import UsageError
from doubly.threat import THREATS, L2Ball, LinfBall, Threat


def test_every_threat_is_listed_with_defaults():
    assert set(THREATS.values()) == {LinfBall, L2Ball}
    assert all(isinstance(kind(), Threat) for kind in THREATS.values())


def test_the_box_is_the_ball_cut_to_the_image_range():
    x = torch.tensor([[0.0, 0.05, 0.5, 0.95, 1.0]])
    box = LinfBall(0.1, barrier=0.5).around(x)
    assert isinstance(box, Box) and box.strength == 0.5
    assert torch.allclose(box.lower, torch.tensor([[0.0, -0.05, -0.1, -0.1, -0.1]]))
    assert torch.allclose(box.upper, torch.tensor([[0.1, 0.1, 0.1, 0.05, 0.0]]))


@pytest.mark.parametrize("radius", [8 / 255, 0.3, 0.7, 1.0])
def test_every_corner_is_an_image_exactly_and_within_the_radius(radius):
    levels = torch.arange(256) / 255
    x = torch.cat([levels, torch.rand(5000, generator=torch.Generator().manual_seed(0))])[None]
    box = LinfBall(radius).around(x)
    for corner in (box.lower, box.upper):
        assert corner.abs().max() <= radius
        assert (x + corner).min() >= 0 and (x + corner).max() <= 1
    assert (box.lower <= 0).all() and (box.upper >= 0).all()


def test_the_l2_ball_is_cut_to_the_image_range():
    x = torch.rand(20, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    ball = L2Ball(0.5).around(x)
    assert isinstance(ball, Ball)
    delta = ball.project(torch.randn(20, 3, 4, 4, generator=torch.Generator().manual_seed(1)))
    assert (delta.flatten(1).norm(dim=1) <= 0.5 * (1 + 1e-6)).all()
    assert (x + delta).min() >= 0 and (x + delta).max() <= 1


@pytest.mark.parametrize("radius", [0.0, -0.1, 1.001, 8.0, float("nan")])
def test_an_epsilon_outside_zero_to_one_is_refused_with_the_fix(radius):
    with pytest.raises(UsageError, match="8/255"):
        LinfBall(radius)


def test_other_bad_numbers_are_refused():
    with pytest.raises(UsageError, match="barrier"):
        LinfBall(0.1, barrier=0.0)
    for radius in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="epsilon"):
            L2Ball(radius)

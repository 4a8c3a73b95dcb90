"""The two balls; what every threat promises is in contracts/test_threats.py."""

import math

import pytest
import torch

from doubly.bilevel import Ball, Box
from doubly.errors import UsageError
from doubly.threat import L2Ball, LinfBall, is_image, is_inside


def test_the_box_is_the_ball_cut_to_the_image_range():
    x = torch.tensor([[0.0, 0.05, 0.5, 0.95, 1.0]])
    box = LinfBall(0.1, barrier=0.5).around(x)
    assert isinstance(box, Box) and box.strength == 0.5
    assert torch.allclose(box.lower, torch.tensor([[0.0, -0.05, -0.1, -0.1, -0.1]]))
    assert torch.allclose(box.upper, torch.tensor([[0.1, 0.1, 0.1, 0.05, 0.0]]))
    assert LinfBall(0.1).has_barrier and torch.equal(LinfBall(0.1).box(x).lower, box.lower)


def test_every_corner_of_the_box_is_an_image_exactly_and_within_the_radius():
    levels = torch.arange(256) / 255
    x = torch.cat([levels, torch.rand(5000, generator=torch.Generator().manual_seed(0))])[None]
    for radius in (8 / 255, 0.3, 0.7, 1.0):
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
    with pytest.raises(UsageError, match="L2Ball is not a box and has no barrier: use LinfBall"):
        L2Ball().box(x)


def test_lengths_by_hand():
    delta = torch.tensor([[3.0, -4.0], [0.0, 0.5]]).view(2, 1, 1, 2)
    assert LinfBall().length(delta).tolist() == [4.0, 0.5] and L2Ball().length(delta).tolist() == [5.0, 0.5]
    assert is_inside(L2Ball(5.0), delta).tolist() == [True, True]
    assert is_inside(LinfBall(0.5), delta).tolist() == [False, True]


def test_any_image_lies_in_the_unbounded_threat():
    x = torch.stack([torch.zeros(1, 3, 3), torch.ones(1, 3, 3)])
    assert LinfBall(0.1, barrier=0.5).unbounded(x) == LinfBall(1.0, barrier=0.5)
    assert L2Ball(0.1).unbounded(x) == L2Ball(3.0)


def test_images_are_numbers_from_0_to_1():
    x = torch.tensor([[0.0, 1.0], [-1e-6, 0.5], [0.5, 1.001], [math.nan, 0.5]]).view(4, 1, 1, 2)
    assert is_image(x).tolist() == [True, False, False, False]


def test_rounded_images_are_moved_back_into_the_box():
    clean = torch.tensor([[0.0, 100.4, 200.0, 255.0]]) / 255
    levels = torch.tensor([[8.0, 92.0, 208.0, 246.0]])
    # 92 is 8.4 levels below 100.4, and 246 nine below 255: both have to come back.
    assert LinfBall(8 / 255).clip_gray_levels(levels, clean).tolist() == [[8.0, 93.0, 208.0, 247.0]]
    assert torch.equal(L2Ball().clip_gray_levels(levels, clean), levels)


def test_refused_numbers():
    for kind, settings, message in [
        *((LinfBall, {"radius": radius}, "8/255") for radius in (0.0, -0.1, 1.001, 8.0, math.nan)),
        (LinfBall, {"barrier": 0.0}, "barrier"),
        *((L2Ball, {"radius": radius}, "epsilon") for radius in (0.0, -1.0, math.inf, math.nan)),
    ]:
        with pytest.raises(UsageError, match=message):
            kind(**settings)

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from doubly.bilevel import Ball, Box, Simplex


def wide(shape, room=10.0):
    return Box(torch.full(shape, -room), torch.full(shape, room))


def norms(delta):
    return delta.flatten(1).norm(dim=1)


def test_a_point_outside_goes_to_the_sphere_and_one_inside_stays():
    ball = Ball(0.5, wide((2, 1, 1, 2)))
    delta = torch.tensor([[3.0, 4.0], [0.1, -0.2]]).view(2, 1, 1, 2)
    assert torch.allclose(ball.project(delta).view(2, 2), torch.tensor([[0.3, 0.4], [0.1, -0.2]]))


def test_projection_onto_ball_and_box_is_feasible():
    box = Box(torch.full((64, 3, 4, 4), -0.05), torch.full((64, 3, 4, 4), 0.2))
    delta = torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    found = Ball(0.5, box).project(delta)
    assert (norms(found) <= 0.5 * (1 + 1e-6)).all()
    assert (found >= box.lower).all() and (found <= box.upper).all()


def test_zero_stays_zero():
    ball = Ball(0.5, wide((1, 3)))
    assert torch.equal(ball.project(torch.zeros(1, 3)), torch.zeros(1, 3))
    assert ball.at(torch.full((1, 3), 0.5)).isfinite().all()


def test_points_from_uniform_draws_are_inside_and_fill_the_radius():
    ball = Ball(0.5, wide((500, 6)))
    found = norms(ball.at(torch.rand(500, 6, generator=torch.Generator().manual_seed(0))))
    assert found.max() <= 0.5 * (1 + 1e-6)
    assert found.min() < 0.02 and found.max() > 0.48


def test_without_a_box_only_the_length_is_bounded():
    delta = torch.tensor([[30.0, 40.0], [0.1, -0.2]], dtype=torch.float64)
    expected = torch.tensor([[0.3, 0.4], [0.1, -0.2]], dtype=torch.float64)
    assert torch.allclose(Ball(0.5).project(delta), expected, rtol=1e-15)


def test_each_row_may_have_its_own_radius():
    delta = torch.full((3, 2, 2), 1.0, dtype=torch.float64)
    found = Ball(torch.tensor([0.5, 1.0, 9.0], dtype=torch.float64)).project(delta)
    assert torch.allclose(norms(found), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))


def test_where_one_of_ball_and_box_binds_the_projection_is_the_nearest_point():
    ball = Ball(1.0, Box(-0.3, 0.3))
    delta = torch.tensor([[0.5, 0.2, 0.0], [0.2, -0.1, 0.1]], dtype=torch.float64)  # inside the ball: the box's clip
    assert torch.equal(ball.project(delta), delta.clamp(-0.3, 0.3))
    delta = torch.tensor([[0.3, -0.4, 0.2]], dtype=torch.float64)  # inside the box once it is rescaled
    assert torch.allclose(Ball(0.1, Box(-0.3, 0.3)).project(delta), 0.1 * delta / norms(delta))


def at_rest(ball, target):
    """delta suggestion to the target and the slope of half the squared distance there."""
    delta = ball.project(target)
    return delta, delta - target


def test_a_row_on_the_sphere_may_not_move_outwards_and_one_inside_may_move_anywhere():
    ball = Ball(1.0)
    delta, slope = at_rest(ball, torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.1, -0.2]], dtype=torch.float64))
    face = ball.face(delta, slope)
    assert face.free is None
    assert torch.allclose(face.normal, torch.tensor([[0.6, 0.8, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64))
    assert torch.allclose(face.multiplier, torch.tensor([4.0, 0.0], dtype=torch.float64))  # |target| / radius - 1


def test_a_row_is_free_on_the_sphere_where_descent_leads_inwards_and_inside_where_it_leads_outwards():
    delta = torch.tensor([[0.6, 0.8], [0.3, 0.4]], dtype=torch.float64)
    face = Ball(1.0).face(delta, slope=torch.stack([delta[0], -delta[1]]))
    assert not face.normal.any() and not face.multiplier.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 3072])
def test_a_projected_point_is_found_to_be_on_the_sphere_in_either_precision(size, dtype):
    target = torch.randn(8, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    ball = Ball(0.01 * target.norm(dim=1).min().item())
    assert (ball.face(*at_rest(ball, target)).multiplier > 0).all()


def test_where_the_box_holds_a_coordinate_the_normal_and_the_multiplier_are_those_of_the_others():
    ball = Ball(1.0, Box(-0.6, 0.6))
    delta = torch.tensor([[0.6, 0.8 * 0.6, 0.8 * 0.8]], dtype=torch.float64)
    wide = Ball(1.0, Box(-0.6, 0.9))
    slope = torch.tensor([[-5.0, -2 * 0.48, -2 * 0.64]], dtype=torch.float64)  # of the free: -2 * delta
    held = Ball(1.0, Box(-0.6, torch.tensor([0.6, 0.9, 0.9], dtype=torch.float64))).face(delta, slope)
    assert torch.equal(held.free, torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64))
    assert torch.allclose(held.normal, torch.tensor([[0.0, 0.6, 0.8]], dtype=torch.float64))
    assert torch.allclose(held.multiplier, torch.tensor([2.0], dtype=torch.float64))
    assert wide.face(delta, slope).free.all() and not ball.face(delta, slope).free[0, 0]


def test_the_projection_onto_ball_and_box_is_the_nearest_point_by_a_convex_solver():
    box = Box(torch.full((1, 4), -0.5, dtype=torch.float64), torch.full((1, 4), 0.5, dtype=torch.float64))
    ball = Ball(0.8, box)
    kinds = set()
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        point = torch.randn(1, 4, generator=generator, dtype=torch.float64) * (0.3 + 0.1 * seed)
        found = ball.project(point)
        solved = minimize(
            lambda d, point=point: ((d - point[0].numpy()) ** 2).sum(),
            np.zeros(4),
            bounds=[(-0.5, 0.5)] * 4,
            constraints={"type": "ineq", "fun": lambda d: 0.64 - (d**2).sum()},
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        assert np.abs(found[0].numpy() - solved.x).max() < 1e-5
        assert found.norm() <= 0.8 * (1 + 1e-12) and found.abs().max() <= 0.5
        kinds.add(((found.abs() == 0.5).any().item(), bool(found.norm() > 0.8 - 1e-9)))
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}  # every way to bind was met


@pytest.mark.parametrize("make", [lambda: Ball(-1.0), lambda: Ball(0.0), lambda: Box(1.0, -1.0), lambda: Simplex(0.0)])
def test_sets_without_points_are_refused(make):
    with pytest.raises(ValueError, match=r"is not allowed|leave nothing between"):
        make()

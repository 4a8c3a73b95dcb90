import numpy as np
import torch
from scipy.optimize import minimize

from doubly.bilevel import Ball, Box


def rows(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def norms(delta):
    return delta.flatten(1).norm(dim=1)


def minimizer(ball, target):
    """The point of the ball nearest to the target, and the gradient of half the squared distance there."""
    delta = ball.project(target)
    return delta, delta - target


def test_a_point_outside_goes_to_the_sphere_and_one_inside_stays():
    delta, expected = rows([30.0, 40.0], [0.1, -0.2]), rows([0.3, 0.4], [0.1, -0.2])
    assert torch.allclose(Ball(0.5).project(delta), expected, rtol=1e-15)
    image = (2, 1, 1, 2)
    assert torch.allclose(Ball(0.5, Box(-10.0, 10.0)).project(delta.view(image)), expected.view(image))


def test_each_row_may_have_its_own_radius():
    projected = Ball(rows(0.5, 1.0, 9.0)).project(torch.ones(3, 2, 2, dtype=torch.float64))
    assert torch.allclose(norms(projected), rows(0.5, 1.0, 2.0))


def test_zero_stays_zero():
    ball = Ball(0.5, Box(-10.0, 10.0))
    assert torch.equal(ball.project(torch.zeros(1, 3)), torch.zeros(1, 3))
    assert ball.at(torch.full((1, 3), 0.5)).isfinite().all()


def test_points_from_uniform_draws_are_inside_and_fill_the_radius():
    lengths = norms(Ball(0.5).at(torch.rand(500, 6, generator=torch.Generator().manual_seed(0))))
    assert lengths.max() <= 0.5 * (1 + 1e-6)
    assert lengths.min() < 0.02 and lengths.max() > 0.48


def test_the_projection_onto_ball_and_box_is_the_nearest_point_by_a_convex_solver():
    ball = Ball(0.8, Box(rows([-0.5] * 4), rows([0.5] * 4)))
    bindings = set()
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        point = torch.randn(1, 4, generator=generator, dtype=torch.float64) * (0.3 + 0.1 * seed)
        projected = ball.project(point)
        solved = minimize(
            lambda d, point=point: ((d - point[0].numpy()) ** 2).sum(),
            np.zeros(4),
            bounds=[(-0.5, 0.5)] * 4,
            constraints={"type": "ineq", "fun": lambda d: 0.64 - (d**2).sum()},
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        assert np.abs(projected[0].numpy() - solved.x).max() < 1e-5
        assert projected.norm() <= 0.8 * (1 + 1e-12) and projected.abs().max() <= 0.5
        bindings.add(((projected.abs() == 0.5).any().item(), bool(projected.norm() > 0.8 - 1e-9)))
    assert len(bindings) == 4  # box and ball, either, and neither


def test_where_only_the_box_binds_the_projection_is_the_box_s():
    delta = rows([0.5, 0.2, 0.0], [0.2, -0.1, 0.1])
    assert torch.equal(Ball(1.0, Box(-0.3, 0.3)).project(delta), delta.clamp(-0.3, 0.3))


def test_a_row_on_the_sphere_may_not_move_outwards_and_one_inside_may_move_anywhere():
    ball = Ball(1.0)
    face = ball.face(*minimizer(ball, rows([3.0, 4.0, 0.0], [0.3, 0.1, -0.2])))
    assert face.free is None
    assert torch.allclose(face.normal, rows([0.6, 0.8, 0.0], [0.0, 0.0, 0.0]))
    assert torch.allclose(face.multiplier, rows(4.0, 0.0))  # |target| / radius - 1


def test_a_row_is_free_on_the_sphere_where_descent_leads_inwards_and_inside_where_it_leads_outwards():
    delta = rows([0.6, 0.8], [0.3, 0.4])
    face = Ball(1.0).face(delta, slope=torch.stack([delta[0], -delta[1]]))
    assert not face.normal.any() and not face.multiplier.any()


def test_a_projected_point_counts_as_on_the_sphere_in_either_precision():
    for dtype in (torch.float32, torch.float64):
        for size in (2, 3072):
            target = torch.randn(8, size, generator=torch.Generator().manual_seed(0)).to(dtype)
            ball = Ball(0.01 * target.norm(dim=1).min().item())
            assert (ball.face(*minimizer(ball, target)).multiplier > 0).all(), (dtype, size)


def test_where_the_box_holds_a_coordinate_the_normal_and_the_multiplier_are_those_of_the_others():
    delta = rows([0.6, 0.8 * 0.6, 0.8 * 0.8])
    slope = rows([-5.0, -2 * 0.48, -2 * 0.64])  # -2 * delta in the free coordinates
    face = Ball(1.0, Box(-0.6, rows(0.6, 0.9, 0.9))).face(delta, slope)
    assert torch.equal(face.free, rows([0.0, 1.0, 1.0]))
    assert torch.allclose(face.normal, rows([0.0, 0.6, 0.8])) and torch.allclose(face.multiplier, rows(2.0))
    assert Ball(1.0, Box(-0.6, 0.9)).face(delta, slope).free.all()

import torch

from doubly.bilevel import Box, BoxedBall


def wide(shape, room=10.0):
    return Box(torch.full(shape, -room), torch.full(shape, room))


def norms(delta):
    return delta.flatten(1).norm(dim=1)


def test_a_point_outside_goes_to_the_sphere_and_one_inside_stays():
    ball = BoxedBall(0.5, wide((2, 1, 1, 2)))
    delta = torch.tensor([[3.0, 4.0], [0.1, -0.2]]).view(2, 1, 1, 2)
    assert torch.allclose(ball.project(delta).view(2, 2), torch.tensor([[0.3, 0.4], [0.1, -0.2]]))


def test_projection_onto_ball_and_box_is_feasible():
    box = Box(torch.full((64, 3, 4, 4), -0.05), torch.full((64, 3, 4, 4), 0.2))
    delta = torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    found = BoxedBall(0.5, box).project(delta)
    assert (norms(found) <= 0.5 * (1 + 1e-6)).all()
    assert (found >= box.lower).all() and (found <= box.upper).all()


def test_zero_stays_zero():
    ball = BoxedBall(0.5, wide((1, 3)))
    assert torch.equal(ball.project(torch.zeros(1, 3)), torch.zeros(1, 3))
    assert ball.at(torch.full((1, 3), 0.5)).isfinite().all()


def test_points_from_uniform_draws_are_inside_and_fill_the_radius():
    ball = BoxedBall(0.5, wide((500, 6)))
    found = norms(ball.at(torch.rand(500, 6, generator=torch.Generator().manual_seed(0))))
    assert found.max() <= 0.5 * (1 + 1e-6)
    assert found.min() < 0.02 and found.max() > 0.48

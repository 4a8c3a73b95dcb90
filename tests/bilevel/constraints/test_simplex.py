import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from doubly.bilevel import Simplex


def rows(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def solved(point, total):
    """The nearest point by sequential quadratic programming, on one row."""
    solution = minimize(
        lambda x: 0.5 * ((x - point) ** 2).sum(),
        torch.full_like(torch.from_numpy(point), total / len(point)).numpy(),
        jac=lambda x: x - point,
        bounds=[(0, None)] * len(point),
        constraints=[{"type": "eq", "fun": lambda x: x.sum() - total, "jac": lambda x: 0 * x + 1}],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return torch.from_numpy(solution.x)


def bisected(point, total):
    """max(point - shift, 0), with the shift by bisection."""
    low, high = point.min() - total - 1, point.max()
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if (point - middle).clamp_min(0).sum() > total else (low, middle)
    return (point - (low + high) / 2).clamp_min(0)


points = st.lists(st.one_of(st.floats(-5, 5), st.sampled_from([-1.0, 0.0, 0.25, 1.0])), min_size=1, max_size=12)


@settings(max_examples=30)
@given(points, st.sampled_from([0.5, 1.0, 3.0]))
def test_the_projection_is_the_nearest_point_by_a_convex_solver(point, total):
    point = rows(*point)
    assert torch.allclose(Simplex(total).project(point[None])[0], solved(point.numpy(), total), atol=1e-6)


@settings(max_examples=50)
@given(points, st.floats(0.01, 100), st.sampled_from([1.0, 1e-3, 1e3]))
@example([0.0], 1.0, 1.0)
@example([1.0, 1.0, 1.0, 1.0], 1.0, 1.0)
@example([2.0, -1.0, -1.0], 1.0, 1.0)
def test_the_projection_is_feasible_idempotent_and_that_of_a_root_search(point, total, scale):
    simplex, point = Simplex(total), scale * rows(*point)
    projected = simplex.project(point[None])
    size = total + point.abs().max().item()
    assert (projected >= 0).all() and math.isclose(projected.sum().item(), total, abs_tol=1e-13 * size)
    assert torch.allclose(simplex.project(projected), projected, rtol=0, atol=1e-13 * size)
    assert torch.allclose(projected[0], bisected(point, total), rtol=0, atol=1e-12 * size)


def test_rows_of_any_shape_are_projected_one_by_one():
    delta = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, projected in zip(delta, Simplex(2.0).project(delta), strict=True):
        assert torch.allclose(Simplex(2.0).project(row.view(1, 6)).view(2, 3), projected)


def test_huge_points_have_a_projection_and_nan_stays_nan():
    for dtype in (torch.float32, torch.float64):
        projected = Simplex().project(rows([1e17, 1e17, -1e17], [3e17, 1.0, 0.0], dtype=dtype))
        assert projected.isfinite().all() and (projected >= 0).all()
    assert Simplex().project(rows([torch.nan, 1.0])).isnan().any()


def test_points_from_uniform_draws_are_inside_and_sum_to_the_total():
    for dtype in (torch.float32, torch.float64):
        fraction = torch.rand(200, 3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
        fraction[0, 0, 0], fraction[1] = 0.0, 1.0  # the logarithm of the one is infinite, those of the other are 0
        for total in (1.0, 0.3, 20.0):
            point = Simplex(total).at(fraction)
            assert (point >= 0).all() and point.dtype is dtype
            assert torch.allclose(point.flatten(1).sum(1), torch.full((200,), total, dtype=dtype), rtol=1e-5)


def test_points_from_uniform_draws_fill_the_simplex_evenly():
    point = Simplex().at(torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert torch.allclose(point.mean(0), torch.full((3,), 1 / 3).double(), atol=0.005)
    assert (point[:, 0] > 0.5).double().mean().item() == pytest.approx(1 / 4, abs=0.005)  # (1 - 1/2)^2 of the area


def test_a_coordinate_at_zero_is_held_where_its_slope_is_above_the_multiplier_of_the_sum():
    face = Simplex().face(rows([0.5, 0.5, 0.0, 0.0]), rows([1.0, 1.0, 1.5, 0.5]))
    assert torch.equal(face.free, rows([1.0, 1.0, 0.0, 1.0]))
    assert torch.allclose(face.normal, rows([1.0, 1.0, 0.0, 1.0]) / math.sqrt(3))
    assert face.multiplier is None


def test_directions_along_the_face_keep_the_sum_and_the_zeros():
    target = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    delta = Simplex().project(target)
    face = Simplex().face(delta, delta - target)
    moves = face.tangent(torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    assert torch.equal(face.free == 0, delta == 0) and (delta == 0).any(1).sum() >= 3
    assert torch.allclose(moves.sum(1), torch.zeros(6).double(), atol=1e-14) and (moves[delta == 0] == 0).all()
    vertex = Simplex(2.0).face(rows([2.0, 0.0, 0.0]), rows([-1.0, 0.0, 0.0]))
    assert torch.allclose(vertex.tangent(rows([1.0, 2.0, 3.0])), rows([0.0, 0.0, 0.0]), atol=1e-15)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubly.bilevel import Box

EPS = 8 / 255


def box_of(shape=(3, 2, 4), strength=1e-3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    lower = -torch.rand(shape, generator=generator).to(dtype)
    upper = torch.rand(shape, generator=generator).to(dtype)
    return Box(lower, upper, strength)


def inside(box, seed=1, margin=0.05):
    fraction = torch.rand(box.lower.shape, generator=torch.Generator().manual_seed(seed)).to(box.lower)
    return box.at(margin + (1 - 2 * margin) * fraction)


def test_projection_is_the_nearest_point_and_idempotent():
    box = box_of()
    far = 3 * torch.randn(box.lower.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    near = box.project(far)
    for point, low, high, found in zip(
        far.flatten().tolist(),
        box.lower.flatten().tolist(),
        box.upper.flatten().tolist(),
        near.flatten().tolist(),
        strict=True,
    ):
        assert found == min(max(point, low), high)
    assert torch.equal(box.project(near), near)
    assert torch.equal(box.project(inside(box)), inside(box))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([torch.float32, torch.float64]))
def test_samples_lie_inside(seed, dtype):
    box = box_of((5, 40), seed=seed, dtype=dtype)
    drawn = box.sample(torch.Generator().manual_seed(seed))
    assert drawn.dtype is dtype
    assert (drawn >= box.lower).all() and (drawn <= box.upper).all()


def test_samples_are_uniform_and_follow_from_the_generator():
    box = Box(torch.full((1, 50_000), -0.3), torch.full((1, 50_000), 0.1))
    drawn = box.sample(torch.Generator().manual_seed(7))
    assert torch.equal(drawn, box.sample(torch.Generator().manual_seed(7)))
    quartiles = drawn.flatten().quantile(torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([-0.2, -0.1, 0.0]), atol=5e-3)


def test_a_shrunk_box_loses_the_share_at_each_face():
    box = Box(torch.tensor([[-1.0, 0.0]]), torch.tensor([[3.0, 0.0]]), 0.5)
    smaller = box.shrunk(0.1)
    assert torch.allclose(smaller.lower, torch.tensor([[-0.6, 0.0]])) and smaller.strength == 0.5
    assert torch.allclose(smaller.upper, torch.tensor([[2.6, 0.0]]))


def test_the_barrier_is_minus_the_strength_times_the_logarithms_of_all_slacks():
    box = Box(torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, 2.0]]), 0.1)
    delta = torch.tensor([[0.5, -1.0]])
    by_hand = -0.1 * torch.tensor([0.5 * 1.5 * 3.0 * 1.0]).log()
    assert torch.allclose(box.barrier(delta), by_hand)


@pytest.mark.parametrize("damping", [0.0, 10.0])
def test_inverse_curvature_is_that_of_the_barrier_by_autograd(damping):
    box = box_of()
    delta = inside(box)
    curvature = torch.autograd.functional.hessian(lambda d: box.barrier(d).sum(), delta)
    curvature = curvature.reshape(delta.numel(), delta.numel())
    assert torch.equal(curvature, curvature.diag().diag())
    expected = 1 / (curvature.diag().view_as(delta) + damping)
    assert torch.allclose(box.inverse_curvature(delta, damping), expected, rtol=1e-10, atol=0)


def test_the_barrier_s_gradient_is_strength_over_the_slacks():
    box = box_of()
    delta = inside(box).requires_grad_()
    (gradient,) = torch.autograd.grad(box.barrier(delta).sum(), delta)
    expected = box.strength * (1 / (box.upper - delta) - 1 / (delta - box.lower))
    assert torch.allclose(gradient, expected.detach(), rtol=1e-12)


def test_inverse_curvature_has_the_values_of_the_fact_sheet():
    box = Box(torch.full((1, 4), -EPS, dtype=torch.float64), torch.full((1, 4), EPS, dtype=torch.float64), 1e-6)
    delta = EPS * torch.tensor([[0.0, 0.5, 0.9, 0.99]], dtype=torch.float64)
    expected = torch.tensor([[4.92e-4, 2.21e-4, 9.8e-6, 9.8e-8]], dtype=torch.float64)
    assert torch.allclose(1e-6 * box.inverse_curvature(delta), expected, rtol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("damping", [0.0, 10.0])
def test_inverse_curvature_is_zero_on_the_faces_beyond_them_and_in_boxes_without_width(damping, dtype):
    lower = torch.tensor([[-EPS, -EPS, -EPS, -EPS, 0.0, -0.01]], dtype=dtype)
    upper = torch.tensor([[EPS, EPS, EPS, EPS, 0.0, -0.01]], dtype=dtype)
    delta = torch.tensor([[-EPS, EPS, 2 * EPS, -2 * EPS, 0.0, -0.01]], dtype=dtype)
    assert torch.equal(Box(lower, upper, 1e-6).inverse_curvature(delta, damping), torch.zeros_like(delta))


@pytest.mark.parametrize("damping", [0.0, 10.0])
def test_inverse_curvature_in_single_precision_keeps_its_digits_next_to_a_face(damping):
    steps = torch.tensor([0, 1, 2, 5, 100, 10_000])
    above = EPS * (1 - steps * 2.0**-23)
    delta = above.float()[None]
    box = Box(torch.full_like(delta, -EPS), torch.full_like(delta, EPS), 1e-6)
    s1, s2 = (box.upper - delta).double(), (delta - box.lower).double()
    expected = torch.where(s1 > 0, 1 / (1e-6 * (1 / s1**2 + 1 / s2**2) + damping), 0.0)
    found = box.inverse_curvature(delta, damping)
    assert found.isfinite().all()
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_curvature_of_a_small_box_with_a_weak_barrier_keeps_its_digits(dtype):
    delta = torch.tensor([[0.0, 3e-4, -9e-4]], dtype=dtype)
    found = Box(torch.full_like(delta, -1e-3), torch.full_like(delta, 1e-3), 1e-9).inverse_curvature(delta)
    exact = delta.double()
    expected = 1 / (1e-9 * ((1e-3 - exact) ** -2 + (1e-3 + exact) ** -2))
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=0)


def test_numbers_stand_for_all_coordinates_and_yield_to_the_dtype_of_delta():
    box = Box(-1, 2)
    for dtype in (torch.float32, torch.float64):
        delta = torch.tensor([[-3.0, 0.5, 3.0]], dtype=dtype)
        assert torch.equal(box.project(delta), torch.tensor([[-1.0, 0.5, 2.0]], dtype=dtype))
        assert box.at(delta).dtype is dtype and box.face(delta, delta).free.dtype is dtype


def test_a_coordinate_is_held_on_the_bound_that_descent_would_cross():
    delta = torch.tensor([[-1.0, -1.0, 1.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    slope = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 0.0]], dtype=torch.float64)
    face = Box(-1, 1).face(delta, slope)
    assert torch.equal(face.free, torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]], dtype=torch.float64))
    assert face.normal is None and face.multiplier is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_projected_point_is_found_to_be_on_its_bound_in_either_precision(dtype):
    box = box_of((4, 30), dtype=dtype)
    box.lower[0], box.upper[0] = -1e3, -999.0
    held = box.face(box.upper + 0, torch.full_like(box.upper, -1.0)).free == 0
    assert held.all() and (box.face(box.lower + 0, torch.ones_like(box.lower)).free == 0).all()


def test_an_infinite_bound_holds_nothing():
    delta = torch.tensor([[0.0, 1e30, 5.0]], dtype=torch.float64)
    face = Box(0, torch.inf).face(delta, torch.tensor([[1.0, -1.0, -1.0]], dtype=torch.float64))
    assert torch.equal(face.free, torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64))

import torch

from doubly.bilevel import Box

EPS = 8 / 255
DTYPES = (torch.float32, torch.float64)


def rows(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def random_box(shape=(3, 2, 4), strength=1e-3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    lower = -torch.rand(shape, generator=generator).to(dtype)
    upper = torch.rand(shape, generator=generator).to(dtype)
    return Box(lower, upper, strength)


def inside(box, margin=0.05):
    fraction = torch.rand(box.lower.shape, generator=torch.Generator().manual_seed(1)).to(box.lower)
    return box.at(margin + (1 - 2 * margin) * fraction)


def test_the_projection_clips_each_coordinate_and_leaves_points_inside():
    box = random_box()
    far = 3 * torch.randn(box.lower.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bounds = (far, box.lower, box.upper, box.project(far))
    for point, low, high, projected in zip(*(part.flatten().tolist() for part in bounds), strict=True):
        assert projected == min(max(point, low), high)
    assert torch.equal(box.project(inside(box)), inside(box))


def test_samples_lie_inside_are_uniform_and_follow_from_the_generator():
    for seed in range(20):
        for dtype in DTYPES:
            box = random_box((5, 40), seed=seed, dtype=dtype)
            drawn = box.sample(torch.Generator().manual_seed(seed))
            assert drawn.dtype is dtype and (drawn >= box.lower).all() and (drawn <= box.upper).all()
    box = Box(torch.full((1, 50_000), -0.3), torch.full((1, 50_000), 0.1))
    drawn = box.sample(torch.Generator().manual_seed(7))
    assert torch.equal(drawn, box.sample(torch.Generator().manual_seed(7)))
    quartiles = drawn.flatten().quantile(torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([-0.2, -0.1, 0.0]), atol=5e-3)


def test_a_shrunk_box_loses_the_share_at_each_face():
    smaller = Box(rows([-1.0, 0.0]), rows([3.0, 0.0]), 0.5).shrunk(0.1)
    assert torch.allclose(smaller.lower, rows([-0.6, 0.0])) and torch.allclose(smaller.upper, rows([2.6, 0.0]))
    assert smaller.strength == 0.5


def test_the_barrier_is_minus_the_strength_times_the_logarithms_of_all_slacks():
    box = Box(rows([-1.0, -2.0]), rows([1.0, 2.0]), 0.1)
    assert torch.allclose(box.barrier(rows([0.5, -1.0])), -0.1 * rows(0.5 * 1.5 * 3.0 * 1.0).log())


def test_the_barrier_s_gradient_is_strength_over_the_slacks():
    box = random_box()
    delta = inside(box).requires_grad_()
    (gradient,) = torch.autograd.grad(box.barrier(delta).sum(), delta)
    expected = box.strength * (1 / (box.upper - delta) - 1 / (delta - box.lower))
    assert torch.allclose(gradient, expected.detach(), rtol=1e-12)


def test_inverse_curvature_is_that_of_the_barrier_by_autograd():
    box = random_box()
    delta = inside(box)
    curvature = torch.autograd.functional.hessian(lambda d: box.barrier(d).sum(), delta)
    curvature = curvature.reshape(delta.numel(), delta.numel())
    assert torch.equal(curvature, curvature.diag().diag())
    for damping in (0.0, 10.0):
        expected = 1 / (curvature.diag().view_as(delta) + damping)
        assert torch.allclose(box.inverse_curvature(delta, damping), expected, rtol=1e-10, atol=0)


def test_inverse_curvature_has_known_values_in_the_box_of_eight_gray_levels():
    box = Box(rows([-EPS] * 4), rows([EPS] * 4), 1e-6)
    expected = rows([4.92e-4, 2.21e-4, 9.8e-6, 9.8e-8])
    assert torch.allclose(1e-6 * box.inverse_curvature(EPS * rows([0.0, 0.5, 0.9, 0.99])), expected, rtol=5e-3)


def test_inverse_curvature_is_zero_on_the_faces_beyond_them_and_in_boxes_without_width():
    for dtype in DTYPES:
        lower = rows([-EPS, -EPS, -EPS, -EPS, 0.0, -0.01], dtype=dtype)
        upper = rows([EPS, EPS, EPS, EPS, 0.0, -0.01], dtype=dtype)
        delta = rows([-EPS, EPS, 2 * EPS, -2 * EPS, 0.0, -0.01], dtype=dtype)
        for damping in (0.0, 10.0):
            assert not Box(lower, upper, 1e-6).inverse_curvature(delta, damping).any()


def test_inverse_curvature_keeps_its_digits_next_to_a_face_and_in_small_boxes():
    delta = (EPS * (1 - torch.tensor([0, 1, 2, 5, 100, 10_000]) * 2.0**-23)).float()[None]  # steps of rounding
    box = Box(torch.full_like(delta, -EPS), torch.full_like(delta, EPS), 1e-6)
    above, below = (box.upper - delta).double(), (delta - box.lower).double()
    for damping in (0.0, 10.0):
        expected = torch.where(above > 0, 1 / (1e-6 * (above**-2 + below**-2) + damping), 0.0)
        assert torch.allclose(box.inverse_curvature(delta, damping).double(), expected, rtol=1e-5, atol=0)
    for dtype in DTYPES:
        delta = rows([0.0, 3e-4, -9e-4], dtype=dtype)
        small = Box(torch.full_like(delta, -1e-3), torch.full_like(delta, 1e-3), 1e-9)
        expected = 1 / (1e-9 * ((1e-3 - delta.double()) ** -2 + (1e-3 + delta.double()) ** -2))
        assert torch.allclose(small.inverse_curvature(delta).double(), expected, rtol=1e-4, atol=0)


def test_numbers_stand_for_all_coordinates_and_take_the_dtype_of_delta():
    box = Box(-1, 2)
    for dtype in DTYPES:
        delta = rows([-3.0, 0.5, 3.0], dtype=dtype)
        assert torch.equal(box.project(delta), rows([-1.0, 0.5, 2.0], dtype=dtype))
        assert box.at(delta).dtype is dtype and box.face(delta, delta).free.dtype is dtype


def test_a_coordinate_is_held_on_the_bound_that_descent_would_cross():
    face = Box(-1, 1).face(rows([-1.0, -1.0, 1.0, 1.0, 0.0, -1.0]), rows([2.0, -2.0, 2.0, -2.0, 2.0, 0.0]))
    assert torch.equal(face.free, rows([0.0, 1.0, 1.0, 0.0, 1.0, 1.0]))
    assert face.normal is None and face.multiplier is None
    face = Box(0, torch.inf).face(rows([0.0, 1e30, 5.0]), rows([1.0, -1.0, -1.0]))
    assert torch.equal(face.free, rows([0.0, 1.0, 1.0]))


def test_a_projected_point_counts_as_on_its_bound_in_either_precision():
    for dtype in DTYPES:
        box = random_box((4, 30), dtype=dtype)
        box.lower[0], box.upper[0] = -1e3, -999.0
        assert not box.face(box.upper + 0, torch.full_like(box.upper, -1.0)).free.any()
        assert not box.face(box.lower + 0, torch.ones_like(box.lower)).free.any()

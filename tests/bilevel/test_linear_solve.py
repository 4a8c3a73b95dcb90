import warnings
from itertools import pairwise

import pytest
import torch

from doubly.bilevel import ConjugateGradient, Diagonal, Direct, Neumann, SolverWarning


def spd(count, size, seed=0, lowest=0.5):
    root = torch.randn(count, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT / size + lowest * torch.eye(size, dtype=torch.float64)


def product(A):
    return lambda v: torch.einsum("nij,nj->ni", A, v.flatten(1)).view_as(v)


def rhs(count, *shape, seed=5):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_diagonal_multiplies_and_never_asks_for_the_matrix():
    b = rhs(3, 2, 2)
    inverse = rhs(3, 2, 2, seed=6).abs()
    assert torch.equal(Diagonal(inverse)(None, b).v, inverse * b)


def test_conjugate_gradient_solves_each_sample():
    A, b = spd(4, 6), rhs(4, 2, 3)
    found = ConjugateGradient(iterations=8, tolerance=1e-12)(product(A), b).v
    assert torch.allclose(found.flatten(1), torch.linalg.solve(A, b.flatten(1)), rtol=1e-10)


def test_conjugate_gradient_adds_the_diagonal_known_by_its_inverse():
    A, b = spd(4, 6), rhs(4, 6)
    diagonal = torch.logspace(-2, 4, 24, dtype=torch.float64).view(4, 6)
    found = ConjugateGradient(20, 1e-12, 1 / diagonal)(product(A), b).v
    assert torch.allclose(found, torch.linalg.solve(A + torch.diag_embed(diagonal), b), rtol=1e-8, atol=1e-14)


def test_an_infinite_diagonal_holds_its_coordinate_at_zero():
    A, b = spd(2, 5), rhs(2, 5)
    inverse = torch.full((2, 5), 0.3, dtype=torch.float64)
    inverse[:, 1] = inverse[:, 4] = 0
    found = ConjugateGradient(12, 1e-14, inverse)(product(A), b).v
    free = [0, 2, 3]
    reduced = A[:, free][:, :, free] + torch.eye(3, dtype=torch.float64) / 0.3
    assert torch.equal(found[:, [1, 4]], torch.zeros(2, 2, dtype=torch.float64))
    assert torch.allclose(found[:, free], torch.linalg.solve(reduced, b[:, free]), rtol=1e-10)


def test_few_iterations_are_better_than_none_and_worse_than_many():
    A, b = spd(1, 20, lowest=0.01), rhs(1, 20)
    exact = torch.linalg.solve(A, b)

    def energy(v):
        return ((v - exact) * product(A)(v - exact)).sum().item()

    errors = [energy(ConjugateGradient(n, None)(product(A), b).v) for n in (0, 2, 5, 10, 40)]
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-8 * errors[0]


def test_negative_curvature_keeps_the_diagonal_solution_and_spares_the_other_samples():
    A, b = spd(2, 4), rhs(2, 4)
    A[0] = -5 * torch.eye(4, dtype=torch.float64)
    inverse = torch.full((2, 4), 0.5, dtype=torch.float64)
    found = ConjugateGradient(10, None, inverse)(product(A), b).v
    assert torch.allclose(found[0], 0.5 * b[0])
    assert torch.allclose(found[1], torch.linalg.solve(A[1] + 2 * torch.eye(4, dtype=torch.float64), b[1]))


@pytest.mark.parametrize("slope", [-1.0, 0.0])
def test_no_positive_curvature_gives_zero_and_says_which_argument_lacks_it(slope):
    b = rhs(3, 4)
    scale = torch.tensor([[slope], [2.0], [slope]], dtype=torch.float64)
    remedy = (
        r"residual of 1.0e\+00 .*in 2 of 3 systems: inner has no positive curvature .* in 2 of them; .*add curvature"
    )
    with pytest.warns(SolverWarning, match=remedy):
        v, residual = ConjugateGradient()(lambda v: scale * v, b)
    assert torch.equal(v[[0, 2]], torch.zeros_like(b[[0, 2]])) and torch.allclose(v[1], b[1] / 2)
    assert torch.equal(residual[[0, 2]], torch.ones(2, dtype=torch.float64)) and residual[1] < 1e-15


def test_negative_curvature_that_shows_late_keeps_the_steps_before_it():
    diagonal = torch.tensor([[4.0, 3.0, 2.0, -1e-2]], dtype=torch.float64)
    b = torch.tensor([[1.0, 1.0, 1.0, 1e-3]], dtype=torch.float64)
    with pytest.warns(SolverWarning, match="no positive curvature"):
        v, residual = ConjugateGradient(50, 1e-12)(lambda v: diagonal * v, b)
    assert v.isfinite().all() and torch.allclose(v[:, :3], b[:, :3] / diagonal[:, :3], atol=0.05)
    assert 0 < residual.item() < 1


def test_solved_and_zero_samples_stay_finite():
    b = torch.stack([torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
    for solve in (ConjugateGradient(50, 0.0), ConjugateGradient(50, None), Direct(), Diagonal(), Neumann(0.4, 50)):
        found = solve(lambda v: 2 * v, b).v
        assert torch.allclose(found, b / 2) and found.isfinite().all()


def test_neumann_is_the_truncated_series():
    A, b = spd(3, 5), rhs(3, 5)
    powers, total = b, torch.zeros_like(b)
    for _ in range(7):
        total = total + 0.1 * powers
        powers = powers - 0.1 * product(A)(powers)
    assert torch.allclose(Neumann(0.1, 7, tolerance=None)(product(A), b).v, total, rtol=1e-12)


def test_neumann_converges_to_the_solution():
    A, b = spd(3, 5), rhs(3, 5)
    found = Neumann(0.2, 500, tolerance=1e-12)(product(A), b).v
    assert torch.allclose(found, torch.linalg.solve(A, b), rtol=1e-10)


@pytest.mark.parametrize(("size", "terms"), [(0.1, 3), (3.0, 10)])
def test_neumann_warns_when_it_was_cut_short_or_diverged(size, terms):
    A, b = spd(3, 5), rhs(3, 5)
    with pytest.warns(SolverWarning, match="in 3 of 3 systems: take more terms, or a smaller size; inner must"):
        residual = Neumann(size, terms)(product(A), b).residual
    assert (residual > 1).all() if size > 1 else (residual < 1).all()


# Direct


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_direct_is_the_solver_of_torch_on_rows_of_any_shape(dtype):
    A, b = spd(4, 6).to(dtype), rhs(4, 2, 3).to(dtype)
    v, residual = Direct()(product(A), b)
    assert torch.allclose(
        v.flatten(1), torch.linalg.solve(A, b.flatten(1)), rtol=1e-5 if dtype == torch.float32 else 1e-12
    )
    assert v.shape == b.shape and v.dtype is dtype and residual.shape == (4,)


def singular():
    flat = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    return torch.stack([torch.eye(3, dtype=torch.float64), flat.T @ flat])


def indefinite():
    return torch.stack([torch.eye(3, dtype=torch.float64), torch.diag(torch.tensor([1.0, -1e-3, 1.0]).double())])


@pytest.mark.parametrize("matrices", [singular, indefinite])
def test_direct_refuses_a_singular_or_indefinite_hessian(matrices):
    with pytest.raises(
        ValueError, match=r"inner: its Hessian in delta is singular or indefinite in 1 of 2 .*add curvature"
    ):
        Direct()(product(matrices()), rhs(2, 3))


def test_direct_is_not_fooled_by_a_singular_hessian_that_rounding_makes_definite():
    root = rhs(20, 5, 4)  # of rank 4
    with pytest.raises(ValueError, match="in 20 of 20 systems"):
        Direct()(product(root @ root.mT), rhs(20, 5))


def test_direct_takes_a_hessian_that_is_badly_scaled_but_definite():
    scales = torch.logspace(-8, 0, 3, dtype=torch.float64)
    b = rhs(2, 3)
    assert torch.allclose(Direct()(lambda v: scales * v, b).v, b / scales, rtol=1e-12)


def test_direct_builds_no_large_matrix():
    with pytest.raises(
        ValueError, match="Direct would build matrices of 5 x 5: use ConjugateGradient, or raise largest"
    ):
        Direct(largest=4)(None, rhs(2, 5))
    assert Direct(largest=5)(lambda v: v, rhs(2, 5)).residual.max() == 0


# Diagonal, found by one product


def test_diagonal_finds_a_diagonal_hessian_by_itself():
    diagonal, b = 0.5 + rhs(3, 2, 2, seed=6).abs(), rhs(3, 2, 2)
    v, residual = Diagonal()(lambda v: diagonal * v, b)
    assert torch.allclose(v, b / diagonal, rtol=1e-14) and residual.max() < 1e-15


def test_diagonal_warns_where_the_hessian_is_not_diagonal_and_names_it():
    A, b = spd(3, 4), rhs(3, 4)
    A[1] = torch.eye(4, dtype=torch.float64)
    with pytest.warns(
        SolverWarning, match="in 2 of 3 systems: the Hessian of inner is .*not diagonal; use ConjugateGradient"
    ):
        Diagonal()(product(A), b)


# Preconditioning


def counted(matvec):
    calls = []

    def counting(v):
        calls.append(v)
        return matvec(v)

    return counting, calls


def test_the_exact_inverse_as_preconditioner_converges_in_one_iteration():
    A, b = spd(4, 8, lowest=0.01), rhs(4, 8)
    matvec, calls = counted(product(A))
    v, residual = ConjugateGradient(20, 1e-9, preconditioner=product(torch.linalg.inv(A)))(matvec, b)
    assert len(calls) == 2 and residual.max() < 1e-9  # an iteration, and the residual
    assert torch.allclose(v, torch.linalg.solve(A, b), rtol=1e-8)


def test_a_good_preconditioner_needs_fewer_iterations_than_none():
    scales = torch.logspace(0, 3, 30, dtype=torch.float64).sqrt()
    A = scales[:, None] * spd(2, 30, lowest=2.0) * scales
    b = rhs(2, 30)
    plain, plain_calls = counted(product(A))
    helped, helped_calls = counted(product(A))
    diagonal = A.diagonal(dim1=1, dim2=2)
    one = ConjugateGradient(500, 1e-8)(plain, b).v
    other = ConjugateGradient(500, 1e-8, preconditioner=lambda r: r / diagonal)(helped, b).v
    assert len(helped_calls) < len(plain_calls) / 3
    assert torch.allclose(one, torch.linalg.solve(A, b), rtol=1e-4) and torch.allclose(one, other, rtol=1e-4)


def test_two_preconditioners_are_one_too_many():
    with pytest.raises(ValueError, match="inverse_diagonal is the preconditioner already: give one of the two"):
        ConjugateGradient(inverse_diagonal=torch.ones(2), preconditioner=lambda r: r)


# What is reported

UNCONVERGED = [ConjugateGradient(2), ConjugateGradient(2, preconditioner=lambda r: r / 2), Neumann(0.1, 4), Diagonal()]


@pytest.mark.parametrize("solve", UNCONVERGED, ids=lambda solve: type(solve).__name__)
def test_the_residual_reported_is_that_of_the_answer(solve):
    A, b = spd(3, 6, lowest=0.1), torch.cat([rhs(2, 6), 1e3 * rhs(1, 6, seed=8)])
    with pytest.warns(SolverWarning) as caught:
        v, residual = solve(product(A), b)
    expected = (b - product(A)(v)).norm(dim=1) / b.norm(dim=1)
    assert torch.allclose(residual, expected, rtol=1e-10) and residual.min() > 1e-3
    assert f"{expected.max().item():.1e}" in str(caught[0].message) and "in 3 of 3 systems" in str(caught[0].message)


def test_the_residual_with_a_diagonal_is_that_of_the_whole_system_in_its_metric():
    A, b, inverse = spd(2, 5), rhs(2, 5), 0.1 + rhs(2, 5, seed=7).abs()
    with pytest.warns(SolverWarning, match="allow more iterations, or give a preconditioner"):
        v, residual = ConjugateGradient(1, 1e-6, inverse)(product(A), b)
    left = inverse.sqrt() * (b - product(A)(v) - v / inverse)
    assert torch.allclose(residual, left.norm(dim=1) / (inverse.sqrt() * b).norm(dim=1), rtol=1e-10)


def test_iterations_stop_at_the_tolerance():
    A, b = spd(2, 20, lowest=0.01), rhs(2, 20)
    counts = []
    for tolerance in (1e-1, 1e-4, 1e-8):
        matvec, calls = counted(product(A))
        assert ConjugateGradient(100, tolerance)(matvec, b).residual.max() <= tolerance
        counts.append(len(calls))
    assert counts[0] < counts[1] < counts[2] < 100


@pytest.mark.parametrize(
    "solve",
    [ConjugateGradient(1, None), Neumann(0.1, 1, None), Neumann(9.0, 20, None), Diagonal(tolerance=None), Direct(None)],
    ids=repr,
)
def test_without_a_tolerance_nothing_is_reported_and_nothing_warned(solve):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve(product(spd(3, 6)), rhs(3, 6)).residual is None


def test_without_a_tolerance_negative_curvature_is_no_warning_either():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ConjugateGradient(5, None)(lambda v: -v, rhs(2, 3)).v, torch.zeros(2, 3).double())


def test_a_residual_that_is_not_a_number_is_missed():
    with pytest.warns(SolverWarning, match="in 2 of 2 systems"):
        Neumann()(lambda v: v * torch.nan, rhs(2, 3))


def test_the_residual_reported_in_single_precision_is_that_of_the_answer():
    basis = torch.linalg.qr(rhs(5, 30, 30)).Q
    A = ((basis * torch.logspace(0, -4, 30, dtype=torch.float64)) @ basis.mT).float()
    b = rhs(5, 30, seed=9).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SolverWarning)  # whether it is solved is not the question
        v, residual = ConjugateGradient(400, 1e-5)(product(A), b)
    left = (b.double() - product(A.double())(v.double())).norm(dim=1) / b.double().norm(dim=1)
    assert (left <= 2 * residual.double()).all()


def test_diagonal_finds_negative_curvature_too():
    with pytest.warns(SolverWarning, match="inner has no positive curvature"):
        Diagonal()(lambda v: -2 * v, rhs(2, 3))


def test_a_singular_system_keeps_the_best_iterate_and_warns():
    matrix, b = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64)), rows_of([[1e-3, 1.0]])
    with pytest.warns(SolverWarning):
        v, residual = ConjugateGradient()(lambda v: v @ matrix, b)
    assert v.norm() <= 1e6 and residual.item() <= 1


def rows_of(numbers):
    return torch.tensor(numbers, dtype=torch.float64)

import warnings
from itertools import pairwise

import pytest
import torch

from doubly.bilevel import ConjugateGradient, Diagonal, Direct, Neumann, SolverWarning
from doubly.bilevel.linear_solve import meets_tolerance


def spd(count, size, lowest=0.5):
    """Symmetric positive definite matrices."""
    root = normal(count, size, size, seed=0)
    return root @ root.mT / size + lowest * torch.eye(size, dtype=torch.float64)


def product(A):
    return lambda v: torch.einsum("nij,nj->ni", A, v.flatten(1)).view_as(v)


def normal(*shape, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counted(matvec):
    """The function, and the list of its calls."""
    calls = []

    def counting(v):
        calls.append(v)
        return matvec(v)

    return counting, calls


def test_conjugate_gradient_solves_each_sample():
    A, b = spd(4, 6), normal(4, 2, 3)
    v = ConjugateGradient(iterations=8, tolerance=1e-12)(product(A), b).v
    assert torch.allclose(v.flatten(1), torch.linalg.solve(A, b.flatten(1)), rtol=1e-10)


def test_conjugate_gradient_adds_the_diagonal_known_by_its_inverse():
    A, b = spd(4, 6), normal(4, 6)
    diagonal = torch.logspace(-2, 4, 24, dtype=torch.float64).view(4, 6)
    v = ConjugateGradient(20, 1e-12, 1 / diagonal)(product(A), b).v
    assert torch.allclose(v, torch.linalg.solve(A + torch.diag_embed(diagonal), b), rtol=1e-8, atol=1e-14)


def test_an_infinite_diagonal_holds_its_coordinate_at_zero():
    A, b = spd(2, 5), normal(2, 5)
    inverse = torch.full((2, 5), 0.3, dtype=torch.float64)
    inverse[:, 1] = inverse[:, 4] = 0
    v = ConjugateGradient(12, 1e-14, inverse)(product(A), b).v
    free = [0, 2, 3]
    reduced = A[:, free][:, :, free] + torch.eye(3, dtype=torch.float64) / 0.3
    assert torch.equal(v[:, [1, 4]], torch.zeros(2, 2, dtype=torch.float64))
    assert torch.allclose(v[:, free], torch.linalg.solve(reduced, b[:, free]), rtol=1e-10)


def test_the_error_falls_with_the_iterations():
    A, b = spd(1, 20, lowest=0.01), normal(1, 20)
    exact = torch.linalg.solve(A, b)

    def energy(v):
        return ((v - exact) * product(A)(v - exact)).sum().item()

    errors = [energy(ConjugateGradient(n, None)(product(A), b).v) for n in (0, 2, 5, 10, 40)]
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-8 * errors[0]


def test_iterations_stop_at_the_tolerance():
    A, b = spd(2, 20, lowest=0.01), normal(2, 20)
    counts = []
    for tolerance in (1e-1, 1e-4, 1e-8):
        matvec, calls = counted(product(A))
        assert ConjugateGradient(100, tolerance)(matvec, b).residual.max() <= tolerance
        counts.append(len(calls))
    assert counts[0] < counts[1] < counts[2] < 100


def test_a_good_preconditioner_needs_fewer_iterations_than_none_and_an_exact_one_needs_one():
    A, b = spd(4, 8, lowest=0.01), normal(4, 8)
    matvec, calls = counted(product(A))
    v, residual = ConjugateGradient(20, 1e-9, preconditioner=product(torch.linalg.inv(A)))(matvec, b)
    assert len(calls) == 2 and residual.max() < 1e-9  # an iteration, and the residual
    assert torch.allclose(v, torch.linalg.solve(A, b), rtol=1e-8)

    scales = torch.logspace(0, 3, 30, dtype=torch.float64).sqrt()
    A, b = scales[:, None] * spd(2, 30, lowest=2.0) * scales, normal(2, 30)
    diagonal = A.diagonal(dim1=1, dim2=2)
    counts = []
    for preconditioner in (None, lambda r: r / diagonal):
        matvec, calls = counted(product(A))
        v = ConjugateGradient(500, 1e-8, preconditioner=preconditioner)(matvec, b).v
        assert torch.allclose(v, torch.linalg.solve(A, b), rtol=1e-4)
        counts.append(len(calls))
    assert counts[1] < counts[0] / 3


def test_negative_curvature_keeps_the_diagonal_solution_and_spares_the_other_samples():
    A, b = spd(2, 4), normal(2, 4)
    A[0] = -5 * torch.eye(4, dtype=torch.float64)
    inverse = torch.full((2, 4), 0.5, dtype=torch.float64)
    v = ConjugateGradient(10, None, inverse)(product(A), b).v
    assert torch.allclose(v[0], 0.5 * b[0])
    assert torch.allclose(v[1], torch.linalg.solve(A[1] + 2 * torch.eye(4, dtype=torch.float64), b[1]))


def test_no_positive_curvature_gives_zero_and_a_warning_that_says_so():
    b = normal(3, 4)
    message = (
        r"residual of 1.0e\+00 .*in 2 of 3 systems: inner has no positive curvature .*in 2 of them; .*add curvature"
    )
    for curvature in (-1.0, 0.0):
        scale = torch.tensor([[curvature], [2.0], [curvature]], dtype=torch.float64)
        with pytest.warns(SolverWarning, match=message):
            v, residual = ConjugateGradient()(lambda v, scale=scale: scale * v, b)
        assert torch.equal(v[[0, 2]], torch.zeros_like(b[[0, 2]])) and torch.allclose(v[1], b[1] / 2)
        assert torch.equal(residual[[0, 2]], torch.ones(2, dtype=torch.float64)) and residual[1] < 1e-15
    with pytest.warns(SolverWarning, match="inner has no positive curvature"):
        Diagonal()(lambda v: -2 * v, b)


def test_negative_or_zero_curvature_that_shows_late_keeps_the_best_iterate():
    diagonal = torch.tensor([[4.0, 3.0, 2.0, -1e-2]], dtype=torch.float64)
    b = torch.tensor([[1.0, 1.0, 1.0, 1e-3]], dtype=torch.float64)
    with pytest.warns(SolverWarning, match="no positive curvature"):
        v, residual = ConjugateGradient(50, 1e-12)(lambda v: diagonal * v, b)
    assert v.isfinite().all() and torch.allclose(v[:, :3], b[:, :3] / diagonal[:, :3], atol=0.05)
    assert 0 < residual.item() < 1
    singular, b = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.tensor([[1e-3, 1.0]], dtype=torch.float64)
    with pytest.warns(SolverWarning):
        v, residual = ConjugateGradient()(lambda v: singular * v, b)
    assert v.norm() <= 1e6 and residual.item() <= 1


def test_solved_and_zero_samples_stay_finite():
    b = torch.stack([torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
    for solve in (ConjugateGradient(50, 0.0), ConjugateGradient(50, None), Direct(), Diagonal(), Neumann(0.4, 50)):
        v = solve(lambda v: 2 * v, b).v
        assert torch.allclose(v, b / 2) and v.isfinite().all(), solve


def test_neumann_is_the_truncated_series():
    A, b = spd(3, 5), normal(3, 5)
    powers, total = b, torch.zeros_like(b)
    for _ in range(7):
        total = total + 0.1 * powers
        powers = powers - 0.1 * product(A)(powers)
    assert torch.allclose(Neumann(0.1, 7, tolerance=None)(product(A), b).v, total, rtol=1e-12)


def test_neumann_converges_to_the_solution():
    A, b = spd(3, 5), normal(3, 5)
    v = Neumann(0.2, 500, tolerance=1e-12)(product(A), b).v
    assert torch.allclose(v, torch.linalg.solve(A, b), rtol=1e-10)


def test_neumann_warns_when_it_was_cut_short_or_diverged():
    A, b = spd(3, 5), normal(3, 5)
    for size, terms in ((0.1, 3), (3.0, 10)):
        with pytest.warns(SolverWarning, match="in 3 of 3 systems: take more terms, or a smaller size; inner must"):
            residual = Neumann(size, terms)(product(A), b).residual
        assert (residual > 1).all() if size > 1 else (residual < 1).all()
    with pytest.warns(SolverWarning, match="in 3 of 3 systems"):
        Neumann()(lambda v: v * torch.nan, b)  # NaN misses the tolerance as well


def test_direct_is_the_solver_of_torch_on_rows_of_any_shape():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        A, b = spd(4, 6).to(dtype), normal(4, 2, 3).to(dtype)
        v, residual = Direct()(product(A), b)
        assert torch.allclose(v.flatten(1), torch.linalg.solve(A, b.flatten(1)), rtol=tolerance)
        assert v.shape == b.shape and v.dtype is dtype and residual.shape == (4,)
    scales, b = torch.logspace(-8, 0, 3, dtype=torch.float64), normal(2, 3)  # badly scaled, but definite
    assert torch.allclose(Direct()(lambda v: scales * v, b).v, b / scales, rtol=1e-12)


def test_direct_refuses_singular_indefinite_and_large_systems():
    identity, vector = torch.eye(3, dtype=torch.float64), torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    singular = torch.stack([identity, vector.T @ vector])
    indefinite = torch.stack([identity, torch.diag(torch.tensor([1.0, -1e-3, 1.0]).double())])
    root = normal(20, 5, 4)  # rank 4, but rounding makes the product definite
    message = "inner: its Hessian in delta is singular or indefinite in {} systems.*add curvature"
    table = [
        (Direct(), singular, message.format("1 of 2")),
        (Direct(), indefinite, message.format("1 of 2")),
        (Direct(), root @ root.mT, message.format("20 of 20")),
        (Direct(largest=4), spd(2, 5), "Direct would build matrices of 5 x 5: use ConjugateGradient, or raise largest"),
    ]
    for solve, A, expected in table:
        with pytest.raises(ValueError, match=expected):
            solve(product(A), normal(len(A), A.shape[1]))
    assert Direct(largest=5)(lambda v: v, normal(2, 5)).residual.max() == 0


def test_diagonal_takes_the_inverse_given_or_finds_the_diagonal_by_itself():
    b, diagonal = normal(3, 2, 2), 0.5 + normal(3, 2, 2, seed=6).abs()
    assert torch.equal(Diagonal(1 / diagonal)(None, b).v, 1 / diagonal * b)  # without a product
    v, residual = Diagonal()(lambda v: diagonal * v, b)
    assert torch.allclose(v, b / diagonal, rtol=1e-14) and residual.max() < 1e-15
    A = spd(3, 4)
    A[1] = torch.eye(4, dtype=torch.float64)
    message = "in 2 of 3 systems: the Hessian of inner is .*not diagonal; use ConjugateGradient"
    with pytest.warns(SolverWarning, match=message):
        Diagonal()(product(A), normal(3, 4))


def test_two_preconditioners_are_refused():
    with pytest.raises(ValueError, match="inverse_diagonal is the preconditioner already: give one of the two"):
        ConjugateGradient(inverse_diagonal=torch.ones(2), preconditioner=lambda r: r)


def test_the_residual_reported_is_that_of_the_solution():
    A, b = spd(3, 6, lowest=0.1), torch.cat([normal(2, 6), 1e3 * normal(1, 6, seed=8)])
    halving = ConjugateGradient(2, preconditioner=lambda r: r / 2)
    for solve in (ConjugateGradient(2), halving, Neumann(0.1, 4), Diagonal()):
        with pytest.warns(SolverWarning) as caught:
            v, residual = solve(product(A), b)
        expected = (b - product(A)(v)).norm(dim=1) / b.norm(dim=1)
        assert torch.allclose(residual, expected, rtol=1e-10) and residual.min() > 1e-3
        message = str(caught[0].message)
        assert f"{expected.max().item():.1e}" in message and "in 3 of 3 systems" in message


def test_the_residual_with_a_diagonal_is_that_of_the_whole_system_in_its_metric():
    A, b, inverse = spd(2, 5), normal(2, 5), 0.1 + normal(2, 5, seed=7).abs()
    with pytest.warns(SolverWarning, match="allow more iterations, or give a preconditioner"):
        v, residual = ConjugateGradient(1, 1e-6, inverse)(product(A), b)
    left = inverse.sqrt() * (b - product(A)(v) - v / inverse)
    assert torch.allclose(residual, left.norm(dim=1) / (inverse.sqrt() * b).norm(dim=1), rtol=1e-10)


def test_the_residual_reported_in_single_precision_is_that_of_the_solution():
    basis = torch.linalg.qr(normal(5, 30, 30)).Q
    A = ((basis * torch.logspace(0, -4, 30, dtype=torch.float64)) @ basis.mT).float()
    b = normal(5, 30, seed=9).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SolverWarning)  # converged or not
        v, residual = ConjugateGradient(400, 1e-5)(product(A), b)
    left = (b.double() - product(A.double())(v.double())).norm(dim=1) / b.double().norm(dim=1)
    assert (left <= 2 * residual.double()).all()


def test_without_a_tolerance_nothing_is_reported_and_nothing_warned():
    b = normal(3, 6)
    truncated = [ConjugateGradient(1, None), Neumann(0.1, 1, None), Neumann(9.0, 20, None), Diagonal(tolerance=None)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for solve in (*truncated, Direct(None)):
            assert solve(product(spd(3, 6)), b).residual is None, solve
        assert not ConjugateGradient(5, None)(lambda v: -v, b).v.any()  # negative curvature


def test_a_residual_that_meets_the_tolerance_up_to_rounding_does_not_warn():
    residual = torch.tensor([1.04e-5, 1e-6, 0.0])
    assert meets_tolerance(residual, 1e-5).all() and not meets_tolerance(residual, 1e-6)[0]
    assert not meets_tolerance(torch.tensor([torch.nan]), 1.0)

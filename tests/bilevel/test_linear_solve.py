from itertools import pairwise

import torch

from doubly.bilevel import ConjugateGradient, Diagonal, Neumann


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
    assert torch.equal(Diagonal(inverse)(None, b), inverse * b)


def test_conjugate_gradient_solves_each_sample():
    A, b = spd(4, 6), rhs(4, 2, 3)
    found = ConjugateGradient(iterations=8, tolerance=1e-14)(product(A), b)
    assert torch.allclose(found.flatten(1), torch.linalg.solve(A, b.flatten(1)), rtol=1e-10)


def test_conjugate_gradient_adds_the_diagonal_known_by_its_inverse():
    A, b = spd(4, 6), rhs(4, 6)
    diagonal = torch.logspace(-2, 4, 24, dtype=torch.float64).view(4, 6)
    found = ConjugateGradient(20, 1e-14, 1 / diagonal)(product(A), b)
    assert torch.allclose(found, torch.linalg.solve(A + torch.diag_embed(diagonal), b), rtol=1e-8, atol=1e-14)


def test_an_infinite_diagonal_holds_its_coordinate_at_zero():
    A, b = spd(2, 5), rhs(2, 5)
    inverse = torch.full((2, 5), 0.3, dtype=torch.float64)
    inverse[:, 1] = inverse[:, 4] = 0
    found = ConjugateGradient(12, 1e-14, inverse)(product(A), b)
    free = [0, 2, 3]
    reduced = A[:, free][:, :, free] + torch.eye(3, dtype=torch.float64) / 0.3
    assert torch.equal(found[:, [1, 4]], torch.zeros(2, 2, dtype=torch.float64))
    assert torch.allclose(found[:, free], torch.linalg.solve(reduced, b[:, free]), rtol=1e-10)


def test_few_iterations_are_better_than_none_and_worse_than_many():
    A, b = spd(1, 20, lowest=0.01), rhs(1, 20)
    exact = torch.linalg.solve(A, b)

    def energy(v):
        return ((v - exact) * product(A)(v - exact)).sum().item()

    errors = [energy(ConjugateGradient(n, 0.0)(product(A), b)) for n in (0, 2, 5, 10, 40)]
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-8 * errors[0]


def test_negative_curvature_keeps_the_diagonal_solution_and_spares_the_other_samples():
    A, b = spd(2, 4), rhs(2, 4)
    A[0] = -5 * torch.eye(4, dtype=torch.float64)
    inverse = torch.full((2, 4), 0.5, dtype=torch.float64)
    found = ConjugateGradient(10, 1e-14, inverse)(product(A), b)
    assert torch.allclose(found[0], 0.5 * b[0])
    assert torch.allclose(found[1], torch.linalg.solve(A[1] + 2 * torch.eye(4, dtype=torch.float64), b[1]))


def test_negative_curvature_without_a_diagonal_gives_zero():
    b = rhs(2, 4)
    assert torch.equal(ConjugateGradient()(lambda v: -v, b), torch.zeros_like(b))


def test_solved_and_zero_samples_stay_finite():
    b = torch.stack([torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
    found = ConjugateGradient(50, 0.0)(lambda v: 2 * v, b)
    assert torch.allclose(found, b / 2) and found.isfinite().all()


def test_neumann_is_the_truncated_series():
    A, b = spd(3, 5), rhs(3, 5)
    powers, total = b, torch.zeros_like(b)
    for _ in range(7):
        total = total + 0.1 * powers
        powers = powers - 0.1 * product(A)(powers)
    assert torch.allclose(Neumann(0.1, 7)(product(A), b), total, rtol=1e-12)


def test_neumann_converges_to_the_solution():
    A, b = spd(3, 5), rhs(3, 5)
    assert torch.allclose(Neumann(0.2, 2000)(product(A), b), torch.linalg.solve(A, b), rtol=1e-10)

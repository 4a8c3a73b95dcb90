"""A bilevel problem with a known solution, which the tests of `minimize` share."""

from functools import partial

import torch

from doubly.bilevel import Descent, GradientStep, Terms, minimize

N, D, P = 12, 3, 2
CURVATURE = torch.tensor([1.0, 1.25, 0.8], dtype=torch.float64)
RIDGE = 0.1


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A = 0.4 * normal(N, D, P, seed=1) + torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.3, 0.3]], dtype=torch.float64)
DATA = _, B, C = A, normal(N, D, seed=2), normal(N, D, seed=3)
START = torch.tensor([1.0, -1.0], dtype=torch.float64)
ROWS, ONE = torch.zeros(N, D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
GOOD = Descent(GradientStep(1.0), 8)  # leaves 0.25^8 of the distance from the last delta
EXACT = Descent(GradientStep(1.0), 60, 1e-13)
SGD = partial(torch.optim.SGD, lr=0.4)


def quadratic(theta, delta, batch):
    """delta* = a theta + b of a sample, or its mean where delta is shared; g is half the squared distance from c."""
    a, b, c = batch
    inner = (CURVATURE * (delta - a @ theta - b).square()).sum(1) / 2
    return Terms((delta - c).square().sum(1) / 2 + RIDGE / 2 * theta @ theta, inner)


def solution(shared):
    """The theta at which the gradient of the mean of g(theta, delta*(theta)) vanishes."""
    a, b, c = (part.mean(0, keepdim=True) for part in DATA) if shared else DATA
    matrix = (a.mT @ a).mean(0) + RIDGE * torch.eye(P, dtype=torch.float64)
    return torch.linalg.solve(matrix, (a.mT @ (c - b)[..., None]).mean(0)[:, 0])


def run(theta=None, delta=ROWS, data=DATA, problem=quadratic, optimizer=SGD, steps=10, descent=GOOD, **options):
    theta = START.clone() if theta is None else theta
    return minimize(problem, theta, delta, data, optimizer=optimizer, steps=steps, descent=descent, **options)


def logarithm(u):
    return (1 + u).log()


def alike(one, other, tolerance=0.0):
    """Return whether two results are equal, bit by bit or nearly."""
    pairs = [(one.theta, other.theta), (one.delta, other.delta), (one.u, other.u)]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def reachable():
    """Data for which one theta makes every g_i zero, so that small batches have no noise at the solution."""
    theta = torch.tensor([0.3, 0.7], dtype=torch.float64)
    return theta, (A, B, A @ theta + B)


def without_ridge(theta, delta, batch):
    terms = quadratic(theta, delta, batch)
    return terms._replace(outer=terms.outer - RIDGE / 2 * theta @ theta)

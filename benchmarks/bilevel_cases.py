"""The problems of bilevel.py, the estimators of their hypergradients, and the rounds in which they are timed."""

import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor

import torch
import torch.nn.functional as F
from torch import Tensor

from doubly.bilevel import (
    ConjugateGradient,
    GradientStep,
    RunningMean,
    Solver,
    Terms,
    WholeSpace,
    cid,
    projected_descent,
)

try:
    import torchopt
except ImportError:
    torchopt = None

Level = Callable[[Tensor, Tensor], Tensor]  # theta, delta -> one value per sample
Estimate = Callable[[], Tensor]  # -> the gradient in theta
Rounds = dict[str, list[float]]  # estimator -> seconds, round by round

OURS, UNROLLED, TORCHOPT = "ours, CG", "unrolled", "torchopt, CG"


@dataclass(frozen=True, eq=False)
class Case:
    """min over theta of mean g(theta, delta*), delta* = argmin h; every estimator can express it."""

    outer: Level  # g_i
    inner: Level  # h_i
    theta: Tensor
    start: Tensor
    size: float  # of the inner steps
    data: tuple[Tensor, ...]
    shared: bool = False

    def total(self, delta: Tensor, theta: Tensor) -> Tensor:
        """The function of delta that the inner steps descend."""
        values = self.inner(theta, delta)
        return values.mean() if self.shared else values.sum()


@dataclass(frozen=True)
class Effort:
    steps: int  # K
    iterations: int  # of conjugate gradients


def quadratic(samples: int, parameters: int, size: int) -> Case:
    """Each sample its own delta_i in R^size, with Hessian A_i of eigenvalues 1 to 10."""
    draw = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(samples, size, size, generator=draw)).Q
    A = (rotation * torch.linspace(1, 10, size)) @ rotation.mT
    B = torch.randn(samples, size, parameters, generator=draw) / parameters**0.5
    shift, target = torch.randn(2, samples, size, generator=draw)

    def inner(theta: Tensor, delta: Tensor) -> Tensor:
        return ((A @ delta.unsqueeze(2)).squeeze(2) * delta).sum(1) / 2 - ((B @ theta + shift) * delta).sum(1)

    def outer(theta: Tensor, delta: Tensor) -> Tensor:
        return ((delta - target).square().sum(1) + 0.1 * theta.square().sum()) / 2

    theta, start = torch.randn(parameters, generator=draw), torch.zeros(samples, size)
    return Case(outer, inner, theta, start, 2 / 11, (A, B, shift, target))


def separable(samples: int, parameters: int, size: int) -> Case:
    """As `quadratic`, with diagonal A_i and a cosh beside it: h is a sum over the coordinates of delta."""
    draw = torch.Generator().manual_seed(0)
    curvature = 1 + 4 * torch.rand(samples, size, generator=draw)
    B = torch.randn(samples, size, parameters, generator=draw) / parameters**0.5
    target = torch.randn(samples, size, generator=draw)

    def inner(theta: Tensor, delta: Tensor) -> Tensor:
        return (curvature * delta.square() / 2 + delta.cosh() - (B @ theta) * delta).sum(1)

    def outer(theta: Tensor, delta: Tensor) -> Tensor:
        return (delta - target).square().sum(1) / 2

    theta, start = torch.randn(parameters, generator=draw), torch.zeros(samples, size)
    return Case(outer, inner, theta, start, 0.25, (curvature, B, target))


def logistic(samples: int, features: int, classes: int) -> Case:
    """Softmax regression: delta are the weights, shared by all samples; theta the log-regularization of each weight."""
    draw = torch.Generator().manual_seed(0)
    basis = torch.randn(20, features, generator=draw) / features**0.5
    teacher = torch.randn(20, classes, generator=draw)
    latent = torch.randn(2 * samples, 20, generator=draw)
    noise = torch.randn(2 * samples, features, generator=draw) * (0.3 / features**0.5)
    x, x_validation = (latent @ basis + noise).chunk(2)
    y, labels = (latent @ teacher).argmax(1).chunk(2)
    theta = (0.2 + 0.2 * torch.rand(features, classes, generator=draw)).log()
    steepest = torch.linalg.eigvalsh(x @ x.T / samples)[-1].item() / 2 + 0.4  # bound on the curvature of h

    def inner(theta: Tensor, weights: Tensor) -> Tensor:
        fit = F.cross_entropy(x @ weights, y, reduction="none")
        return fit + (theta.exp() * weights.square()).sum() / 2

    def outer(theta: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(x_validation @ weights, labels, reduction="none")

    start = torch.zeros(features, classes)
    return Case(outer, inner, theta, start, 2 / (steepest + 0.2), (x, y, x_validation, labels), shared=True)


def descend(case: Case, theta: Tensor, start: Tensor, steps: int) -> Tensor:
    def h(rows: Tensor) -> Tensor:
        return case.total(rows.squeeze(0), theta)[None] if case.shared else case.inner(theta, rows)

    rows = start[None] if case.shared else start
    delta = projected_descent(h, rows, WholeSpace(), GradientStep(case.size), steps, shared=case.shared)
    return delta[0] if case.shared else delta


def ours(case: Case, steps: int, solve: Solver) -> Estimate:
    theta = case.theta.clone().requires_grad_()

    def problem(delta: Tensor) -> Terms:
        return Terms(case.outer(theta, delta), case.inner(theta, delta))

    def estimate() -> Tensor:
        delta = descend(case, theta.detach(), case.start, steps)
        direction = cid(problem, delta, RunningMean(), {}, solve, shared=case.shared)
        return torch.autograd.grad(direction.loss, theta)[0]

    return estimate


def unrolled(case: Case, steps: int) -> Estimate:
    """Plain torch: the inner steps are part of the graph."""
    theta = case.theta.clone().requires_grad_()

    def estimate() -> Tensor:
        delta = case.start.clone().requires_grad_()
        for _ in range(steps):
            (gradient,) = torch.autograd.grad(case.total(delta, theta), delta, create_graph=True)
            delta = delta - case.size * gradient
        return torch.autograd.grad(case.outer(theta, delta).mean(), theta)[0]

    return estimate


def by_torchopt(case: Case, effort: Effort) -> Estimate:
    """All delta_i stacked as one variable, inner steps in a bare loop: what costs a user of torchopt the least."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchopt")  # it calls functorch by its old name
    theta = case.theta.clone().requires_grad_()
    solve = torchopt.linear_solve.solve_cg(rtol=0.0, maxiter=effort.iterations)

    @torchopt.diff.implicit.custom_root(torch.func.grad(case.total), argnums=1, solve=solve)
    def minimizer(delta: Tensor, theta: Tensor) -> Tensor:
        theta = theta.detach()
        for _ in range(effort.steps):
            delta = delta.detach().requires_grad_()
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(case.total(delta, theta), delta)
            delta = delta.detach() - case.size * gradient
        return delta

    def estimate() -> Tensor:
        return torch.autograd.grad(case.outer(theta, minimizer(case.start, theta)).mean(), theta)[0]

    return estimate


def make_estimates(case: Case, effort: Effort, further: dict[str, Solver] | None = None) -> dict[str, Estimate]:
    """Ours with a fixed number of iterations, the others, and ours with further solvers."""
    estimates = {OURS: ours(case, effort.steps, ConjugateGradient(effort.iterations, tolerance=None))}
    estimates |= {name: ours(case, effort.steps, solve) for name, solve in (further or {}).items()}
    estimates[UNROLLED] = unrolled(case, effort.steps)
    if torchopt is not None:
        estimates[TORCHOPT] = by_torchopt(case, effort)
    return estimates


def alternate(estimates: dict[str, Estimate], budget: float, fewest: int) -> Rounds:
    """Rounds until `budget` seconds are spent."""
    for estimate in estimates.values():
        estimate()
    seconds: Rounds = {label: [] for label in estimates}
    order, spent, rounds = random.Random(0), 0.0, 0
    while rounds < fewest or spent < budget:
        # Shuffled, not rotated: what ran just before leaves its mark on heap and cache.
        for label in order.sample(list(estimates), len(estimates)):
            start = time.process_time()
            estimates[label]()
            seconds[label].append(time.process_time() - start)
            spent += seconds[label][-1]
        rounds += 1
    return seconds


def ratio(seconds: Rounds, label: str) -> tuple[float, float, float]:
    """How many times as long as ours: the median round, between the ends of its 95% interval by order statistics."""
    rounds = sorted(a / b for a, b in zip(seconds[label], seconds[OURS], strict=True))
    reach = 0.98 * len(rounds) ** 0.5
    low, high = floor(len(rounds) / 2 - reach), ceil(len(rounds) / 2 + reach)
    return rounds[max(low, 0)], statistics.median(rounds), rounds[min(high, len(rounds) - 1)]

"""The gradient of `cid` against its dense twin and finite differences of F, for every combination of its parts.

Solvers x compositions x constraints x (rows or a shared delta). The inner problem is strongly convex, with curvature
that depends on theta and delta; the constraints bind for some samples and coordinates and not for others. All of it
with the full batch, eta = 1, in float64.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from dense_cid import dense_cid
from doubly.bilevel import (
    Ball,
    Box,
    ChiSquare,
    ClassLogMeanExp,
    ConjugateGradient,
    CVaR,
    Diagonal,
    Direct,
    GradientStep,
    LogMeanExp,
    MeanVariance,
    Neumann,
    RunningMean,
    Simplex,
    Terms,
    WholeSpace,
    cid,
    projected_descent,
)

M, P, D = 6, 4, 3  # samples, coordinates of delta, of theta
ALL = slice(None)
generator = torch.Generator().manual_seed(3)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


A, B, C, E, OFFSET = normal(M, P, D), normal(M, P), normal(M, D), normal(M, P), 0.8 * normal(M, P) + normal(P)
ROOT = normal(M, P, P)
Q = ROOT @ ROOT.mT / (2 * P) + torch.eye(P, dtype=torch.float64)
THETA = torch.tensor([0.4, -0.6, 0.8], dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 0, 2, 1, 0])
SHARES, PRIOR = torch.tensor([3, 2, 1]).double() / 6, torch.tensor([0.2, 0.3, 0.5]).double()


def h(theta, delta, i=ALL):
    quartic = 0.1 * delta.pow(4).sum(-1) * (1 + theta[0] ** 2)
    return _linear(theta, delta, i) + quartic + 0.5 * torch.einsum("...i,...ij,...j->...", delta, Q[i], delta)


def h_separable(theta, delta, i=ALL):
    diagonal = Q.diagonal(dim1=1, dim2=2)[i]
    quartic = 0.1 * delta.pow(4).sum(-1) * (1 + theta[0] ** 2)
    return _linear(theta, delta, i) + quartic + 0.5 * (diagonal * delta.square()).sum(-1)


def _linear(theta, delta, i):
    return (((A[i] @ theta).sin() + OFFSET[i]) * delta).sum(-1)


def g(theta, delta, i=ALL):
    return 2 + ((B[i] * delta).sum(-1) + C[i] @ theta).tanh() + 0.2 * delta.square().sum(-1) * theta[1]


def g_vector(theta, delta, i=ALL):
    return torch.stack([g(theta, delta, i), (C[i] @ theta).cos() + (E[i] * delta).sum(-1) * theta[2]], -1)


def g_with_class(theta, delta, i=ALL):
    return torch.stack([g(theta, delta, i), CLASSES[i].double()], -1)


# Compositions, each with F as a function of all g_i, written without the library


def dual(best_weight, objective):
    """The maximum over weights of mean 1, by the multiplier t of that mean; F is differentiated with t held fixed."""

    def risk(losses):
        fixed = losses.detach()
        t = brentq(lambda t: best_weight(fixed - t).mean().item() - 1, fixed.min() - 9, fixed.max() + 9, xtol=1e-14)
        return t + objective(losses - t, best_weight(fixed - t)).mean()

    return risk


def chi_square(r, cap=None):
    return dual(lambda s: (1 + s / r).clamp(0, cap), lambda s, w: w * s - r / 2 * (w - 1).square())


def kullback_leibler(r, cap, floor=0.0):
    return dual(lambda s: (s / r - 1).exp().clamp(floor, cap), lambda s, w: w * s - r * w * w.log())


def of_classes(R, r, prior):
    """g_i = (M / M_y) exp(l_i / r) onehot(y), f(u) = R log sum_c prior_c u_c^(r/R), as they are written."""

    def risk(values):
        onehot = torch.nn.functional.one_hot(values[:, 1].long(), 3)
        u = ((values[:, :1] / r).exp() / SHARES * onehot).mean(0)
        return R * (prior * u ** (r / R)).sum().log()

    return risk


def nested(over_classes, inside):
    """A risk of the risks of the classes."""
    return lambda v: over_classes(torch.stack([inside(v[v[:, 1] == c, 0]) for c in range(3)]))


def worst(share):
    def risk(losses):
        total = share * len(losses)
        # the shares of the samples, the worst first
        counts = (total - torch.arange(len(losses), dtype=losses.dtype)).clamp(0, 1)
        return (losses.sort(descending=True).values * counts).sum() / total

    return risk


def curved(u):
    return u[0].log() * u[1].sin() + u[1] ** 3


class Composed(NamedTuple):
    composition: object
    risk: object
    outer: object = g


COMPOSITIONS = {
    "mean": Composed(RunningMean(eta=1.0), lambda g: g.mean()),
    "vector": Composed(RunningMean(curved, eta=1.0), lambda g: curved(g.mean(0)), g_vector),
    "log-mean-exp": Composed(LogMeanExp(0.5, eta=1.0), lambda g: 0.5 * ((g / 0.5).logsumexp(0) - math.log(len(g)))),
    "capped log-mean-exp": Composed(LogMeanExp(0.5, eta=1.0, cap=1.5), kullback_leibler(0.5, 1.5)),
    "mean-variance": Composed(MeanVariance(0.7, eta=1.0), lambda g: g.mean() + g.var(correction=0) / 1.4),
    "chi-square": Composed(ChiSquare(0.4, eta=1.0), chi_square(0.4)),
    "capped chi-square": Composed(ChiSquare(0.4, eta=1.0, cap=1.6), chi_square(0.4, 1.6)),
    "classes": Composed(ClassLogMeanExp(SHARES, 0.3, 0.5, PRIOR, 1.0), of_classes(0.3, 0.5, PRIOR), g_with_class),
    "class means": Composed(
        ClassLogMeanExp(SHARES, 0.2, eta=1.0),
        nested(lambda g: 0.2 * ((g / 0.2).logsumexp(0) - math.log(3)), lambda losses: losses.mean()),
        g_with_class,
    ),
    "bounded classes": Composed(
        ClassLogMeanExp(SHARES, 0.2, 0.3, eta=1.0, class_cap=1.5, cap=1.4, floor=0.5),
        nested(kullback_leibler(0.2, 1.5), lambda part: kullback_leibler(0.3, 1.4, 0.5)(part)),
        g_with_class,
    ),
    "cvar": Composed(CVaR(0.35, eta=1.0), worst(0.35)),
}

# Constraints, each with the functions that are 0 where it binds, read off delta alone


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


ROOM = numbers(0.7, 0.7, 0.7, 0.7, 1.2, 0.7)[:, None]
CONSTRAINTS = {
    "whole space": lambda shared: WholeSpace(),
    "box": lambda shared: Box(numbers(-0.7, -0.5, -0.3, -0.6), numbers(0.5, 0.4, 0.6, 0.3)),
    "ball": lambda shared: Ball(0.9 if shared else numbers(0.9, 1.6, 1.2, 0.7, 1.8, 1.0)),
    "ball with box": lambda shared: Ball(
        0.9 if shared else numbers(0.9, 0.9, 0.9, 0.9, 2.0, 0.9), Box(-0.7, 0.7) if shared else Box(-ROOM, ROOM)
    ),
    "simplex": lambda shared: Simplex(1.5),
}
# The number of functions that are 0, row by row; for the ball with box: sphere, both, both, box, neither, both.
BIND = {
    ("whole space", False): [0, 0, 0, 0, 0, 0],
    ("whole space", True): [0],
    ("box", False): [3, 2, 3, 1, 3, 1],
    ("box", True): [1],
    ("ball", False): [1, 0, 1, 1, 0, 1],
    ("ball", True): [1],
    ("ball with box", False): [1, 2, 2, 1, 0, 2],
    ("ball with box", True): [2],
    ("simplex", False): [3, 3, 3, 3, 3, 2],
    ("simplex", True): [3],
}
BINDING = [key for key, counts in BIND.items() if any(counts)]


def equal(value, expected):
    return (value - expected).abs() < 1e-9


def active_functions(constraint, delta, i):
    """The vector of functions that are 0 on the face on which row i of the minimizer, delta, lies."""
    if isinstance(constraint, Simplex):
        return lambda d: torch.cat([(d.sum() - constraint.total)[None], d[equal(delta, 0.0)]])
    box = constraint if isinstance(constraint, Box) else getattr(constraint, "box", None) or Box(-torch.inf, torch.inf)
    lower, upper = box.lower.expand(M, P)[i], box.upper.expand(M, P)[i]
    held, bound = equal(delta, lower) | equal(delta, upper), torch.where(delta < 0, lower, upper)
    radius = torch.as_tensor(getattr(constraint, "radius", torch.inf), dtype=delta.dtype).expand(M)[i]
    sphere = equal(delta.norm(), radius)[None]
    return lambda d: torch.cat([0.5 * (d.square().sum() - radius**2)[None][sphere], (d - bound)[held]])


class NearestPoint(NamedTuple):
    """The projection onto a ball with box, by another algorithm than `Ball.project`.

    It is clip(scale * delta); while the scale grows to its value, coordinates only ever join those at their bound.
    """

    ball: Ball

    def project(self, delta):
        radius = torch.as_tensor(self.ball.radius, dtype=delta.dtype).view(-1, 1)
        scale = radius / delta.norm(dim=1, keepdim=True).clamp_min(1e-300)
        for _ in range(P):
            clipped = self.ball.box.project(scale * delta)
            held = clipped != scale * delta
            left = radius.square() - (clipped * held).square().sum(1, keepdim=True)
            scale = (left / (delta * ~held).square().sum(1, keepdim=True).clamp_min(1e-300)).sqrt()
        return self.ball.box.project(scale.clamp_max(1) * delta)


# Inner problem, F and its finite differences


@cache
def minimizer(constraint, shared, inner=h, shift=(0.0, 0.0, 0.0)):
    """The inner solutions at THETA + shift, to about 1e-13."""
    theta, limits = THETA + numbers(*shift), CONSTRAINTS[constraint](shared)
    start = minimizer(constraint, shared, inner) if any(shift) else torch.zeros(P if shared else (M, P)).double()
    rows = projected_descent(
        (lambda rows: inner(theta, rows[0]).mean()[None]) if shared else (lambda rows: inner(theta, rows)),
        start[None] if shared else start,
        NearestPoint(limits) if constraint == "ball with box" else limits,
        GradientStep(0.25),
        1000,
        1e-13,
    )
    return rows[0] if shared else rows


@cache
def differences(composition, constraint, shared, inner=h, size=1e-4):
    """The gradient of F by central differences, each with its own inner minimizers."""
    composed, _, outer = COMPOSITIONS[composition]

    def value(shift):
        return composed.value(outer(THETA + shift, minimizer(constraint, shared, inner, tuple(shift.tolist()))))

    return torch.stack([(value(s) - value(-s)) / (2 * size) for s in size * torch.eye(D, dtype=torch.float64)])


def estimate(composition, constraint, shared, solve, inner=h, limits=None, order=ALL):
    """The gradient of `cid` and its Direction, for the samples in the given order."""
    theta = THETA.clone().requires_grad_()
    composed, _, outer = COMPOSITIONS[composition]
    delta = minimizer(constraint, shared, inner)
    direction = cid(
        lambda delta: Terms(outer(theta, delta, order), inner(theta, delta, order)),
        delta if shared else delta[order],
        composed,
        {},
        solve,
        constraint=limits,
        shared=shared,
    )
    return torch.autograd.grad(direction.loss, theta)[0], direction


@pytest.fixture(scope="module")
def twin():
    @cache
    def gradient(composition, constraint, shared, inner):
        limits = CONSTRAINTS[constraint](shared)
        delta = minimizer(constraint, shared, inner)
        rows = delta[None] if shared else delta
        functions = [active_functions(limits, row, i) for i, row in enumerate(rows)]
        _, risk, outer = COMPOSITIONS[composition]
        return dense_cid(
            outer, inner, THETA, delta, risk=risk, active=lambda d, i: functions[i](d), samples=M if shared else None
        )

    return gradient


SOLVERS = {
    "direct": Direct(1e-12),
    "cg": ConjugateGradient(20, 1e-13),
    "preconditioned": ConjugateGradient(20, 1e-13, preconditioner=lambda r: r / numbers(1.5, 2.5, 1.8, 3.0)),
    "neumann": Neumann(0.25, 110, 1e-11),
    "diagonal": Diagonal(tolerance=1e-13),
}
# The Hessian on the face is diagonal where h is separable and the face has no normal that mixes coordinates.
FITS = [
    (solver, composition, constraint, shared)
    for solver, composition, constraint, shared in product(SOLVERS, COMPOSITIONS, CONSTRAINTS, (False, True))
    if solver != "diagonal" or constraint in ("whole space", "box")
]


def name(value):
    return {False: "rows", True: "shared"}[value] if isinstance(value, bool) else value.replace(" ", "-")


@pytest.mark.parametrize(("solver", "composition", "constraint", "shared"), FITS, ids=name)
def test_the_gradient_is_that_of_the_dense_twin_and_of_f(twin, solver, composition, constraint, shared):
    inner, limits = h_separable if solver == "diagonal" else h, CONSTRAINTS[constraint](shared)
    gradient, direction = estimate(composition, constraint, shared, SOLVERS[solver], inner, limits)
    assert torch.allclose(gradient, twin(composition, constraint, shared, inner), rtol=1e-9, atol=1e-10)
    assert torch.allclose(gradient, differences(composition, constraint, shared, inner), rtol=1e-7, atol=1e-7)
    assert direction.residual.shape == (1 if shared else M,) and direction.residual.max() < 1e-11


@pytest.mark.parametrize(("constraint", "shared"), BIND, ids=name)
def test_the_constraints_bind_where_they_are_meant_to(constraint, shared):
    delta, limits = minimizer(constraint, shared), CONSTRAINTS[constraint](shared)
    rows = delta[None] if shared else delta
    assert [len(active_functions(limits, row, i)(row)) for i, row in enumerate(rows)] == BIND[constraint, shared]


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=name)
def test_the_value_of_a_composition_is_the_risk_that_the_twin_differentiates(composition):
    composed, risk, outer = COMPOSITIONS[composition]
    values = outer(THETA, minimizer("box", False))
    assert torch.allclose(composed.value(values), risk(values), rtol=1e-12)


@pytest.mark.parametrize(
    ("composition", "weight"),
    [
        ("capped log-mean-exp", 1.5),
        ("chi-square", 0),
        ("capped chi-square", 0),
        ("capped chi-square", 1.6),
        ("cvar", 6 - 2 / 0.35),
    ],
)
def test_weights_are_clipped_in_the_table(composition, weight):
    _, direction = estimate(composition, "ball", False, None)
    assert 1 <= equal(direction.cotangents, weight).sum() < M


@pytest.mark.parametrize(("constraint", "shared"), BINDING, ids=name)
def test_without_its_face_the_gradient_is_wrong(constraint, shared):
    gradient, _ = estimate("mean", constraint, shared, SOLVERS["direct"])
    true = differences("mean", constraint, shared)
    assert (gradient - true).norm() > 0.05 * true.norm()


@pytest.mark.parametrize("shared", [False, True], ids=name)
def test_without_its_multiplier_the_gradient_on_a_ball_is_wrong(shared):
    class Flat(NamedTuple):
        ball: Ball

        def project(self, delta):
            return self.ball.project(delta)

        def face(self, delta, slope):
            return replace(self.ball.face(delta, slope), multiplier=None)

    gradient, _ = estimate("mean", "ball", shared, SOLVERS["direct"], limits=Flat(CONSTRAINTS["ball"](shared)))
    true = differences("mean", "ball", shared)
    assert (gradient - true).norm() > 0.05 * true.norm()


@pytest.mark.parametrize("shared", [False, True], ids=name)
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=name)
def test_the_order_of_the_samples_does_not_matter(composition, shared):
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    limits = CONSTRAINTS["ball"](shared)
    reordered = limits if shared else Ball(limits.radius[order])
    expected, one = estimate(composition, "ball", shared, SOLVERS["cg"], limits=limits)
    gradient, other = estimate(composition, "ball", shared, SOLVERS["cg"], limits=reordered, order=order)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-13)
    assert torch.allclose(one.cotangents[order], other.cotangents, rtol=1e-12)
    composed = COMPOSITIONS[composition].composition
    assert torch.allclose(composed.estimate(one.state), composed.estimate(other.state), rtol=1e-12)


# Problems drawn by hypothesis

SCALAR = [key for key, composed in COMPOSITIONS.items() if composed.outer is g]
sizes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))  # samples, delta, theta
seeds = st.integers(0, 2**31)


def gradients(best, inner, composition, solve, size, draw, limits=None, shared=False):
    """The gradient of F by autograd through the minimizer best(theta), and that of `cid`."""
    samples, p, d = size
    composed, risk, _ = COMPOSITIONS[composition]
    b, c, theta = draw(samples, p), draw(samples, d), draw(d).requires_grad_()

    def outer(theta, delta):
        return 2 + ((b * delta).sum(-1) + c @ theta).tanh() + 0.1 * delta.square().sum(-1)

    expected = torch.autograd.grad(risk(outer(theta, best(theta))), theta)[0]
    delta = best(theta).detach()
    direction = cid(
        lambda delta: Terms(outer(theta, delta), inner(theta, delta)),
        delta,
        composed,
        {},
        solve,
        constraint=limits,
        shared=shared,
    )
    return expected, torch.autograd.grad(direction.loss, theta)[0]


def drawing(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


each_composition = pytest.mark.parametrize("composition", SCALAR, ids=name)


@each_composition
@settings(max_examples=20)
@given(seeds, sizes, st.floats(0, 4), st.sampled_from([Direct(), ConjugateGradient(100, 1e-11)]), st.booleans())
def test_quadratics_of_any_size_and_conditioning_have_their_closed_form(
    composition, seed, size, exponent, solve, shared
):
    (samples, p, d), draw = size, drawing(seed)
    basis = torch.linalg.qr(draw(samples, p, p)).Q
    q = basis * torch.logspace(0, -exponent, p, dtype=torch.float64) @ basis.mT
    a = draw(samples, p, d)

    def inner(theta, delta):
        return 0.5 * torch.einsum("...i,...ij,...j->...", delta - a @ theta, q, delta - a @ theta)

    def best(theta):
        return torch.linalg.solve(q.mean(0), (q @ a).mean(0) @ theta) if shared else a @ theta

    expected, gradient = gradients(best, inner, composition, solve, size, draw, shared=shared)
    assert torch.allclose(gradient, expected, rtol=1e-7, atol=1e-7)


@each_composition
@settings(max_examples=20)
@given(
    seeds,
    sizes,
    st.sampled_from([Box(-0.5, 0.8), Box(0.0, torch.inf), Ball(1.0), Simplex(2.0)]),
    st.sampled_from([Direct(), ConjugateGradient(20, 1e-11)]),
    st.booleans(),
)
def test_the_nearest_point_of_a_constraint_is_differentiated_as_its_projection(
    composition, seed, size, limits, solve, shared
):
    (samples, p, d), draw = size, drawing(seed)
    a = draw(samples, p, d)

    def inner(theta, delta):  # least at the point nearest to the target, or to the mean of all
        return (1 + theta[0] ** 2 / 4) * 0.5 * (delta - a @ theta).square().sum(-1)

    def best(theta):
        target = a @ theta
        return limits.project(target.mean(0, keepdim=True))[0] if shared else limits.project(target)

    expected, gradient = gradients(best, inner, composition, solve, size, draw, limits, shared)
    assert torch.allclose(gradient, expected, rtol=1e-8, atol=1e-8)


# Large values

STEEP = [
    LogMeanExp(1e-6),
    LogMeanExp(1e-6, cap=2.0),
    LogMeanExp(1e-6, mean_weight_limit=10.0),
    MeanVariance(1e-6),
    ChiSquare(1e-6),
    ChiSquare(1e-6, cap=2.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("composition", STEEP, ids=repr)
def test_losses_a_million_times_r_give_no_nan(composition, dtype):
    a, b, theta = A.to(dtype), B.to(dtype), THETA.to(dtype).requires_grad_()
    state = {}
    for scale in (1.0, 1e-7, 1.0, 0.0, 0.3):  # each step starts from the state that the one before left

        def terms(delta, scale=scale):
            shares = torch.softmax((b * delta).sum(1) + a[:, 0] @ theta, 0)
            return Terms(scale * shares / shares.max().detach(), 0.5 * (delta - a @ theta).square().sum(1))

        direction = cid(terms, (a @ theta).detach(), composition, state, Direct())
        gradient, state = torch.autograd.grad(direction.loss, theta)[0], direction.state
        assert direction.values.max() / composition.r == pytest.approx(1e6 * scale, rel=1e-4)
        assert gradient.isfinite().all() and gradient.dtype is dtype
        assert composition.value(direction.values).isfinite() and composition.value(direction.values).dtype is dtype
        assert direction.cotangents.isfinite().all() and all(part.isfinite().all() for part in state.values())


@pytest.mark.parametrize("composition", [LogMeanExp(1e-6), ChiSquare(1e-6), CVaR(1e-6)], ids=repr)
def test_at_a_million_times_r_the_gradient_is_that_of_the_worst_sample(composition):
    theta = THETA.clone().requires_grad_()
    delta = minimizer("whole space", False)
    all_samples = cid(lambda delta: Terms(g(theta, delta), h(theta, delta)), delta, composition, {}, SOLVERS["direct"])
    top = int(all_samples.values.argmax())

    def only_the_worst(delta):
        return Terms(g(theta, delta, [top]), h(theta, delta, [top]))

    worst = cid(only_the_worst, delta[[top]], RunningMean(), {}, SOLVERS["direct"])
    gradients = [torch.autograd.grad(direction.loss, theta)[0] for direction in (all_samples, worst)]
    assert torch.allclose(*gradients, rtol=1e-9)

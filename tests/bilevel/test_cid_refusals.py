"""What `cid` refuses or warns about: each message names the argument and the remedy."""

import pytest
import torch

from doubly.bilevel import (
    Ball,
    Box,
    ChiSquare,
    ConjugateGradient,
    CVaR,
    Diagonal,
    Direct,
    LogMeanExp,
    MeanVariance,
    RunningMean,
    Simplex,
    SolverWarning,
    Terms,
    cid,
)

THETA = torch.tensor([0.4, -0.6, 0.8], dtype=torch.float64)
DELTA = 0.3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MEAN, DIRECT = RunningMean(), Direct()


def estimate_of(outer, inner=None, delta=DELTA, composition=MEAN, solve=DIRECT, **options):
    """`cid` of terms that are functions of (theta, delta)."""
    theta = THETA.clone().requires_grad_()

    def terms(delta):
        return Terms(outer(theta, delta), None if inner is None else inner(theta, delta))

    return cid(terms, delta, composition, {}, solve, **options)


def per_sample(theta, delta):
    return (delta * theta.sum()).sum(-1) + delta.square().sum(-1)


def two_columns(theta, delta):
    return torch.stack([per_sample(theta, delta)] * 2, 1)


def test_values_that_do_not_fit_are_refused():
    outer = r"outer must hold one g_i per sample, \(5,\) or \(5, m\).* before they are averaged"
    inner = r"inner must hold one h_i per sample, \(5,\), got .* before they are averaged"
    shared = r"outer must hold one g_i per sample, \(B,\) or \(B, m\), got shape \(\)"
    table = [
        (lambda: estimate_of(lambda t, d: per_sample(t, d).mean(), per_sample), outer),
        (lambda: estimate_of(lambda t, d: per_sample(t, d)[:3], per_sample), outer),
        (lambda: estimate_of(lambda t, d: per_sample(t, d)[:, None, None], per_sample), outer),
        (lambda: estimate_of(per_sample, per_sample, DELTA[0], shared=True), shared),
        (lambda: estimate_of(per_sample, lambda t, d: per_sample(t, d).sum()), inner),
        (lambda: estimate_of(per_sample, lambda t, d: per_sample(t, d)[:, None]), inner),
        (lambda: estimate_of(per_sample, lambda t, d: d.square()), inner),
        (
            lambda: estimate_of(two_columns, composition=RunningMean(torch.sum)),
            r"inner=None stands for -g, and g is a vector here: return h_i.* as inner",
        ),
        (
            lambda: estimate_of(per_sample, per_sample, composition=RunningMean(lambda u: u * torch.ones(3))),
            r"f must return one number, got shape \(3,\) from u of shape \(\): reduce it",
        ),
    ]
    for call, message in table:
        with pytest.raises(ValueError, match=message):
            call()
    for composition in (LogMeanExp(), LogMeanExp(cap=2.0), MeanVariance(), ChiSquare(), CVaR()):
        with pytest.raises(ValueError, match=rf"one loss per sample, \(B,\), for {type(composition).__name__}"):
            estimate_of(two_columns, per_sample, composition=composition)


def test_a_delta_outside_its_constraint_is_refused_and_rounding_is_not():
    outside = [[0.1, 0.1, 0.1, 0.1], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, -2.0], [0.0] * 4, [0.2] * 4]
    outside = torch.tensor(outside).double()
    boxed_ball = Ball(9.0, Box(-0.5, 2))
    table = [(Box(-0.5, 0.5), 2, "1.5"), (Ball(1.0), 2, "1.0"), (Simplex(0.8), 4, "2.0"), (boxed_ball, 1, "1.5")]
    for constraint, rows, distance in table:
        message = rf"outside the constraint in {rows} of 5 rows, by up to {distance}e\+00: pass constraint.project\("
        with pytest.raises(ValueError, match=message):
            estimate_of(per_sample, per_sample, outside, constraint=constraint)
        estimate_of(per_sample, per_sample, constraint.project(outside), constraint=constraint)
    with pytest.raises(ValueError, match="outside the constraint in 5 of 5 rows"):
        estimate_of(per_sample, per_sample, DELTA * torch.nan, constraint=Box(-1, 1))
    rounded = Ball(1.0).project(9 * DELTA.float()).double()
    estimate_of(per_sample, per_sample, rounded, constraint=Ball(1.0))


def test_an_indefinite_or_singular_hessian_is_named():
    def saddle(theta, delta):
        return delta[:, 0].square() - delta[:, 1:].square().sum(1) + per_sample(theta, delta) - delta.square().sum(1)

    refused = r"inner: its Hessian in delta is singular or indefinite in 5 of 5 .*add curvature"
    warned = r"relative residual of .* inner has no positive curvature .*add curvature to inner"
    for inner in (saddle, lambda theta, delta: (delta * theta[0]).sum(1)):
        with pytest.raises(ValueError, match=refused):
            estimate_of(per_sample, inner)
        with pytest.warns(SolverWarning, match=warned):
            estimate_of(per_sample, inner, solve=ConjugateGradient())


def test_a_diagonal_solve_on_a_sphere_warns_that_the_system_is_not_diagonal():
    constraint, target = Ball(0.5), 3 * DELTA + 1
    with pytest.warns(SolverWarning, match="not diagonal; use ConjugateGradient or Direct"):
        estimate_of(
            lambda theta, delta: (delta * DELTA).sum(1),
            lambda theta, delta: 0.5 * (delta - target).square().sum(1),
            constraint.project(target),
            constraint=constraint,
            solve=Diagonal(),
        )

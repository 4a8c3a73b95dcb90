"""Compositional implicit differentiation: Algorithm 1, lines 8-12, as the gradient of one scalar.

With c_i the cotangents of the composition and v_i the solution of (d2 h_i / d delta2) v_i = d(c_i . g_i) / d delta,
both constants,

    S(theta) = mean_i [ c_i . g_i(theta, delta_i) - < dh_i/d delta (theta, delta_i), v_i > ]

has the compositional implicit estimate as its theta-gradient. So one ordinary `backward()` and any optimizer will do. A
delta that all samples share is one row: there h, c . g and their derivatives are means over the samples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.composition import Composition, State
from doubly.bilevel.face import flat
from doubly.bilevel.inner import Constraint, identity, pooled
from doubly.bilevel.linear_solve import MatVec, Solver


class Terms(NamedTuple):
    """The problem at delta. `inner` is the part of h_i that depends on theta; None means that this part is -g_i."""

    outer: Tensor  # g_i, (B,) or (B, m)
    inner: Tensor | None = None  # h_i, (B,)
    aux: Any = None  # handed through


class Direction(NamedTuple):
    """`loss.backward()` gives the estimate of the gradient of F."""

    loss: Tensor  # ()
    values: Tensor  # g_i, detached
    cotangents: Tensor  # c_i, detached; the weights, for compositions of losses
    aux: Any
    state: State
    slope: Tensor | None = None  # dh/d delta, detached; the mean over the samples where they share delta
    residual: Tensor | None = None  # of the linear solve, one per row, where the solver knows it


Problem = Callable[[Tensor], Terms]


def terms_of(found: Any) -> Terms:
    """What a problem returned; a plain pair will do."""
    if isinstance(found, tuple) and 1 <= len(found) <= 3 and isinstance(found[0], Tensor):
        return Terms(*found)
    raise TypeError(f"problem must return Terms(outer, inner), got {type(found).__name__}")


def check_inner(inner: Tensor, count: int) -> None:
    if inner.shape != (count,):
        raise ValueError(
            f"inner must hold one h_i per sample, ({count},), got shape {tuple(inner.shape)}: return the values before "
            "they are averaged"
        )


def check_terms(terms: Terms, delta: Tensor, shared: bool) -> None:
    """The shapes that make a problem one value per sample, or a sentence that says which is not."""
    outer, inner, _ = terms
    samples = "(B,) or (B, m)" if shared else f"({len(delta)},) or ({len(delta)}, m), one row per row of delta"
    if not 1 <= outer.dim() <= 2 or not (shared or len(outer) == len(delta)):
        raise ValueError(
            f"outer must hold one g_i per sample, {samples}, got shape {tuple(outer.shape)}: return the values before "
            "they are averaged"
        )
    if inner is not None:
        check_inner(inner, len(outer))


def inner_values(terms: Terms) -> Tensor:
    """h_i, written out where it is -g_i."""
    if terms.inner is None and terms.outer.dim() == 2:
        raise ValueError(
            "inner=None stands for -g, and g is a vector here: return h_i, one number per sample, as inner"
        )
    return -terms.outer if terms.inner is None else terms.inner


def check_inside(constraint: Constraint, rows: Tensor) -> None:
    shift = flat(rows - constraint.project(rows)).abs().amax(1)
    outside = ~(shift <= 1e-5 * (1 + flat(rows).abs().amax(1)))
    if outside.any():
        raise ValueError(
            f"delta lies outside the constraint in {int(outside.sum())} of {len(rows)} rows, by up to "
            f"{shift.max().item():.1e}: pass constraint.project(delta)"
        )


def cid(
    problem: Problem,
    delta: Tensor,
    composition: Composition,
    state: State,
    solve: Solver | None = None,
    *,
    constraint: Constraint | None = None,
    shared: bool = False,
    gather: Callable[[Tensor], Tensor] = identity,
    previous: Tensor | None = None,
) -> Direction:
    """One estimate at the inner solution delta; `problem` is called once. Without `solve` there is no implicit term.

    delta is (B, ...), or of any shape if `shared`. Where `constraint` binds, the system is solved on its face. `gather`
    concatenates the rows of all processes. `previous`: g_i of the same samples at the previous theta, for STORM.
    """
    delta = delta.detach().requires_grad_(solve is not None)
    terms = terms_of(problem(delta))
    check_terms(terms, delta, shared)
    outer, inner, aux = terms
    values = outer.detach()
    cotangents, state = composition.update(
        values, gather(values), state, None if previous is None else gather(previous.detach())
    )
    composed = flat(cotangents * outer).sum(1)
    scalar = composed.mean()
    if solve is None:
        return Direction(scalar, values, cotangents.detach(), aux, state)
    h = inner_values(terms)
    if shared:
        b, slope = _gradients(composed.mean(), h.mean(), delta)
    elif inner is not None:
        b, slope = _gradients(composed.sum(), h.sum(), delta)
    else:  # zero-sum: one backward pass serves both gradients, c_i being constant
        (slope,) = torch.autograd.grad(outer.sum(), delta, create_graph=True, materialize_grads=True)
        b, slope = cotangents.view(-1, *[1] * (delta.dim() - 1)) * slope.detach(), -slope

    def rows(numbers: Tensor) -> Tensor:
        """As one row per system, the same on all processes."""
        return pooled(gather(numbers[None])) if shared else numbers

    def matvec(v: Tensor) -> Tensor:
        if not slope.requires_grad:  # h is linear in delta
            return torch.zeros_like(v)
        v = v[0] if shared else v
        return rows(torch.autograd.grad(slope, delta, v, retain_graph=True, materialize_grads=True)[0].detach())

    pooled_slope, b = rows(slope.detach()), rows(b)
    product: MatVec = matvec
    if constraint is not None:
        here = rows(delta.detach())
        check_inside(constraint, here)
        face = constraint.face(here, pooled_slope)
        product, b = face.restrict(matvec), face.tangent(b)
    v, residual = solve(product, b)
    correction = (slope * v.detach().view_as(slope)).sum()
    scalar = scalar - (correction if shared else correction / len(values))
    return Direction(scalar, values, cotangents.detach(), aux, state, pooled_slope, residual)


def _gradients(composed: Tensor, inner: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Of the composed outer values, detached, and of the inner ones, to be differentiated again."""
    (b,) = torch.autograd.grad(composed, delta, retain_graph=True, materialize_grads=True)
    (slope,) = torch.autograd.grad(inner, delta, create_graph=True, materialize_grads=True)
    return b.detach(), slope

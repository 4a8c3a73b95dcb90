"""Compositional implicit differentiation: lines 8-12 of Algorithm 1, as the gradient of one surrogate loss.

Let c_i be the cotangents of the composition and v_i the solution of (d2 h_i / d delta2) v_i = d(c_i . g_i) / d delta,
both held constant. Then the gradient in theta of the surrogate loss

    S(theta) = mean_i [ c_i . g_i(theta, delta_i) - < dh_i/d delta (theta, delta_i), v_i > ]

is the CID estimate, so that one ordinary `backward()` and any optimizer will do. A delta that all samples share is a
single row: h, c . g and their derivatives are then means over the samples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.arguments import check_arguments, check_rows, show
from doubly.bilevel.composition import Composition, State
from doubly.bilevel.constraints import Constraint
from doubly.bilevel.inner import identity
from doubly.bilevel.linear_solve import MatVec, Solver
from doubly.bilevel.rows import flat, mean_row, per_row

AllGather = Callable[[Tensor], Tensor]


class Terms(NamedTuple):
    """The values of the problem at delta, one per sample.

    Attributes:
        outer: Outer values g_i, (B,) or (B, m).
        inner: Inner values h_i, (B,), at least the part of them that depends on theta; None stands for -g_i.
        aux: Anything else; it is passed on to `Direction.aux`.
    """

    outer: Tensor
    inner: Tensor | None = None
    aux: Any = None


class Direction(NamedTuple):
    """A CID estimate: `loss.backward()` adds the estimate of the gradient of F to theta.

    Attributes:
        loss: The surrogate loss, (). Its gradient is the estimate; its value is not F.
        values: g_i, (B,) or (B, m), detached.
        cotangents: c_i, of the shape of `values`, detached; for compositions of losses these are the sample weights.
        aux: What the problem returned as `Terms.aux`.
        state: The state of the composition, to be passed to the next call.
        slope: dh_i/d delta, (B, ...), detached; a single row, the mean over the samples, if they share delta. None
            without a linear solve.
        residual: Relative residual of each linear system, (B,); None if the solver does not report it.
    """

    loss: Tensor
    values: Tensor
    cotangents: Tensor
    aux: Any
    state: State
    slope: Tensor | None = None
    residual: Tensor | None = None


Problem = Callable[[Tensor], Terms]


def as_terms(returned: Any) -> Terms:
    """Return what a problem returned as `Terms`.

    Args:
        returned: Terms, or a plain tuple (outer, inner).

    Raises:
        TypeError: If it is anything else.
    """
    if isinstance(returned, tuple) and 1 <= len(returned) <= 3 and isinstance(returned[0], Tensor):
        return Terms(*returned)
    raise TypeError(
        f"problem must return Terms(outer, inner), got {type(returned).__name__}: return tensors, one value per sample"
    )


def check_inner(inner: Tensor, count: int) -> None:
    """Raise an error unless `inner` holds one value for each of `count` samples."""
    if not isinstance(inner, Tensor) or inner.dim():  # else the shape is refused below
        check_rows(inner, "inner", allow_empty=True)
    if inner.shape != (count,):
        raise ValueError(
            f"inner must hold one h_i per sample, ({count},), got shape {tuple(inner.shape)}: return the values before "
            "they are averaged"
        )


def check_terms(terms: Terms, delta: Tensor, shared: bool) -> None:
    """Raise an error unless the terms hold one outer and one inner value per sample."""
    outer, inner, _ = terms
    if outer.dim():  # else the shape is refused below
        check_rows(outer, "outer", allow_empty=True)
    expected = "(B,) or (B, m)" if shared else f"({len(delta)},) or ({len(delta)}, m), one row per row of delta"
    if not 1 <= outer.dim() <= 2 or not (shared or len(outer) == len(delta)):
        raise ValueError(
            f"outer must hold one g_i per sample, {expected}, got shape {tuple(outer.shape)}: return the values before "
            "they are averaged"
        )
    if inner is not None:
        check_inner(inner, len(outer))


def inner_values(terms: Terms) -> Tensor:
    """Return h_i, (B,), where `inner=None` stands for -g_i."""
    if terms.inner is None and terms.outer.dim() == 2:
        raise ValueError(
            "inner=None stands for -g, and g is a vector here: return h_i, one number per sample, as inner"
        )
    return -terms.outer if terms.inner is None else terms.inner


def check_estimate(problem: Problem, delta: Tensor, composition: Composition, state: State) -> None:
    """Check the kinds of what every estimate takes.

    Raises:
        TypeError: If one of them is something else.
        ValueError: If delta has no values.
    """
    given = {"problem": problem, "composition": composition, "state": state}
    check_arguments(check_estimate, given)
    if not isinstance(delta, Tensor) or not delta.is_floating_point() or delta.layout is not torch.strided:
        raise TypeError(f"delta must be a dense floating-point tensor, got {show(delta)}: pass the inner solutions")
    if not delta.numel() or delta.is_meta:
        raise ValueError(f"delta must hold at least one value, got {show(delta)}: pass the inner solutions")


def check_inside(constraint: Constraint, rows: Tensor) -> None:
    """Raise a ValueError if a row lies outside its set by more than rounding."""
    distance = flat(rows - constraint.project(rows)).abs().amax(1)
    outside = ~(distance <= 1e-5 * (1 + flat(rows).abs().amax(1)))
    if outside.any():
        raise ValueError(
            f"delta lies outside the constraint in {int(outside.sum())} of {len(rows)} rows, by up to "
            f"{distance.max().item():.1e}: pass constraint.project(delta)"
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
    all_gather: AllGather = identity,
    previous: Tensor | None = None,
) -> Direction:
    """Estimate the gradient of F(theta) = f(mean_i g_i(theta, delta_i*(theta))) at given inner solutions.

    Args:
        problem: Function delta -> Terms of theta and the data of this batch; it is called once.
        delta: The inner solutions delta_i*, (B, ...); with `shared` one variable of any shape.
        composition: The outer function f and its estimate of the mean of g.
        state: `Direction.state` of the previous call, or {} for the first.
        solve: Solver of the linear systems; None leaves the implicit term out.
        constraint: The set of each delta_i. Where it binds, the system is solved on the face on which delta_i lies.
            None takes every delta_i to be in the interior.
        shared: Whether all samples share one delta.
        all_gather: Concatenates the rows of all processes. It is called once, on the values g_i, unless `shared` or
            `previous` is given; so it may also return the values of a larger batch of which these are a part, such as
            the whole batch of which the problem computes one microbatch.
        previous: g_i of the same samples at the previous theta, for STORM.

    Returns:
        The direction; call `direction.loss.backward()`.

    Raises:
        TypeError: If `problem` does not return `Terms`.
        ValueError: If values are not per sample, delta lies outside its constraint, or a solver refuses the system.
    """
    check_estimate(problem, delta, composition, state)
    check_arguments(cid, {"solve": solve, "all_gather": all_gather, "previous": previous})
    if constraint is not None and not (hasattr(constraint, "project") and hasattr(constraint, "face")):
        raise TypeError(
            f"constraint must have project and face, got {show(constraint)}: pass a Box, a Ball, …, or None"
        )
    delta = delta.detach().requires_grad_(solve is not None)
    terms = as_terms(problem(delta))
    check_terms(terms, delta, shared)
    values = terms.outer.detach()
    all_values = all_gather(values)
    all_previous = None if previous is None else all_gather(previous.detach())
    cotangents, state = composition.update(values, all_values, state, all_previous)
    composed = flat(cotangents * terms.outer).sum(1)
    loss = composed.mean()
    if solve is None:
        return Direction(loss, values, cotangents.detach(), terms.aux, state)
    b, slope = _gradients(terms, cotangents, composed, delta, shared)

    def system_rows(gradient: Tensor) -> Tensor:
        """Return one row per linear system; a shared system is the mean over the processes."""
        return mean_row(all_gather(gradient[None])) if shared else gradient

    def hessian_product(v: Tensor) -> Tensor:
        if not slope.requires_grad:  # h is linear in delta
            return torch.zeros_like(v)
        v = v[0] if shared else v
        return system_rows(torch.autograd.grad(slope, delta, v, retain_graph=True, materialize_grads=True)[0].detach())

    slope_rows, b = system_rows(slope.detach()), system_rows(b)
    matvec: MatVec = hessian_product
    if constraint is not None:
        delta_rows = system_rows(delta.detach())
        check_inside(constraint, delta_rows)
        face = constraint.face(delta_rows, slope_rows)
        matvec, b = face.restrict(hessian_product), face.tangent(b)
    v, residual = solve(matvec, b)
    implicit = (slope * v.detach().view_as(slope)).sum()
    loss = loss - (implicit if shared else implicit / len(values))
    return Direction(loss, values, cotangents.detach(), terms.aux, state, slope_rows, residual)


def _gradients(
    terms: Terms, cotangents: Tensor, composed: Tensor, delta: Tensor, shared: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients in delta of c . g, detached, and of h, which can be differentiated again."""
    h = inner_values(terms)
    if not (h.requires_grad and terms.outer.requires_grad):
        raise ValueError(
            "outer and inner do not depend on theta or delta: compute them with gradients, from the delta given"
        )
    if terms.inner is None and not shared:  # h = -g and c is constant, so one backward pass gives both
        (slope,) = torch.autograd.grad(terms.outer.sum(), delta, create_graph=True, materialize_grads=True)
        return per_row(cotangents, delta) * slope.detach(), -slope
    outer, inner = (composed.mean(), h.mean()) if shared else (composed.sum(), h.sum())
    (b,) = torch.autograd.grad(outer, delta, retain_graph=True, materialize_grads=True)
    (slope,) = torch.autograd.grad(inner, delta, create_graph=True, materialize_grads=True)
    return b.detach(), slope

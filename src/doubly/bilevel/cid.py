"""Compositional implicit differentiation: Algorithm 1, lines 8-12, as the gradient of one scalar.

With c_i the cotangents of the composition and v_i the solution of (d2 h_i / d delta2) v_i = d(c_i . g_i) / d delta,
both constants,

    S(theta) = mean_i [ c_i . g_i(theta, delta_i) - < dh_i/d delta (theta, delta_i), v_i > ]

has the compositional implicit estimate as its theta-gradient. So one ordinary `backward()` and any optimiser will do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.composition import Composition, State
from doubly.bilevel.linear_solve import Solver


class Terms(NamedTuple):
    """The problem at delta. `inner` is the part of h_i that depends on theta; None means that this part is -g_i."""

    outer: Tensor  # g_i, (B,) or (B, m)
    inner: Tensor | None = None  # h_i, (B,)
    aux: Any = None  # handed through


class Direction(NamedTuple):
    """`scalar.backward()` gives the estimate of the gradient of F."""

    scalar: Tensor  # ()
    values: Tensor  # g_i, detached
    cotangents: Tensor  # c_i, detached; the weights, for LogMeanExp
    aux: Any
    state: State


Problem = Callable[[Tensor], Terms]


def identity(values: Tensor) -> Tensor:
    return values


def cid(
    problem: Problem,
    delta: Tensor,
    composition: Composition,
    state: State,
    solve: Solver | None = None,
    gather: Callable[[Tensor], Tensor] = identity,
) -> Direction:
    """One estimate at the inner solution delta; `problem` is called once. Without `solve` there is no implicit term."""
    delta = delta.detach().requires_grad_(solve is not None)
    outer, inner, aux = problem(delta)
    values = outer.detach()
    cotangents, state = composition.update(values, gather(values), state)
    composed = (cotangents * outer).flatten(1).sum(1) if outer.dim() > 1 else cotangents * outer
    scalar = composed.mean()
    if solve is not None:
        if inner is None:  # zero-sum: one backward pass serves both gradients, c_i being constant
            (slope,) = torch.autograd.grad(outer.sum(), delta, create_graph=True)
            b, slope = cotangents.view(-1, *[1] * (delta.dim() - 1)) * slope.detach(), -slope
        else:
            (b,) = torch.autograd.grad(composed.sum(), delta, retain_graph=True)
            (slope,) = torch.autograd.grad(inner.sum(), delta, create_graph=True)

        def matvec(v: Tensor) -> Tensor:
            return torch.autograd.grad(slope, delta, v, retain_graph=True, materialize_grads=True)[0].detach()

        v = solve(matvec, b).detach()
        scalar = scalar - (slope * v).flatten(1).sum(1).mean()
    return Direction(scalar, values, cotangents.detach(), aux, state)

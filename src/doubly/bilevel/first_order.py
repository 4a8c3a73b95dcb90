"""The implicit term of a zero-sum problem (h_i = -g_i + barrier) without a double backward.

With v_i = (C_i + damping)^-1 dg_i/d delta, the mixed derivative along v is a difference quotient of theta-gradients:

    [ grad_theta mean c_i g_i(delta + t v) - grad_theta mean c_i g_i(delta) ] / t .

t is small (t max|v| = `span`): ReLU networks change their piece within a full v.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from doubly.bilevel.cid import Direction, Problem, identity
from doubly.bilevel.composition import Composition, State


class _WithGradient(torch.autograd.Function):
    """A number whose gradient is known already; `backward()` only hands it on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [upstream[0] * gradient for gradient in ctx.saved_tensors]
        return None, None, *gradients, *[None] * len(gradients)


def cid_first_order(
    problem: Problem,
    shifted: Problem,
    delta: Tensor,
    composition: Composition,
    state: State,
    inverse_curvature: Tensor,
    parameters: Iterable[Tensor],
    gather: Callable[[Tensor], Tensor] = identity,
    span: float = 1e-4,
) -> Direction:
    """As `cid` with a `Diagonal` solve, for two plain passes: `problem` at delta and `shifted` beside it.

    `shifted` is the same function without side effects. The gradient reaches `parameters` and nothing else.
    """
    parameters = [p for p in parameters if p.requires_grad]
    delta = delta.detach().requires_grad_()
    outer, _, aux = problem(delta)
    values = outer.detach()
    weights, state = composition.update(values, gather(values), state)
    slope, *here = torch.autograd.grad((weights * outer).sum(), [delta, *parameters], allow_unused=True)
    with torch.no_grad():
        column = weights.view(-1, *[1] * (delta.dim() - 1))
        # The slope carries the weight; a sample of weight 0 adds nothing, so its direction is free.
        v = torch.where(column > 0, inverse_curvature * slope / column, 0)
        longest = gather(v.abs().amax()[None]).amax().clamp_min(torch.finfo(delta.dtype).tiny)
    there = torch.autograd.grad(
        (weights * shifted(delta.detach() + span / longest * v).outer).sum(), parameters, allow_unused=True
    )
    count = len(values)
    gradients = [
        torch.zeros_like(p) if a is None or b is None else (a + (b - a) * (longest / span)) / count
        for p, a, b in zip(parameters, here, there, strict=True)
    ]
    scalar = _WithGradient.apply((weights * values).mean(), len(parameters), *parameters, *gradients)  # type: ignore[no-untyped-call]
    return Direction(scalar, values, weights, aux, state)

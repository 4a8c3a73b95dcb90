"""The implicit term of a zero-sum problem (h_i = -g_i + barrier) without a double backward.

With v_i = (C_i + damping)^-1 dg_i/d delta, the mixed derivative along v is a difference quotient of theta-gradients:

    [ grad_theta mean c_i g_i(delta + t v) - grad_theta mean c_i g_i(delta) ] / t .

t is small (t max|v| = `span`): ReLU networks change their piece within a full v.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from doubly.bilevel.cid import Direction, Problem
from doubly.bilevel.composition import Composition, State
from doubly.bilevel.inner import identity


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


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


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
    limit: float = 1.0,
    mean: Callable[[Sequence[Tensor]], Sequence[Tensor]] = identity,
) -> Direction:
    """As `cid` with a `Diagonal` solve, for two plain passes: `problem` at delta and `shifted` beside it.

    `shifted` is the same function without side effects. The gradient reaches `parameters` and nothing else; the term's
    length is bounded by `limit` times that of the gradient without it. `mean` averages over all processes.
    """
    parameters = [p for p in parameters if p.requires_grad]
    delta = delta.detach().requires_grad_()
    outer, _, aux = problem(delta)
    values = outer.detach()
    everyone = gather(values)
    all_weights, _ = composition.update(everyone, everyone, state)
    weights, state = composition.update(values, everyone, state)
    slope, *here = torch.autograd.grad((weights * outer).sum(), [delta, *parameters], allow_unused=True)
    with torch.no_grad():
        # The slope carries the weight, so it is divided by it. Batch norm adds to it what the sample does to others, by
        # their weights; far below the mean weight that is all there is, so v fades out there, where it adds little.
        floor = (0.3 * all_weights.mean()).clamp_min(torch.finfo(delta.dtype).tiny)
        faded = weights / weights.abs().clamp_min(floor).square()
        v = inverse_curvature * slope * faded.view(-1, *[1] * (delta.dim() - 1))
        longest = gather(v.abs().amax()[None]).amax().clamp_min(torch.finfo(delta.dtype).tiny)
    there = torch.autograd.grad(
        (weights * shifted(delta.detach() + span / longest * v).outer).sum(), parameters, allow_unused=True
    )
    plain = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, here, strict=True)]
    quotients = [g if h is None else (h - g) * (longest / span) for g, h in zip(plain, there, strict=True)]
    averages = mean([part / len(values) for part in (*plain, *quotients)])
    plain, quotients = list(averages[: len(plain)]), list(averages[len(plain) :])
    # A kink of the network between the two points makes the quotient arbitrarily long; the term itself is a fraction.
    shrink = (limit * _norm(plain) / _norm(quotients).clamp_min(torch.finfo(delta.dtype).tiny)).clamp_max(1)
    gradients = [g + shrink * q for g, q in zip(plain, quotients, strict=True)]
    scalar = _WithGradient.apply((weights * values).mean(), len(parameters), *parameters, *gradients)  # type: ignore[no-untyped-call]
    return Direction(scalar, values, weights, aux, state)

"""The implicit term of a zero-sum problem (h_i = -g_i + barrier) without a double backward pass.

With v_i = (C_i + damping)^-1 dg_i/d delta, the mixed derivative along v is a difference quotient of gradients in theta:

    [ grad_theta mean c_i g_i(delta + t v) - grad_theta mean c_i g_i(delta) ] / t .

t is small, such that t max|v| = `span`, because ReLU networks change their linear piece within a full v.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.arguments import check_arguments, check_rows, show
from doubly.bilevel.cid import AllGather, Direction, Problem, Terms, as_terms, check_estimate, check_terms
from doubly.bilevel.composition import Composition, State
from doubly.bilevel.inner import identity
from doubly.bilevel.rows import per_row

Mean = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Gradients = Sequence[Tensor | None]  # one per parameter; None where the parameter is not used


class Part(NamedTuple):
    """One microbatch of a batch.

    Attributes:
        problem: Function delta -> Terms of the samples of this part.
        shifted: The same function without side effects, such as the running statistics of batch norm.
        delta: Inner solutions of these samples, (B, ...).
        inverse_curvature: Inverse of the diagonal curvature C_i + damping, (B, ...).
    """

    problem: Problem
    shifted: Problem
    delta: Tensor
    inverse_curvature: Tensor


class _InjectGradient(torch.autograd.Function):
    """A number with gradients that are already known: `backward()` passes them on to the parameters."""

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
    all_gather: AllGather = identity,
    span: float = 1e-4,
    limit: float = 1.0,
    mean: Mean = identity,
) -> Direction:
    """Estimate the gradient of F for a zero-sum problem by two forward and backward passes.

    It approximates `cid` with a `Diagonal` solve.

    Args:
        problem: Function delta -> Terms of theta and the data of this batch; it is called once, at delta.
        shifted: The same function without side effects; it is called once, near delta.
        delta: Inner solutions, (B, ...).
        composition: The outer function f and its estimate of the mean of g.
        state: `Direction.state` of the previous call, or {} for the first.
        inverse_curvature: Inverse of the diagonal curvature C_i + damping, (B, ...).
        parameters: Tensors of theta; the gradient reaches those that require gradients, and nothing else.
        all_gather: Concatenates the rows of all processes.
        span: Largest coordinate of the shift from delta.
        limit: Bound of the length of the implicit term, relative to that of the gradient without it.
        mean: Averages each of several tensors over all processes.

    Returns:
        The direction, without slope and residual; its loss cannot be differentiated twice.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the values are not one loss per sample, (B,), and the composition needs losses.
    """
    part = Part(problem, shifted, delta, inverse_curvature)
    return cid_first_order_parts([part], composition, state, parameters, all_gather, mean, span, limit)


def cid_first_order_parts(
    parts: Sequence[Part],
    composition: Composition,
    state: State,
    parameters: Iterable[Tensor],
    all_gather: AllGather = identity,
    mean: Mean = identity,
    span: float = 1e-4,
    limit: float = 1.0,
) -> Direction:
    """Estimate the gradient of F as `cid_first_order` does, for a batch that is split into microbatches.

    The result is that of the whole batch: the weights follow from the values of all parts, and the implicit term is
    bounded once. Only one part has a graph at a time, and gradients are summed up as they are computed. With several
    parts an additional pass computes the values first, by `shifted`.

    Args:
        parts: The microbatches, in the order of their samples.
        composition: The outer function f and its estimate of the mean of g.
        state: `Direction.state` of the previous call, or {} for the first.
        parameters: Tensors of theta; the gradient reaches those that require gradients, and nothing else.
        all_gather: Concatenates the rows of all processes.
        mean: Averages each of several tensors over all processes, each of which has equally many samples.
        span: Largest coordinate of the shift from delta.
        limit: Bound of the length of the implicit term, relative to that of the gradient without it.

    Returns:
        The direction, without slope and residual. Values, cotangents and aux are those of all parts in order: tensors
        are concatenated, and any other aux is a list with one entry per part.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If there is no part, or the values are not one loss per sample, (B,), and the composition needs
            losses.
    """
    _check_parts(parts, composition, state)
    check_arguments(cid_first_order_parts, {"all_gather": all_gather, "mean": mean, "span": span, "limit": limit})
    parameters = _trained(parameters)
    deltas = [part.delta.detach().requires_grad_() for part in parts]
    single = _terms(parts[0].problem, deltas[0]) if len(parts) == 1 else None  # needs no pass for the values alone
    values = _values(parts) if single is None else single.outer.detach()
    all_values = all_gather(values)
    all_weights, _ = composition.update(all_values, all_values, state)
    weights, state = composition.update(values, all_values, state)
    part_weights = torch.split(weights, [len(delta) for delta in deltas])
    tiny = torch.finfo(deltas[0].dtype).tiny
    floor = (0.3 * all_weights.mean()).clamp_min(tiny)

    at_delta: Gradients = [None] * len(parameters)
    terms, v = [], []
    for part, delta, weight in zip(parts, deltas, part_weights, strict=True):
        outer, _, aux = _terms(part.problem, delta) if single is None else single
        slope, *gradients = torch.autograd.grad((weight * outer).sum(), [delta, *parameters], allow_unused=True)
        at_delta = _add(at_delta, gradients)
        v.append(_solve_diagonal(part.inverse_curvature, slope, weight, floor))
        terms.append(Terms(outer.detach(), aux=aux))
    longest = all_gather(torch.stack([direction.abs().amax() for direction in v]).amax()[None]).amax().clamp_min(tiny)

    at_shifted: Gradients = [None] * len(parameters)
    for part, delta, weight, direction in zip(parts, deltas, part_weights, v, strict=True):
        outer = _terms(part.shifted, delta.detach() + span / longest * direction).outer
        at_shifted = _add(at_shifted, torch.autograd.grad((weight * outer).sum(), parameters, allow_unused=True))

    plain = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, at_delta, strict=True)]
    quotients = [g if h is None else (h - g) * (longest / span) for g, h in zip(plain, at_shifted, strict=True)]
    averages = mean([total / len(values) for total in (*plain, *quotients)])
    gradients = _add_bounded(averages[: len(plain)], averages[len(plain) :], limit)
    values = _concatenate([part_terms.outer for part_terms in terms])
    loss = _InjectGradient.apply((weights * values).mean(), len(parameters), *parameters, *gradients)  # type: ignore[no-untyped-call]
    return Direction(loss, values, weights, _concatenate([part_terms.aux for part_terms in terms]), state)


@torch.no_grad()
def _values(parts: Sequence[Part]) -> Tensor:
    """Return g_i of all parts, without side effects, (B,)."""
    return torch.cat([_terms(part.shifted, part.delta.detach()).outer for part in parts])


def _check_parts(parts: Sequence[Part], composition: Composition, state: State) -> None:
    """Refuse parts that are none."""
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Part) for part in parts):
        raise TypeError(f"parts must be a list of Part, got {show(parts)}: pass the whole batch as one Part")
    if not parts:
        raise ValueError("parts must hold at least one microbatch: pass the whole batch as one Part")
    for part in parts:
        check_estimate(part.problem, part.delta, composition, state)
        check_arguments(Part, {"shifted": part.shifted})
        curvature = part.inverse_curvature
        check_rows(curvature, "inverse_curvature", allow_empty=True)
        if curvature.shape != part.delta.shape:
            raise ValueError(
                f"inverse_curvature must have the shape of delta, {tuple(part.delta.shape)}, got {show(curvature)}"
            )


def _trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors of theta that require gradients."""
    if not isinstance(parameters, Iterable) or isinstance(parameters, Tensor | str):
        raise TypeError(f"parameters must be a list of tensors, got {show(parameters)}: pass model.parameters()")
    tensors = list(parameters)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError("parameters must be tensors, and some are not: pass model.parameters()")
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if not trained:
        raise ValueError("none of the parameters requires a gradient: there is nothing to differentiate")
    return trained


def _terms(problem: Problem, delta: Tensor) -> Terms:
    """Return the terms of a problem, once they are known to fit delta."""
    terms = as_terms(problem(delta))
    check_terms(terms, delta, shared=False)
    if torch.is_grad_enabled() and not terms.outer.requires_grad:
        raise ValueError("outer does not depend on theta and delta: compute it from the delta given, with gradients")
    return terms


@torch.no_grad()
def _solve_diagonal(inverse_curvature: Tensor, slope: Tensor, weights: Tensor, floor: Tensor) -> Tensor:
    """Return v_i = inverse_curvature * dg_i/d delta, where `slope` is that gradient times the weight of the sample.

    So the slope is divided by the weight. Batch norm adds to the slope what the sample does to others, by their
    weights; far below the mean weight there is nothing else in it. v therefore fades out for weights below `floor`,
    where the sample adds little to the implicit term.
    """
    inverse_weights = weights / weights.abs().clamp_min(floor).square()
    return inverse_curvature * slope * per_row(inverse_weights, slope)


def _add(totals: Gradients, gradients: Gradients) -> Gradients:
    """Return the sums, where None stands for 0."""
    pairs = zip(totals, gradients, strict=True)
    return [gradient if total is None else total if gradient is None else total + gradient for total, gradient in pairs]


def _add_bounded(plain: Sequence[Tensor], term: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Return plain + term, where the term is shrunk to at most `limit` times the length of plain.

    A kink of the network between the two points makes the quotient arbitrarily long; the term itself is a fraction.
    """
    tiny = torch.finfo(term[0].dtype).tiny
    shrink = (limit * _norm(plain) / _norm(term).clamp_min(tiny)).clamp_max(1)
    return [g + shrink * q for g, q in zip(plain, term, strict=True)]


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors together, ()."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def _concatenate(entries: list[Any]) -> Any:
    """Return the entry of a single part as it is; concatenate tensors, and leave anything else as a list."""
    if len(entries) == 1:
        return entries[0]
    return torch.cat(entries) if all(isinstance(entry, Tensor) for entry in entries) else entries

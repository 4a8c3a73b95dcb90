"""Algorithm 1 whole: min over theta of f( mean_i g_i(theta, delta_i*(theta)) ), for any problem.

A step solves the inner problems of one batch, takes the CID estimate there and hands it to a torch optimizer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.bar import Bar
from doubly.bilevel.batches import batches
from doubly.bilevel.cid import Direction, Terms, check_inside
from doubly.bilevel.composition import Composition, RunningMean, State
from doubly.bilevel.inner import Constraint
from doubly.bilevel.leaves import leaves_of, trained
from doubly.bilevel.levels import Alone, Descent, Here, Levels, Processes
from doubly.bilevel.linear_solve import ConjugateGradient, Solver
from doubly.bilevel.whole_space import WholeSpace

Schedule = Callable[[int], float]  # of the step


class Step(NamedTuple):
    """What a callback is told, once theta has moved."""

    number: int  # from 0
    theta: Any
    delta: Tensor  # of this batch
    direction: Direction
    record: dict[str, float]  # the step's line of the history


class Result(NamedTuple):
    theta: Any  # the one that was given, changed in place
    delta: Tensor
    u: Tensor  # the running estimate, as the composition keeps it
    history: dict[str, Tensor]  # value, gradient, gap, residual, step_size, eta: one number per step
    state: State  # hand it to the next call to go on from here


def minimize(
    problem: Callable[[Any, Tensor, Any], Terms],
    theta: Any,
    delta: Tensor,
    data: Any = None,
    *,
    optimizer: torch.optim.Optimizer | Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    batch_size: int | None = None,
    composition: Composition = RunningMean(),
    constraint: Constraint | Callable[[Any], Constraint] = WholeSpace(),
    descent: Descent = Descent(),
    solve: Solver | None = ConjugateGradient(),
    inner: Callable[[Any, Tensor, Any], Tensor] | None = None,
    shared: bool = False,
    warm_start: bool = True,
    step_size: Schedule | None = None,
    eta: Schedule | None = None,
    storm: bool = False,
    state: State | None = None,
    callback: Callable[[Step], bool | None] | None = None,
    progress: bool = False,
    seed: int = 0,
    processes: Processes = Alone(),
) -> Result:
    """Algorithm 1 for `steps` steps, or until `callback` returns True. theta is changed in place.

    problem      (theta, delta, batch) -> Terms: g_i and h_i of the batch, one per sample
    theta        a module, a tensor, or a list or dict of tensors
    delta        the start: one row per row of `data`; with `shared`, one variable of any shape
    data         tensors of equally many rows (one, a tuple or a dict of them), cut to batches of `batch_size` and
                 reshuffled each epoch; or an iterable of batches, each with fresh rows of delta; or None
    optimizer    a torch optimizer of theta, or what makes one: partial(torch.optim.SGD, lr=0.1)
    composition  f and how u is estimated; the plain mean of g by default
    constraint   V_i, or a function that makes it for a batch
    solve        of the linear system; None leaves the implicit term out. It warns once; the history has all residuals
    inner        h_i alone, where that is cheaper than the whole problem
    warm_start   from a sample's last delta; without it each solve starts from the delta given
    step_size    beta_t, and eta: eta_t, as functions of the step; else as the optimizer and the composition have them
    storm        correct u by what the last step of theta did to this batch, for a second inner solve
    """
    leaves = leaves_of(theta)
    levels = Levels(problem, inner, theta, leaves, descent, solve, shared, processes)
    rank, size = processes.world()
    latest, state, lines = delta.detach().clone(), dict(state or {}), []
    before: list[Tensor] | None = None
    unsolved = False
    _check_kinds(composition, constraint)
    with trained(leaves), Bar(steps, progress and rank == 0) as bar:
        used = _optimizer(optimizer, leaves)
        stream = batches(data, None if shared else len(delta), batch_size, seed, rank, size)
        for number, (ids, batch) in zip(range(steps), stream, strict=False):
            if step_size is not None:
                for group in used.param_groups:
                    group["lr"] = step_size(number)
            composed = composition if eta is None else replace(composition, eta=eta(number))  # type: ignore[type-var]
            known = latest if warm_start and (shared or ids is not None) else delta.detach()
            here = Here(
                batch,
                known if shared or ids is None else known[ids.view(size, -1)[rank].to(known.device)],
                constraint if isinstance(constraint, Constraint) else constraint(batch),
                composed,
                state,
            )
            if number == 0:
                check_inside(here.constraint, here.start[None] if shared else here.start)
            previous = None if before is None else levels.outer_at(before, here)
            before = [leaf.detach().clone() for leaf in leaves] if storm else None
            found = levels.guarded(number, unsolved, used, here, previous)
            unsolved = unsolved or _missed(found.direction.residual, solve)
            state = found.direction.state
            if shared or ids is None:
                latest = found.delta
            else:
                latest[ids.to(latest.device)] = processes.gather(found.delta)
            lines.append(levels.line(found, here, used))
            bar.show(number + 1, lines[-1])
            if callback and callback(Step(number, theta, found.delta, found.direction, lines[-1])):
                break
    if not lines:
        raise ValueError("nothing was done: steps must be positive, and data must hold a batch")
    history = {name: torch.tensor([line[name] for line in lines], dtype=torch.float64) for name in lines[0]}
    return Result(theta, latest, composition.estimate(state), history, state)


def _missed(residual: Tensor | None, solve: Solver | None) -> bool:
    tolerance = getattr(solve, "tolerance", None)
    return residual is not None and tolerance is not None and not bool((residual <= tolerance).all())


def _check_kinds(composition: Any, constraint: Any) -> None:
    """Two slips that torch would answer with something else."""
    if not hasattr(composition, "update"):
        raise TypeError(
            f"composition must be one of doubly.bilevel's, got {type(composition).__name__}: RunningMean(f)"
        )
    if isinstance(constraint, type):
        raise TypeError(f"constraint must be a value or a function of the batch: write {constraint.__name__}(…)")


def _optimizer(
    optimizer: torch.optim.Optimizer | Callable[[list[Tensor]], torch.optim.Optimizer], leaves: list[Tensor]
) -> torch.optim.Optimizer:
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(leaves)
    held = {id(tensor) for group in made.param_groups for tensor in group["params"]}
    if not all(id(leaf) in held for leaf in leaves):
        raise ValueError(
            "optimizer does not hold all tensors of theta: make it from them, or pass a function that does"
        )
    return made

"""Algorithm 1 as one function: minimize f(mean_i g_i(theta, delta_i*(theta))) over theta, for any problem."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.arguments import at_step, check_arguments, check_rows, fits, show
from doubly.bilevel.batches import iterate_batches
from doubly.bilevel.cid import Direction, Terms, check_inside
from doubly.bilevel.communicator import Communicator, SingleProcess
from doubly.bilevel.composition import Composition, RunningMean, State
from doubly.bilevel.constraints import Constraint, WholeSpace
from doubly.bilevel.inner import Descent
from doubly.bilevel.linear_solve import ConjugateGradient, Solver
from doubly.bilevel.outer_step import OuterStep, StepInput
from doubly.bilevel.parameters import parameters_of, trainable
from doubly.bilevel.progress_bar import ProgressBar

Schedule = Callable[[int], float]  # of the number of the step
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class Step(NamedTuple):
    """State after one step of `minimize`, as its callback receives it.

    Attributes:
        number: Number of the step, from 0.
        theta: The outer variable, after the step.
        delta: The inner solutions of this batch, at the theta before the step.
        direction: The CID estimate that the optimizer used.
        record: The numbers of this step in the history.
    """

    number: int
    theta: Any
    delta: Tensor
    direction: Direction
    record: dict[str, float]


class Result(NamedTuple):
    """The outcome of `minimize`.

    Attributes:
        theta: The object that was passed in, changed in place.
        delta: The latest inner solution of each sample, or the shared one; that of the last batch if the batches came
            from an iterable.
        u: The running estimate of the mean of g, in the composition's own form.
        history: One number per step for each of value (f of the batch), gradient (length of the estimate), gap (longest
            projected inner gradient), residual (of the linear solve), step_size and eta; float64, NaN where a number
            was not computed.
        state: The state of the composition, to be passed to a further call.
    """

    theta: Any
    delta: Tensor
    u: Tensor
    history: dict[str, Tensor]
    state: State

    def __repr__(self) -> str:
        values, shape = self.history["value"], tuple(self.delta.shape)
        last = ", ".join(f"{name} {self.history[name][-1]:.2g}" for name in ("gradient", "gap", "residual"))
        return f"Result({len(values)} steps, value {values[0]:.6g} -> {values[-1]:.6g}, {last}, delta {shape})"


def minimize(
    problem: Callable[[Any, Tensor, Any], Terms],
    theta: Any,
    delta: Tensor,
    data: Any = None,
    *,
    optimizer: torch.optim.Optimizer | MakeOptimizer,
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
    communicator: Communicator = SingleProcess(),
) -> Result:
    """Minimize `F(theta) = f(mean_i g_i(theta, delta_i*(theta)))`; `delta_i*` minimizes h_i(theta, .) over a set V_i.

    Each step solves the inner problems of one batch, takes the CID estimate there and hands it to a torch optimizer.

    Args:
        problem: Function (theta, delta, batch) -> Terms: g_i and h_i of the batch, one value per sample.
        theta: A module, a tensor, or a list or dict of tensors; changed in place.
        delta: Start of the inner variables, one row per row of `data`; with `shared` one variable of any shape.
        data: Tensors with one row per sample (one, or a tuple or dict of them), which are cut into batches in a new
            order each epoch; an iterable of batches, whose rows of delta all start from `delta`; or None.
        optimizer: A torch optimizer of theta, or a function that makes one: partial(torch.optim.SGD, lr=0.1).
        steps: Number of steps.
        batch_size: Samples in a batch, over all processes; None takes all samples.
        composition: The outer function f and how u is estimated; by default F is the mean of g.
        constraint: The sets V_i, or a function that makes them for a batch.
        descent: The inner solver.
        solve: Solver of the linear systems; None leaves the implicit term out. It warns once if it misses its
            tolerance; the history holds all residuals.
        inner: Function (theta, delta, batch) -> h_i alone, where that is cheaper than the whole problem.
        shared: Whether all samples share one delta.
        warm_start: Whether an inner solve starts from the sample's latest solution; otherwise from `delta`.
        step_size: Learning rate as a function of the step; None leaves it to the optimizer.
        eta: eta of the composition as a function of the step; None leaves it to the composition.
        storm: Correct u by the change of this batch's g in the last step, at the cost of a second inner solve.
        state: `Result.state` of an earlier call, to continue from its estimate u.
        callback: Called after each step; the run ends when it returns True.
        progress: Whether to draw a progress bar on stderr.
        seed: Decides the order of the samples.
        communicator: The processes that work on the problem; each passes the same arguments.

    Returns:
        theta and delta after the last step, the estimate u, and the history.

    Raises:
        TypeError: If an argument is of the wrong kind; the message says of which kind it must be.
        ValueError: If shapes, sizes or settings do not fit; the message says what to change.
        ArithmeticError: If the value, the gradient or an inner gradient is not finite; the message names the step.
    """
    _check_kinds(composition, constraint, delta, optimizer, solve, descent)
    check_arguments(minimize, {name: value for name, value in locals().items() if name not in ("solve", "optimizer")})
    if not shared:
        check_rows(delta, "delta")
    parameters = parameters_of(theta)
    outer_step = OuterStep(problem, inner, theta, parameters, descent, solve, shared, communicator)
    solutions = _InnerSolutions(delta.detach(), shared, warm_start, communicator)
    rank, world_size = communicator.rank, communicator.world_size
    state, warn = dict(state or {}), True
    records: list[dict[str, float]] = []
    previous_theta: list[Tensor] | None = None
    start_gap = 0.0
    with trainable(parameters), ProgressBar(steps, progress and rank == 0) as bar:
        torch_optimizer = _make_optimizer(optimizer, parameters)
        batches = iterate_batches(data, None if shared else len(delta), batch_size, seed, rank, world_size)
        for number, (ids, batch) in zip(range(steps), batches, strict=False):
            if step_size is not None:
                for group in torch_optimizer.param_groups:
                    group["lr"] = at_step(step_size, number, "step_size")
            step = StepInput(
                batch,
                solutions.start(ids),
                constraint if isinstance(constraint, Constraint) else constraint(batch),
                composition if eta is None else replace(composition, eta=at_step(eta, number, "eta")),  # type: ignore[type-var]
                state,
                previous_theta,
            )
            if number == 0:
                check_inside(step.constraint, step.start[None] if shared else step.start)
                start_gap = 0.0 if solve is None else outer_step.start_gap(step)
            theta_values = [parameter.detach().clone() for parameter in parameters] if storm else None
            try:
                output = outer_step.run_numbered(torch_optimizer, step, number, warn)
            except ArithmeticError as error:
                raise ArithmeticError(f"{error}{_hint(start_gap, records)}") from None
            previous_theta, state = theta_values, output.direction.state
            warn = warn and not outer_step.missed_tolerance(output)
            solutions.store(ids, output.delta)
            records.append(outer_step.record(output, step, torch_optimizer))
            bar.draw(number + 1, records[-1])
            if callback and callback(Step(number, theta, output.delta, output.direction, records[-1])):
                break
    if not records:
        raise ValueError("nothing was done: steps must be positive, and data must hold a batch")
    if solve is not None:
        outer_step.warn_if_unsolved(start_gap, records, solutions.latest)
    history = {name: torch.tensor([record[name] for record in records], dtype=torch.float64) for name in records[0]}
    return Result(theta, solutions.latest, composition.estimate(state), history, state)


def _hint(start_gap: float, records: list[dict[str, float]]) -> str:
    """Return what to add to the message about a number that is not finite: whether the inner steps diverged before."""
    if not records or not records[-1]["gap"] > 10 * max(start_gap, records[0]["gap"]):
        return ""
    return (
        f"; before that the inner steps diverged (gap {records[0]['gap']:.1e} in the first step, "
        f"{records[-1]['gap']:.1e} in the last): take smaller ones by "
        "descent=Descent(GradientStep(0.01), steps=100)"
    )


class _InnerSolutions:
    """The latest inner solution of each sample, from which its next inner solve starts if `warm_start`."""

    def __init__(self, delta: Tensor, shared: bool, warm_start: bool, communicator: Communicator) -> None:
        self.first, self.latest = delta, delta.clone()
        self.shared, self.warm_start, self.communicator = shared, warm_start, communicator

    def start(self, ids: Tensor | None) -> Tensor:
        """Return where the inner solve of this process's part of a batch starts.

        Args:
            ids: Rows of the global batch; None for a batch from an iterable, whose rows are not known.
        """
        if self.shared:
            return self.latest if self.warm_start else self.first
        if ids is None:
            return self.first
        rows = self.latest if self.warm_start else self.first
        return rows[ids.view(self.communicator.world_size, -1)[self.communicator.rank].to(rows.device)]

    def store(self, ids: Tensor | None, delta: Tensor) -> None:
        """Keep the inner solutions of this process's part of a batch, and those of the other processes."""
        if self.shared or ids is None:
            self.latest = delta
        else:
            self.latest[ids.to(self.latest.device)] = self.communicator.all_gather(delta)


def _check_kinds(composition: Any, constraint: Any, delta: Any, optimizer: Any, solve: Any, descent: Any) -> None:
    """Raise a TypeError for mistakes that torch would report less clearly."""
    if not isinstance(delta, Tensor) or not delta.is_floating_point():
        raise TypeError(
            f"delta must be a floating-point tensor, where the inner variables start, got {type(delta).__name__}: pass "
            "torch.zeros(rows, …), one row per sample"
        )
    if not delta.numel() or delta.is_meta or delta.layout is not torch.strided:
        raise TypeError(f"delta must be a dense tensor with values, got {show(delta)}: pass torch.zeros(rows, …)")
    if isinstance(optimizer, str) or not fits(getattr(optimizer, "step", optimizer), Callable):
        raise TypeError(
            f"optimizer must be a torch optimizer or a function that makes one, got {optimizer!r:.40}: pass "
            "lambda tensors: torch.optim.Adam(tensors, lr=0.01)"
        )
    if solve is not None and (isinstance(solve, type) or not callable(solve)):
        raise TypeError(
            f"solve must be a solver or None, got {solve!r:.40}: pass ConjugateGradient(), Direct(), Diagonal() or "
            "Neumann()"
        )
    if not isinstance(descent, Descent):
        raise TypeError(
            f"descent must be the settings of the inner solver, got {descent!r:.40}: pass "
            "Descent(GradientStep(0.1), steps=10)"
        )
    if isinstance(composition, type):
        raise TypeError(f"composition must be a value, got the class: write {composition.__name__}(…)")
    if not isinstance(composition, Composition):
        raise TypeError(
            f"composition must have update, value, estimate and eta, got {type(composition).__name__}: for a function "
            "f pass RunningMean(f)"
        )
    if isinstance(constraint, type):
        raise TypeError(f"constraint must be a value or a function of the batch: write {constraint.__name__}(…)")


def _make_optimizer(
    optimizer: torch.optim.Optimizer | MakeOptimizer, parameters: list[Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer, made from the parameters if it is a function, once it is known to hold all of them."""
    result = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(parameters)
    if not hasattr(result, "param_groups"):
        raise TypeError(f"optimizer(tensors) must return a torch optimizer, got {show(result)}")
    held = {id(tensor) for group in result.param_groups for tensor in group["params"]}
    if not all(id(parameter) in held for parameter in parameters):
        raise ValueError(
            "optimizer does not hold all tensors of theta: make it from them, or pass a function that does"
        )
    return result

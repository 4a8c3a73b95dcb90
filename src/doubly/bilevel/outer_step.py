"""One step of Algorithm 1 on a batch: the inner solutions, the CID estimate there, and the step of the optimizer."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel.cid import Direction, Terms, as_terms, check_inner, check_terms, cid, inner_values
from doubly.bilevel.communicator import Communicator
from doubly.bilevel.composition import Composition, State
from doubly.bilevel.constraints import Constraint
from doubly.bilevel.inner import Descent, gap, projected_descent
from doubly.bilevel.linear_solve import Solver, SolverWarning, meets_tolerance
from doubly.bilevel.parameters import frozen, with_values
from doubly.bilevel.rows import mean_row

UNSOLVED = 0.1  # share of the first projected inner gradient that a solve may leave
NEGLIGIBLE = 1e-3  # projected inner gradient beside the size of delta that is small whatever the start was
NO_THETA = "problem does not depend on theta: compute g and h from the theta that it is given"
NO_DELTA = "inner does not depend on delta: there is nothing to minimize; compute h from the delta given"


class StepInput(NamedTuple):
    """State from which a step starts.

    Attributes:
        batch: This process's part of the batch, as the problem expects it.
        start: delta to start the inner solve from, (B, ...); one variable of any shape if it is shared.
        constraint: The sets of the samples of this batch.
        composition: The composition, with the eta of this step.
        state: The state of the composition before the step.
        previous_theta: Values of theta before the previous step, for STORM; None without it or in the first step.
    """

    batch: Any
    start: Tensor
    constraint: Constraint
    composition: Composition
    state: State
    previous_theta: list[Tensor] | None = None


class StepOutput(NamedTuple):
    """Result of a step, at the theta from which it started.

    Attributes:
        delta: The inner solutions, of the shape of `StepInput.start`.
        direction: The CID estimate.
        value: f of the batch, ().
        gradient_norm: Length of the estimate, ().
    """

    delta: Tensor
    direction: Direction
    value: Tensor
    gradient_norm: Tensor


@dataclass(frozen=True, eq=False)
class OuterStep:
    """Steps of Algorithm 1 on one problem; see `minimize` for the arguments.

    Args:
        problem: Function (theta, delta, batch) -> Terms.
        inner: Function (theta, delta, batch) -> h_i alone, or None.
        theta: The outer variable, as the problem expects it.
        parameters: The tensors of theta.
        descent: Settings of the inner solver.
        solve: Solver of the linear systems, or None.
        shared: Whether all samples share one delta.
        communicator: The processes that work on the problem.
    """

    problem: Callable[[Any, Tensor, Any], Terms]
    inner: Callable[[Any, Tensor, Any], Tensor] | None
    theta: Any
    parameters: list[Tensor]
    descent: Descent
    solve: Solver | None
    shared: bool
    communicator: Communicator

    def run(self, optimizer: torch.optim.Optimizer, step: StepInput) -> StepOutput:
        """Take one step of the optimizer.

        An optimizer such as LBFGS may ask for several estimates in one step.

        Returns:
            The first estimate, which is the one at the theta that the step started from.
        """
        previous = None if step.previous_theta is None else self._outer_values(step.previous_theta, step)
        outputs = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            outputs.append(self._estimate(step, previous))
            return outputs[-1].value

        optimizer.step(closure)  # type: ignore[arg-type]
        return outputs[0]

    def run_numbered(
        self, optimizer: torch.optim.Optimizer, step: StepInput, number: int, warn: bool = True
    ) -> StepOutput:
        """Take one step, and add its number to the message of an ArithmeticError.

        Args:
            optimizer: The optimizer of theta.
            step: The state to start from.
            number: Number of the step.
            warn: Whether a linear solve that misses its tolerance warns. Python cannot tell repetitions of that warning
                apart from new ones, since its text holds the residual.
        """
        with warnings.catch_warnings():
            if not warn:
                warnings.simplefilter("ignore", SolverWarning)
            try:
                return self.run(optimizer, step)
            except ArithmeticError as error:
                raise ArithmeticError(f"step {number}: {error}") from None

    def record(self, output: StepOutput, step: StepInput, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Return the numbers of a step for the history; NaN where a number is not computed."""
        slope, residual = output.direction.slope, output.direction.residual
        rows = output.delta[None] if self.shared else output.delta
        return {
            "value": output.value.item(),
            "gradient": output.gradient_norm.item(),
            "gap": float("nan") if slope is None else self._maximum(gap(step.constraint, rows, slope)),
            "residual": float("nan") if residual is None else self._maximum(residual),
            "step_size": float(optimizer.param_groups[0]["lr"]),
            "eta": step.composition.eta,
        }

    def missed_tolerance(self, output: StepOutput) -> bool:
        """Return whether a linear solve of this step left a larger residual than its tolerance."""
        residual = output.direction.residual
        if residual is None or self.solve is None or self.solve.tolerance is None:
            return False
        return not bool(meets_tolerance(residual, self.solve.tolerance).all())

    def start_gap(self, step: StepInput) -> float:
        """Return the longest projected inner gradient where the inner solve of a step starts."""
        rows = (step.start[None] if self.shared else step.start).detach().requires_grad_()
        with frozen(self.parameters):
            (slope,) = torch.autograd.grad(self._inner_function(step)(rows).sum(), rows)
        slope = mean_row(self.communicator.all_gather(slope)) if self.shared else slope
        return self._maximum(gap(step.constraint, rows.detach(), slope))

    def warn_if_unsolved(self, start_gap: float, records: list[dict[str, float]], delta: Tensor) -> None:
        """Warn if the inner problems of the last step are not solved.

        Without a tolerance of its own, a solve has failed if it leaves more than a tenth of the projected gradient at
        the very first start, unless what it leaves is small beside delta.

        Args:
            start_gap: What `start_gap` returned in the first step.
            records: The numbers of all steps.
            delta: Inner solutions, for their size.
        """
        last, tolerance = records[-1]["gap"], self.descent.tolerance
        if tolerance is None:
            largest = max(start_gap, *(record["gap"] for record in records))
            tolerance = max(UNSOLVED * largest, NEGLIGIBLE * (1 + delta.abs().max().item()))
        if last > 1.1 * tolerance:
            warnings.warn(
                f"the inner problems are not solved: the longest projected gradient of inner is {last:.1e} after the "
                f"last solve, and was {start_gap:.1e} at the start, so the estimate of the gradient of F is wrong: "
                "take more or larger inner steps, such as descent=Descent(GradientStep(0.5), steps=100)",
                SolverWarning,
                stacklevel=3,
            )

    def _inner_function(self, step: StepInput) -> Callable[[Tensor], Tensor]:
        """Return the inner function of rows at the current theta."""

        def h(rows: Tensor) -> Tensor:
            delta = rows.squeeze(0) if self.shared else rows  # the backward pass of rows[0] would copy
            if self.inner is not None:
                values = self.inner(self.theta, delta, step.batch)
                check_inner(values, len(values) if self.shared and values.dim() else len(rows))
            else:
                terms = as_terms(self.problem(self.theta, delta, step.batch))
                check_terms(terms, delta, self.shared)
                values = inner_values(terms)
            if not values.requires_grad:
                raise ValueError(NO_DELTA)
            return values.mean()[None] if self.shared else values

        return h

    def _minimizer(self, step: StepInput) -> Tensor:
        """Return the inner solutions at the current theta."""
        start = step.start[None] if self.shared else step.start
        try:
            with frozen(self.parameters):
                rows = projected_descent(
                    self._inner_function(step),
                    start,
                    step.constraint,
                    self.descent.rule,
                    self.descent.steps,
                    self.descent.tolerance,
                    shared=self.shared,
                    all_gather=self.communicator.all_gather,
                )
        except ArithmeticError as error:
            raise ArithmeticError(f"in the inner problem, {error}; inner steps are those of descent=…") from None
        return rows[0] if self.shared else rows

    def _outer_values(self, theta_values: list[Tensor], step: StepInput) -> Tensor:
        """Return g_i of the batch at other values of theta, with the inner solutions that belong to them."""
        with with_values(self.parameters, theta_values):
            delta = self._minimizer(step)
            with torch.no_grad():
                return as_terms(self.problem(self.theta, delta, step.batch)).outer

    def _estimate(self, step: StepInput, previous: Tensor | None) -> StepOutput:
        """Run lines 4-12 of Algorithm 1, which leave the gradient in theta."""
        delta = self._minimizer(step)
        direction = cid(
            lambda delta: self.problem(self.theta, delta, step.batch),
            delta,
            step.composition,
            step.state,
            self.solve,
            constraint=step.constraint,
            shared=self.shared,
            all_gather=self.communicator.all_gather,
            previous=previous,
        )
        if not direction.loss.requires_grad:
            raise ValueError(NO_THETA)
        direction.loss.backward()  # type: ignore[no-untyped-call]
        self.communicator.average_gradients(self.parameters)
        norms = [parameter.grad.norm() for parameter in self.parameters if parameter.grad is not None]
        if not norms:
            raise ValueError(NO_THETA)
        value = step.composition.value(self.communicator.all_gather(direction.values))
        gradient_norm = torch.stack(norms).norm()
        if not torch.isfinite(value + gradient_norm):
            raise ArithmeticError(
                "in the outer problem, the value or the gradient of F is not finite: take smaller steps of the "
                "optimizer, by its learning rate or step_size"
            )
        return StepOutput(delta, direction, value, gradient_norm)

    def _maximum(self, values: Tensor) -> float:
        """Return the largest value over the rows of all processes."""
        return self.communicator.all_gather(values.max()[None]).max().item()

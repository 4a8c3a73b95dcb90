"""One step of Algorithm 1 on a batch: the inner solution, the CID estimate there, and the step of the optimizer."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from doubly.bilevel.cid import Direction, Terms, check_inner, check_terms, cid, inner_values, terms_of
from doubly.bilevel.composition import Composition, State
from doubly.bilevel.inner import Constraint, StepRule, gap, projected_descent
from doubly.bilevel.leaves import frozen, swapped
from doubly.bilevel.linear_solve import Solver, SolverWarning
from doubly.bilevel.step_rules import GradientStep

NO_THETA = "problem does not depend on theta: compute g and h from the theta that it is given"


class Processes(Protocol):
    """What several processes need of each other; the module `doubly.distributed.collectives` has it."""

    def world(self) -> tuple[int, int]: ...
    def gather(self, values: Tensor) -> Tensor: ...
    def average_gradients(self, parameters: Iterable[Any]) -> Any: ...


class Alone:
    """One process."""

    def world(self) -> tuple[int, int]:
        return 0, 1

    def gather(self, values: Tensor) -> Tensor:
        return values

    def average_gradients(self, parameters: Iterable[Any]) -> Any: ...


@dataclass(frozen=True)
class Descent:
    """The inner solver: `steps` projected steps of a rule, fewer once no projected gradient exceeds the tolerance."""

    rule: StepRule = GradientStep()
    steps: int = 10
    tolerance: float | None = None


class Here(NamedTuple):
    """One batch and what is known before its step."""

    batch: Any
    start: Tensor
    constraint: Constraint
    composition: Composition
    state: State


class Found(NamedTuple):
    delta: Tensor
    direction: Direction
    value: Tensor  # f of the batch
    gradient: Tensor  # its length


@dataclass(frozen=True, eq=False)
class Levels:
    """The two levels of a problem, ready to be evaluated on a batch."""

    problem: Callable[[Any, Tensor, Any], Terms]
    inner: Callable[[Any, Tensor, Any], Tensor] | None
    theta: Any
    leaves: list[Tensor]
    descent: Descent
    solve: Solver | None
    shared: bool
    processes: Processes

    def minimizer(self, here: Here) -> Tensor:
        def h(rows: Tensor) -> Tensor:
            delta = rows.squeeze(0) if self.shared else rows  # the backward pass of rows[0] would copy
            if self.inner is not None:
                values = self.inner(self.theta, delta, here.batch)
                check_inner(values, len(values) if self.shared and values.dim() else len(rows))
            else:
                terms = terms_of(self.problem(self.theta, delta, here.batch))
                check_terms(terms, delta, self.shared)
                values = inner_values(terms)
            if not values.requires_grad:
                raise ValueError(
                    "inner does not depend on delta: there is nothing to minimize; compute h from the delta given"
                )
            return values.mean()[None] if self.shared else values

        how = (self.descent.rule, self.descent.steps, self.descent.tolerance)
        rows = here.start[None] if self.shared else here.start
        with frozen(self.leaves):
            found = projected_descent(h, rows, here.constraint, *how, shared=self.shared, gather=self.processes.gather)
        return found[0] if self.shared else found

    def outer_at(self, values: list[Tensor], here: Here) -> Tensor:
        """g_i at other values of theta, with the inner solution that belongs to them."""
        with swapped(self.leaves, values):
            delta = self.minimizer(here)
            with torch.no_grad():
                return terms_of(self.problem(self.theta, delta, here.batch)).outer

    def estimate(self, here: Here, previous: Tensor | None) -> Found:
        """Lines 4-12 of Algorithm 1; the gradient is left in theta."""
        delta = self.minimizer(here)
        direction = cid(
            lambda delta: self.problem(self.theta, delta, here.batch),
            delta,
            here.composition,
            here.state,
            self.solve,
            constraint=here.constraint,
            shared=self.shared,
            gather=self.processes.gather,
            previous=previous,
        )
        if not direction.loss.requires_grad:
            raise ValueError(NO_THETA)
        direction.loss.backward()  # type: ignore[no-untyped-call]
        self.processes.average_gradients(self.leaves)
        norms = [leaf.grad.norm() for leaf in self.leaves if leaf.grad is not None]
        if not norms:
            raise ValueError(NO_THETA)
        value = here.composition.value(self.processes.gather(direction.values))
        length = torch.stack(norms).norm()
        if not torch.isfinite(value + length):
            raise ArithmeticError("the value or the gradient of F is not finite; take smaller steps")
        return Found(delta, direction, value, length)

    def line(self, found: Found, here: Here, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """One line of the history; NaN where a number is not known."""
        _, _, _, _, _, slope, residual = found.direction
        rows = found.delta[None] if self.shared else found.delta
        unknown = float("nan")
        return {
            "value": found.value.item(),
            "gradient": found.gradient.item(),
            "gap": unknown if slope is None else self._largest(gap(here.constraint, rows, slope)),
            "residual": unknown if residual is None else self._largest(residual),
            "step_size": float(optimizer.param_groups[0]["lr"]),
            "eta": getattr(here.composition, "eta", unknown),
        }

    def _largest(self, numbers: Tensor) -> float:
        """Over the rows of all processes."""
        return self.processes.gather(numbers.max()[None]).max().item()

    def guarded(self, number: int, quiet: bool, *given: Any) -> Found:
        """A step that says its number where it fails, and does not repeat that a solve was missed."""
        with warnings.catch_warnings():
            if quiet:  # the text holds the residual, so that python would show it anew each time
                warnings.simplefilter("ignore", SolverWarning)
            try:
                return self.step(*given)
            except ArithmeticError as problem:
                raise ArithmeticError(f"step {number}: {problem}") from None

    def step(self, optimizer: torch.optim.Optimizer, here: Here, previous: Tensor | None) -> Found:
        """One step of the optimizer, which may ask for several estimates (LBFGS does); the first is told."""
        found = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            found.append(self.estimate(here, previous))
            return found[-1].value

        optimizer.step(closure)  # type: ignore[arg-type]
        return found[0]

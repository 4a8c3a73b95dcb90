"""DONE, doubly robust instance-reweighted adversarial training: CID on eq. 7 of the paper.

    inner   h_i = l'_i + barrier of the threat's box,   l' = -(loss of the attack),   solved by the attack
    outer   r log mean exp(l_i / r), whose gradient weights sample i by exp(l_i / r) / u

u is a running average of mean exp(l_i / r). DONE-GD, DONE-PGD and DONE-ADAM are this with a barrier, sign or Adam step
in the attack. Other divergences than KL are chosen by name, and `cap` bounds the weights. `eta` 1 takes the softmax of
each batch instead of u. The recipes differ from the paper's text where that does not train well; `doubly train RECIPE
--variant literal` has all of its literal values at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_logits, frozen_statistics, replay_rng, rng_state
from doubly.bilevel import (
    ChiSquare,
    Composition,
    ConjugateGradient,
    CVaR,
    Diagonal,
    Direction,
    LogMeanExp,
    Part,
    Terms,
    cid,
    cid_first_order_parts,
)
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, sample_losses
from doubly.methods.method import Method, check_attack, implicit_precision, perturb_parts
from doubly.schedules import Piecewise, Schedule
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class DONE(Method):
    """KL-DRO weights on adversarial losses, with the implicit gradient of the attack.

    Raises:
        UsageError: If a number is out of range, or settings exclude each other.
    """

    attack: PGD = field(default_factory=PGD)
    """the attack, which solves the inner problem; its loss may differ from the loss that is minimized (eq. 3)"""
    loss: Loss = field(default_factory=CrossEntropy)
    """the outer loss l; one that compares with the clean logits (TRADES, MART) costs a pass more"""
    temperature: Schedule = field(default_factory=lambda: Piecewise((10.0, 1.0, 0.1), (2 / 3, 5 / 6)))
    """r over training: a large r is AT, a small r follows the worst samples; the paper's is 10, 1, 0.1"""
    eta: float = 0.9
    """share of the current batch in the running average u; 1 is a softmax over the batch"""
    divergence: Literal["kl", "chi2", "cvar"] = "kl"
    """what keeps the weights near 1. kl: as in the paper; chi2: weights that are linear in the loss;
    cvar: only the cap, so that the loss is the mean over the worst share 1 / cap of the samples at any temperature"""
    cap: float | None = None
    """largest weight of a sample, relative to equal weights; 1 is AT, none is the paper's rule"""
    mean_weight_limit: float | None = None
    """keeps the mean weight of a batch within [1/limit, limit], for runs without cap; none is the paper's rule.
    metrics.jsonl has the share of an epoch's steps in which it acted (weight_limited)"""
    damping: float = 10.0
    """added to the barrier's curvature before it is inverted; 0 is the paper's rule"""
    implicit: Literal["exact", "first_order", "none"] = "exact"
    """how the implicit term is computed. exact: by a double backward pass (Proposition 1 of the paper);
    first_order: by a difference quotient, which costs one pass more than AT; none: left out"""
    curvature: Literal["barrier", "full"] = "barrier"
    """curvature in the implicit term. barrier: only that of the barrier, since a ReLU network has none;
    full: that of the network too, by conjugate gradients, for smooth networks"""

    checks_itself: ClassVar[tuple[str, ...]] = ("attack",)

    def __post_init__(self) -> None:
        check_attack(self.attack, "DONE")
        try:
            for percent in range(100):
                self.composition(percent / 100)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not self.damping >= 0:
            raise UsageError(f"damping must not be negative, got {self.damping:g}")
        if self.implicit != "none" and not self.attack.threat.has_barrier:
            raise UsageError("the barrier of DONE is that of a box: use LinfBall, or implicit none")
        if self.implicit == "first_order" and (self.curvature == "full" or not self.zero_sum):
            raise UsageError(
                "implicit first_order needs curvature barrier and one loss for attack and model: use exact"
            )

    @property
    def zero_sum(self) -> bool:
        """Whether attack and model have the same loss, with opposite signs."""
        return self.attack.loss == self.loss

    @property
    def needs_second_derivatives(self) -> bool:
        return self.implicit == "exact"

    def composition(self, progress: float) -> Composition:
        """Return the outer function at a share of training.

        Args:
            progress: Share of training done, in [0, 1).

        Returns:
            The composition that `cid` differentiates, with the temperature of that moment.

        Raises:
            ValueError: If the settings of the divergence do not fit.
        """
        r = self.temperature.at(progress)
        if self.divergence == "kl":
            return LogMeanExp(r, self.eta, self.cap, self.mean_weight_limit)
        if self.mean_weight_limit is not None:
            raise ValueError("mean_weight_limit belongs to divergence kl: leave it out")
        if self.divergence == "chi2":
            return ChiSquare(r, self.eta, self.cap)
        if self.cap is None or not self.cap >= 1:
            raise ValueError(f"divergence cvar needs a cap >= 1, its worst share being 1 / cap; got cap={self.cap}")
        return CVaR(1 / self.cap, self.eta)

    def recorded_state(self, state: State) -> dict[str, float]:
        return {} if self.divergence == "cvar" else {"r": float(state["r"])}

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor:
        with torch.no_grad(), frozen_statistics(model), implicit_precision(self.implicit, batch.x):
            return self._problem(model, batch)(perturbation.delta).outer

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        return _objective(self.direction(model, batch, delta, state, step))

    def microbatch_objectives(
        self,
        model: nn.Module,
        parts: Sequence[Batch],
        state: State,
        steps: Sequence[TrainStep],
        perturbations: Sequence[Perturbation | None] | None = None,
    ) -> Iterator[Objective]:
        """Yield an objective per part; with the first-order term, which is bounded for the batch, one for all.

        For arguments and results see `Method.microbatch_objectives`.
        """
        if self.implicit != "first_order":
            yield from super().microbatch_objectives(model, parts, state, steps, perturbations)
            return
        perturbations = perturbations or perturb_parts(self, model, parts, state, steps)
        deltas = [perturbation.delta for perturbation in perturbations if perturbation is not None]
        problems = [
            self._part(model, batch, delta, step) for batch, delta, step in zip(parts, deltas, steps, strict=True)
        ]
        with implicit_precision(self.implicit, parts[0].x):
            objective = _objective(self._first_order(model, problems, state, steps[0]))
        yield objective

    def direction(self, model: nn.Module, batch: Batch, delta: Tensor, state: State, step: TrainStep) -> Direction:
        """Return the CID estimate at delta, however that was found.

        Args:
            model: The network, in training mode.
            batch: The images.
            delta: A perturbation of each image.
            state: What the previous objective, or `init`, returned.
            step: The training step.

        Returns:
            The surrogate loss, the weights of the samples, and the new state.
        """
        with implicit_precision(self.implicit, batch.x):
            problem, composition = self._problem(model, batch), self.composition(step.progress)
            all_gather = step.communicator.all_gather
            if self.implicit == "none":
                return cid(problem, delta, composition, state, all_gather=all_gather)
            if self.implicit == "first_order":
                return self._first_order(model, [self._part(model, batch, delta)], state, step)
            inverse = self.attack.box(batch.x, batch.y).inverse_curvature(delta, self.damping)
            # Networks are not convex in delta: a sample that meets negative curvature keeps the barrier's solution.
            full = ConjugateGradient(tolerance=None, inverse_diagonal=inverse)
            solve = Diagonal(inverse) if self.curvature == "barrier" else full
            return cid(problem, delta, composition, state, solve, all_gather=all_gather)

    def _problem(self, model: nn.Module, batch: Batch) -> Callable[[Tensor], Terms]:
        """Return the losses at delta, as `cid` takes them."""

        def problem(delta: Tensor) -> Terms:
            logits = model(batch.x + delta)
            check_logits(logits, batch.y)
            inner = None if self.zero_sum else -self.attack.loss(logits, batch.y)
            outer = sample_losses(self.loss, logits, batch.y, lambda: clean_logits(model, batch.x))
            return Terms(outer, inner, logits.detach())

        return problem

    def _part(self, model: nn.Module, batch: Batch, delta: Tensor, step: TrainStep | None = None) -> Part:
        """Return a microbatch for the first-order term; without `step` dropout draws from torch's global generators."""
        problem, dropout = self._problem(model, batch), rng_state()

        def seeded(delta: Tensor) -> Terms:
            if step is None:
                return problem(delta)
            with step.network_rng():
                return problem(delta)

        def without_side_effects(delta: Tensor) -> Terms:
            with frozen_statistics(model), replay_rng(dropout):
                return seeded(delta)

        inverse = self.attack.box(batch.x, batch.y).inverse_curvature(delta, self.damping)
        return Part(seeded, without_side_effects, delta, inverse)

    def _first_order(self, model: nn.Module, parts: Sequence[Part], state: State, step: TrainStep) -> Direction:
        return cid_first_order_parts(
            parts,
            self.composition(step.progress),
            state,
            model.parameters(),
            all_gather=step.communicator.all_gather,
            mean=step.communicator.mean,
        )


def _objective(direction: Direction) -> Objective:
    state = direction.state
    record = {"weight_limited": state["limited"]} if "limited" in state else {}
    return Objective(direction.loss, direction.values, direction.cotangents, direction.aux, state, record)

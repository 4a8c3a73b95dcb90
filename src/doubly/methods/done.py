"""DONE, doubly robust instance-reweighted adversarial training: CID on eq. 7 of the paper.

inner   h_i = l'_i + barrier of the threat's box, l' = -attack_loss      solved by the attack
outer   r log mean exp(l_i / r), whose gradient weighs sample i with exp(l_i / r) / u; other divergences by name
DONE-GD, -PGD and -ADAM are this with a barrier, sign or Adam step in the attack (A8-A12 of methods.md).
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_pass, draws, repeating, statistics_frozen
from doubly.bilevel import (
    Box,
    ChiSquare,
    Composition,
    ConjugateGradient,
    CVaR,
    Diagonal,
    Direction,
    LogMeanExp,
    Terms,
    cid,
    cid_first_order,
)
from doubly.checks import check_logits
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, PairedLoss
from doubly.schedules import Piecewise, Schedule
from doubly.threat import LinfBall
from doubly.types import Batch, Objective, State, TrainStep


@dataclass(frozen=True)
class DONE:
    """KL-DRO weights on adversarial losses, with the implicit gradient of the attack."""

    attack: PGD = field(default_factory=PGD)
    """the inner solver; its loss is the attack loss -l' (eq. 3)"""
    loss: Loss = field(default_factory=CrossEntropy)
    """the outer loss l; one that compares with the clean logits (TRADES, MART) costs a pass more"""
    temperature: Schedule = field(default_factory=lambda: Piecewise((10.0, 1.0, 0.1), (2 / 3, 5 / 6)))
    """r: large is AT, small follows the worst samples (A16)"""
    eta: float = 0.9
    """share of the current batch in the running average u; 1 is a softmax over the batch (A2)"""
    divergence: Literal["kl", "chi2", "cvar"] = "kl"
    """what holds the weights near 1: kl is the paper's; chi2 is linear in the loss; cvar is nothing but the cap: the
    mean of the worst share 1 / cap, whatever the temperature"""
    cap: float | None = None
    """no weight exceeds it; 1 is AT, none is the paper's literal rule"""
    mean_weight_limit: float | None = None
    """clamp of the batch's mean weight to [1/limit, limit] (A4), for runs without cap"""
    damping: float = 10.0
    """lambda, added to the barrier's curvature; 0 is literal (A7)"""
    implicit: Literal["exact", "first_order", "none"] = "exact"
    """exact: Proposition 1 by a double backward; first_order: by a difference quotient, at about AT's cost; none"""
    curvature: Literal["barrier", "full"] = "barrier"
    """barrier: that of the network is neglected (ReLU); full: conjugate gradients on both, for smooth networks"""

    def __post_init__(self) -> None:
        try:
            for percent in range(100):
                self.composition(percent / 100)
        except ValueError as problem:
            raise UsageError(str(problem)) from None
        if not self.damping >= 0:
            raise UsageError(f"damping must not be negative, got {self.damping:g}")
        if self.implicit != "none" and not isinstance(self.attack.threat, LinfBall):
            raise UsageError("the barrier of DONE is that of a box: use LinfBall, or implicit none")
        if self.implicit == "first_order" and (self.curvature == "full" or self.attack.loss != self.loss):
            raise UsageError(
                "implicit first_order needs curvature barrier and one loss for attack and model: use exact"
            )

    def composition(self, progress: float) -> Composition:
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

    @property
    def differentiates_twice(self) -> bool:
        return self.implicit == "exact"

    def init(self, counts: Tensor | None = None) -> State:
        return {}

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        delta = self.attack(model, batch.x, batch.y, step.generator("attack"))
        found = self.direction(model, batch, delta, state, step)
        return Objective(found.loss, found.values, found.cotangents, found.aux, found.state)

    def direction(self, model: nn.Module, batch: Batch, delta: Tensor, state: State, step: TrainStep) -> Direction:
        """The CID estimate at delta, however that was found."""
        if self.implicit == "none":
            return self._estimate(model, batch, delta, state, step)
        with torch.autocast(batch.x.device.type, enabled=False):  # the implicit term drowns in half precision
            return self._estimate(model, batch, delta, state, step)

    def _estimate(self, model: nn.Module, batch: Batch, delta: Tensor, state: State, step: TrainStep) -> Direction:
        def problem(delta: Tensor) -> Terms:
            logits = model(batch.x + delta)
            check_logits(logits, batch.y)
            zero_sum = self.attack.loss == self.loss
            inner = None if zero_sum else -self.attack.loss(logits, batch.y)
            if isinstance(self.loss, PairedLoss):
                return Terms(self.loss(logits, batch.y, clean_pass(model, batch.x)), inner, logits.detach())
            return Terms(self.loss(logits, batch.y), inner, logits.detach())

        composition = self.composition(step.progress)
        if self.implicit == "none":
            return cid(problem, delta, composition, state, all_gather=parallel.gather)
        box = self.attack.threat.around(batch.x)
        assert isinstance(box, Box), "checked when the method was made"
        inverse = box.inverse_curvature(delta, self.damping)
        if self.implicit == "first_order":
            stand = draws()

            def without_side_effect(delta: Tensor) -> Terms:
                with statistics_frozen(model), repeating(stand):
                    return problem(delta)

            return cid_first_order(
                problem,
                without_side_effect,
                delta,
                composition,
                state,
                inverse,
                model.parameters(),
                parallel.gather,
                mean=parallel.mean,
            )
        if self.curvature == "barrier":
            return cid(problem, delta, composition, state, Diagonal(inverse), all_gather=parallel.gather)
        # Networks are not convex in delta: a sample that meets negative curvature keeps the barrier's answer.
        solve = ConjugateGradient(tolerance=None, inverse_diagonal=inverse)
        return cid(problem, delta, composition, state, solve, all_gather=parallel.gather)

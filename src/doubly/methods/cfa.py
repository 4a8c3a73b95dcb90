"""CFA, class-wise calibrated fair adversarial training (Wei, Wang, Guo and Wang 2023): class radii and class betas.

    epsilon_y = (lambda_1 + a_y) epsilon, step sizes alike;   b_y = (lambda_2 + a_y) beta

    trades  mean (1 + beta)/(1 + b_y) (CE(x) + b_y KL(p(x) || p(x + delta))),   delta increases the KL
    at      mean CE(x + delta),   delta increases the loss of the attack

a_y is the robust accuracy of the class in the training batches of the epoch before, so a weak class is attacked less,
and its clean loss counts more; DAFA and RobustLT do the opposite. It acts after `start` of training (published: epoch
10 of 200), from the second epoch on. Before that, and for a class that had no images yet, the radius is epsilon and b_y
is beta: AT or TRADES.

What differs: the published loss, (1 - b/(1 + b)) CE + b/(1 + b) KL, does not have the factor 1 + beta. With SGD it is
the same as a learning rate 1 + beta times as large and a weight decay as many times smaller; with it CFA is TRADES
where all b_y are beta, and learning rates mean the same for both.

On imbalanced digits CFA is below TRADES, and its radii seem to be the reason: at the end the frequent classes are
attacked within 1.5 epsilon, the rare ones within 0.9 to 1.1. RA-PGD / RA-Tail-30 on hold-outs (n = 287, two seeds, beta
6, 120 epochs, learning rate 0.1): TRADES 71.6 / 35.1, class betas alone 72.1 / 35.1, class radii alone 67.1 / 23.6, CFA
67.1 / 25.3 (the tails of the two seeds differ by 10, 24 and 14); without the factor 46.2 / 3.4, where it fits 75 % of
the attacked training images and TRADES 96 %.

Left out: FAWA, the authors' average of weights over epochs whose worst class is above a threshold. Averaging is a
setting of the run, for every method alike (`ema_decay`).
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_logits, frozen_statistics
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, TradesLoss, kl_divergence
from doubly.methods.class_tally import add_to_tally, class_means, empty_tally, tally_at
from doubly.methods.method import Method, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class CFA(Method):
    """TRADES or AT with radii, and for TRADES betas, that grow with the robust accuracy of the class.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found; for trades not from a start at zero, where the KL has no gradient"""
    form: Literal["trades", "at"] = "trades"
    """which method is calibrated"""
    beta: float = 6.0
    """weight of the KL in trades"""
    radius_offset: float = 0.5
    """lambda_1: a class of robust accuracy a is attacked within (lambda_1 + a) epsilon"""
    beta_offset: float = 0.5
    """lambda_2: the same for beta"""
    start: float = 0.05
    """share of training before which all classes have the same radius and beta"""

    def __post_init__(self) -> None:
        TradesLoss(self.beta)
        if self.form == "trades":
            self.attack.check_divergence()
        if not (0 < self.radius_offset < float("inf") and 0 <= self.beta_offset < float("inf")):
            raise UsageError(
                "radius_offset is positive, since a class of accuracy 0 is attacked too, and beta_offset a number from "
                f"0 on, got {self.radius_offset:g} and {self.beta_offset:g}: published is 0.5 for both"
            )
        if not 0 <= self.start < 1:
            raise UsageError(f"start is a share of training in [0, 1), got {self.start:g}: published is 0.05")

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "CFA")
        return empty_tally(2, counts)

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        factors = self.class_factors(tally_at(state, step.epoch), step.progress, self.radius_offset)
        attack = self.attack.with_class_factors(factors)
        find = attack.maximize_divergence if self.form == "trades" else attack
        return Perturbation(find(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor:
        with torch.no_grad(), frozen_statistics(model):
            return _sample_values(model(batch.x + perturbation.delta), batch.y)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        y = batch.y
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, y)
        state = tally_at(state, step.epoch)
        losses = CrossEntropy()(logits, y) if self.form == "at" else self._trades(model, batch, logits, state, step)
        radii = self.class_factors(state, step.progress, self.radius_offset)
        values = step.communicator.all_gather(_sample_values(logits, y))
        state = add_to_tally(state, values[:, 1:], values[:, 0].long())
        record = {"largest_class_radius": radii.max(), "smallest_class_radius": radii.min()}
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state, record)

    def _trades(self, model: nn.Module, batch: Batch, logits: Tensor, state: State, step: TrainStep) -> Tensor:
        """Return the calibrated TRADES loss of each sample."""
        clean = clean_logits(model, batch.x)
        beta = self.beta * self.class_factors(state, step.progress, self.beta_offset).to(clean)[batch.y]
        scale = (1 + self.beta) / (1 + beta)
        return scale * (CrossEntropy()(clean, batch.y) + beta * kl_divergence(clean, logits))

    def class_factors(self, state: State, progress: float, offset: float) -> Tensor:
        """Return offset + a of each class, (classes,); 1 before `start`, and for classes that had no images yet."""
        accuracies = class_means(state["previous"])[0]
        if progress < self.start:
            return torch.ones_like(accuracies)
        return torch.where(state["previous"][-1] > 0, offset + accuracies, 1.0)


def _sample_values(logits: Tensor, y: Tensor) -> Tensor:
    """Return label and correctness of each sample, (B, 2)."""
    return torch.stack([y, logits.argmax(1) == y], 1).double()

"""MAIL, margin-aware instance reweighting (Wang, Liu, Han, Liu, Gong, Niu, Zhou, Sugiyama 2021).

    w = sigmoid(slope (bias - PM)),   PM = p_y - max_{j != y} p_j,   a constant weight
    at      mean w CE(x + delta)
    trades  mean CE(x) + w beta KL(p(x) || p(x + delta))
    mart    mean w BCE(x + delta) + beta KL(p(x) || p(x + delta)) (1 - p_y(x))

PM is that of the passes that are differentiated, in training mode. Released code and paper differ; the defaults are the
code's, since only that can be checked: PM at the attacked images, three times the sigmoid instead of a batch mean of 1
(`normalize`), and an attack on the KL in the form trades, on the cross-entropy in the others (the first upload of the
code attacked the cross-entropy in trades too: attack_on cross_entropy). Slope and bias are those of its MAIL-AT: a
sample on the boundary weighs 0.02, so little is learned without the burn-in of 76 of 120 epochs.

slope = 0 with normalize batch is AT, TRADES or MART exactly; with x3 all weights are 1.5.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doubly.attacks import PGD, clean_logits, frozen_statistics
from doubly.checks import check_logits
from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, LossParts, MartLoss, TradesLoss, probability_margin
from doubly.methods.method import Method
from doubly.methods.weighting import mean_one_weights
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class MAIL(Method):
    """AT, TRADES or MART, weighted by the sigmoid of the probability margin.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found"""
    form: Literal["at", "trades", "mart"] = "at"
    """which method is reweighted"""
    margin: Literal["adversarial", "natural", "difference"] = "adversarial"
    """PM at x + delta (released), PM at x, or p_y(x) - p_y(x + delta) in its place"""
    slope: float = 10.0
    """how sharply the weight falls with the margin; released: 10 for at, 2 for trades; 0 gives equal weights"""
    bias: float = -0.5
    """margin at which the sigmoid is 1/2; released: -0.5 for at, 0 for trades"""
    normalize: Literal["batch", "x3"] = "x3"
    """x3: three times the sigmoid, as released; batch: scaled to a batch mean of 1"""
    burn_in: float = 76 / 120
    """share of training before which all weights are 1"""
    beta: float = 5.0
    """weight of the KL in trades and mart"""
    attack_on: Literal["form", "kl", "cross_entropy"] = "form"
    """what the attack increases. kl: as TRADES, for trades; cross_entropy: the attack's own loss, which is this by
    default; form: kl in trades and cross_entropy in the other forms, as released"""

    def __post_init__(self) -> None:
        TradesLoss(self.beta)
        if not 0 <= self.burn_in < 1:
            raise UsageError(f"burn_in is a share of training in [0, 1), got {self.burn_in:g}: 0.5 is the first half")
        if not (0 <= self.slope < float("inf") and isfinite(self.bias)):
            raise UsageError(f"MAIL needs a slope from 0 on and a finite bias, got {self.slope:g} and {self.bias:g}")
        if self.attacks_kl:
            if self.form != "trades":
                raise UsageError(f"attack_on kl is TRADES's, got form {self.form}: use cross_entropy, or form trades")
            self.attack.check_divergence()

    @property
    def attacks_kl(self) -> bool:
        """Whether the attack increases the KL divergence."""
        return self.attack_on == "kl" or (self.attack_on == "form" and self.form == "trades")

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        attack = self.attack.maximize_divergence if self.attacks_kl else self.attack
        return Perturbation(attack(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        if self.normalize != "batch" or step.progress < self.burn_in:
            return None
        with torch.no_grad(), frozen_statistics(model):
            logits = model(batch.x + perturbation.delta)
            clean = logits if self.margin == "adversarial" else model(batch.x)
        return self.log_weights(logits, batch.y, clean)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = clean = model(batch.x + delta)
        check_logits(logits, batch.y)
        weighted = step.progress >= self.burn_in
        if self.form != "at" or (weighted and self.margin != "adversarial"):
            clean = clean_logits(model, batch.x)
        parts = self.parts(logits, batch.y, clean)
        losses = parts.reweighted + parts.unweighted
        weights = torch.ones_like(losses)
        if weighted:
            weights = self.weights(logits.detach(), batch.y, clean.detach(), step.communicator)
        loss = (weights * parts.reweighted + parts.unweighted).mean()
        return Objective(loss, losses.detach(), weights, logits.detach(), state)

    def parts(self, logits: Tensor, y: Tensor, clean: Tensor) -> LossParts:
        """Return the part of the loss that is reweighted, and the other part."""
        if self.form == "at":
            losses = CrossEntropy()(logits, y)
            return LossParts(losses, torch.zeros_like(losses))
        return (TradesLoss if self.form == "trades" else MartLoss)(self.beta).parts(logits, y, clean)

    def weights(self, logits: Tensor, y: Tensor, clean: Tensor, communicator: Communicator = SINGLE_PROCESS) -> Tensor:
        """Return the weights, from the logits of attacked and clean images."""
        log_weights = self.log_weights(logits, y, clean)
        return mean_one_weights(log_weights, communicator) if self.normalize == "batch" else 3 * log_weights.exp()

    def log_weights(self, logits: Tensor, y: Tensor, clean: Tensor) -> Tensor:
        """Return the logarithm of the sigmoid, from the logits of attacked and clean images."""
        if self.margin == "difference":
            margin = (-CrossEntropy()(clean, y)).exp() - (-CrossEntropy()(logits, y)).exp()
        else:
            margin = probability_margin(logits if self.margin == "adversarial" else clean, y)
        return F.logsigmoid(self.slope * (self.bias - margin))

"""WMMR, weighted minimax risk (Zeng et al. 2021): samples near or beyond the decision boundary count more.

    min_theta max_delta  mean w_i loss_i,   w = exp(-alpha m),   m = p_y - max_{j != y} p_j   at x + delta

The attack increases the same product, including the effect of delta on the weight. The defaults for the model are what
the released code does: the gradient goes through the weights too (`detached`), and they are not normalized. It also
attacks in training mode, which is attack_mode train here; the default is eval, as for every other method.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, frozen_statistics
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, LogitMargin, Loss, check_plain, probability_margin
from doubly.methods.method import Method
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

MAX_ALPHA = 80.0  # exp(80) still is a float32


@dataclass(frozen=True)
class WMMR(Method):
    """Adversarial training with weights exp(-alpha * probability margin), which the attack increases too.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=PGD)
    """how delta is found; its loss is weighted likewise"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized, once weighted"""
    alpha: float = 0.5
    """weights lie between exp(-alpha) and exp(alpha); 0 is AT"""
    detached: bool = False
    """take the weights as constants when the model is updated; the released code does not"""
    normalize: Literal["none", "batch"] = "none"
    """none: weights as they are (released); batch: divided by their mean over the batch, taken as a constant"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "WMMR")
        if not 0 <= self.alpha <= MAX_ALPHA:
            raise UsageError(
                f"alpha must lie in [0, {MAX_ALPHA:g}], since weights reach exp(alpha); got {self.alpha:g}"
            )
        if LogitMargin() in (self.attack.loss, self.loss):
            raise UsageError(
                "WMMR multiplies losses by weights that follow the model, so a loss below 0 turns their effect around: "
                "use CrossEntropy for the attack and the model, got LogitMargin"
            )

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        def weighted(logits: Tensor) -> Tensor:
            return self.weights(logits, batch.y) * self.attack.loss(logits, batch.y)

        return Perturbation(self.attack.maximize(model, batch.x, batch.y, step.generator("attack"), weighted))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        if self.normalize == "none":
            return None
        with torch.no_grad(), frozen_statistics(model):
            return self.weights(model(batch.x + perturbation.delta), batch.y)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        weights = self.weights(logits.detach() if self.detached else logits, batch.y)
        if self.normalize == "batch":
            weights = weights / step.communicator.all_gather(weights.detach()).mean()
        return Objective((weights * losses).mean(), losses.detach(), weights.detach(), logits.detach(), state)

    def weights(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return exp(-alpha * margin) of each sample."""
        return (-self.alpha * probability_margin(logits, y)).exp()

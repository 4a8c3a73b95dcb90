"""Weighted minimax risk (WMMR; Zeng et al. 2021): samples near or beyond the boundary count more, for both sides.

    min_theta max_delta  mean w_i loss_i,   w = exp(-alpha m),   m = p_y - max_{j != y} p_j   at x + delta

The attack increases the same product and always sees how delta changes the weight. The defaults for the model are what
the released code does: the gradient goes through the weights too (detached), and nothing scales them (normalize). It
also attacks in training mode, which is attack_mode train here; the default is eval, as for every other method.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from doubly.attacks import PGD
from doubly.checks import check_logits
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, LogitMargin, Loss, check_plain, probability_margin
from doubly.types import Batch, Objective, State, TrainStep

LARGEST = 80.0  # exp of it still is a float32


@dataclass(frozen=True)
class WMMR:
    """mean loss(x + delta), weighted by exp(-alpha * probability margin), which the attack increases too."""

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
        if not 0 <= self.alpha <= LARGEST:
            raise UsageError(f"alpha must lie in [0, {LARGEST:g}], since weights reach exp(alpha); got {self.alpha:g}")
        if isinstance(self.attack.loss, LogitMargin) or isinstance(self.loss, LogitMargin):
            raise UsageError(
                "WMMR multiplies losses by weights that follow the model, so a loss below 0 turns their effect around: "
                "use CrossEntropy for the attack and the model, got LogitMargin"
            )

    def init(self, counts: Tensor | None = None) -> State:
        return {}

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        def weighted(logits: Tensor) -> Tensor:
            return self.weights(logits, batch.y) * self.attack.loss(logits, batch.y)

        delta = self.attack.search(model, batch.x, batch.y, step.generator("attack"), weighted)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        weights = self.weights(logits.detach() if self.detached else logits, batch.y)
        if self.normalize == "batch":
            weights = weights / parallel.gather(weights.detach()).mean()
        return Objective((weights * losses).mean(), losses.detach(), weights.detach(), logits.detach(), state)

    def weights(self, logits: Tensor, y: Tensor) -> Tensor:
        return (-self.alpha * probability_margin(logits, y)).exp()

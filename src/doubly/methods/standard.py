"""Training on clean images: the upper end of standard accuracy, the lower end of robustness.

    mean loss(x)

No image is attacked.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from doubly.checks import check_logits
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.methods.method import Method
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class Standard(Method):
    """Standard training: the mean loss at clean images, without an attack.

    Raises:
        UsageError: If the loss compares attacked with clean images.
    """

    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "standard training")

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        logits = model(batch.x)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state)

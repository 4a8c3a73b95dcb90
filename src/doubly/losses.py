"""Per-sample losses of logits: what an attack increases and a method decreases."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


@runtime_checkable
class Loss(Protocol):
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B, classes), (B,) -> (B,)"""
        ...


def _precise(logits: Tensor) -> Tensor:
    """float32 or better, also under autocast."""
    return logits if logits.dtype is torch.float64 else logits.float()


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(z)_y."""

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(_precise(logits), y, reduction="none")


@dataclass(frozen=True)
class LogitMargin:
    """max_{j != y} z_j - z_y: positive once the sample is misclassified; does not saturate as the probabilities do."""

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        logits = _precise(logits)
        truth = logits.gather(1, y[:, None]).squeeze(1)
        others = logits.scatter(1, y[:, None], float("-inf"))
        return others.amax(1) - truth


LOSSES: dict[str, type] = {"cross_entropy": CrossEntropy, "logit_margin": LogitMargin}

"""The objective of a repair, as a function of the logits under attack: smooth errors per class, their soft maximum."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from doubly.losses import LogitMargin


def smooth_class_errors(logits: Tensor, y: Tensor, width: float, counts: Tensor) -> Tensor:
    """Return g_i = (M / M_y) sigmoid(-margin_i / width) onehot(y), (N, classes); its mean is a smooth error per class.

    Args:
        logits: Logits under attack, (N, classes).
        y: Labels, (N,).
        width: s, in units of the logits.
        counts: Number of images of each class in the whole set, (classes,).
    """
    errors = torch.sigmoid(LogitMargin()(logits, y) / width)  # the loss is minus the margin
    weights = counts.sum() / counts.clamp_min(1).to(errors)
    return torch.nn.functional.one_hot(y, logits.shape[1]).to(errors) * (weights[y] * errors)[:, None]


def soft_maximum(temperature: float, present: Tensor) -> Callable[[Tensor], Tensor]:
    """Return u -> R log mean_c exp(u_c / R) over the classes that are present.

    Args:
        temperature: R.
        present: Whether each class has images, (classes,).
    """

    def soft_maximum_of(u: Tensor) -> Tensor:
        scaled = u[present] / temperature
        return temperature * (scaled.logsumexp(0) - math.log(len(scaled)))

    return soft_maximum_of


def spread_of_margins(logits: Tensor, y: Tensor) -> float:
    """Return the standard deviation of the logit margins; 1 if all are equal."""
    spread = float(LogitMargin()(logits, y).double().std(correction=0))
    return spread if spread > 0 and math.isfinite(spread) else 1.0

"""Losses of each sample: what an attack increases and a method decreases.

A plain loss takes one set of logits. A paired loss compares the logits of the attacked images with those of the clean
ones: AT and DONE take either kind, attacks only plain ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from doubly.errors import UsageError
from doubly.settings import Settings, explained


class Loss(Settings):
    """A loss of one set of logits; a subclass is a frozen dataclass."""

    needs_clean_logits: ClassVar[bool] = False
    """whether the loss compares with the logits of the clean images"""

    @classmethod
    def accepts(cls, value: object) -> bool:
        """Return whether a value is a loss; a plain function of logits and labels is one, too."""
        return isinstance(value, cls) or (callable(value) and not isinstance(value, type))

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, (B,), from logits (B, classes) and labels (B,)."""
        raise NotImplementedError


class LossParts(NamedTuple):
    """A paired loss is the sum of two parts, each (B,)."""

    reweighted: Tensor  # what MAIL's weights multiply
    unweighted: Tensor


class PairedLoss(Loss):
    """A loss that compares the logits of attacked and clean images."""

    needs_clean_logits: ClassVar[bool] = True

    @explained
    def __call__(self, logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
        """Return the loss of each sample.

        Args:
            logits: Logits of the attacked images.
            y: Labels.
            clean: Logits of the clean images.

        Raises:
            UsageError: If `clean` is missing.
        """
        if clean is None:
            raise _unpaired(self, "the caller")
        reweighted, unweighted = self.parts(logits, y, clean)
        return reweighted + unweighted

    def parts(self, logits: Tensor, y: Tensor, clean: Tensor) -> LossParts:
        """Return the two parts whose sum is the loss."""
        raise NotImplementedError


def check_plain(loss: Loss, owner: str) -> None:
    """Refuse a paired loss where only one set of logits is known.

    Raises:
        UsageError: If the loss needs the clean logits.
    """
    if needs_clean_logits(loss):
        raise _unpaired(loss, owner)


def needs_clean_logits(loss: Loss) -> bool:
    """Return whether a loss needs the clean logits; a plain function does not."""
    return isinstance(loss, Loss) and loss.needs_clean_logits


def sample_losses(loss: Loss, logits: Tensor, y: Tensor, clean_logits: Callable[[], Tensor]) -> Tensor:
    """Return the loss of each sample, and compute the clean logits only where the loss needs them."""
    if isinstance(loss, PairedLoss):
        return loss(logits, y, clean_logits())
    return loss(logits, y)


def _unpaired(loss: Loss, owner: str) -> UsageError:
    return UsageError(
        f"{owner} knows one set of logits, but {type(loss).__name__} compares those of attacked and clean images: "
        "give it to AT or DONE as their loss, and use CrossEntropy or LogitMargin here"
    )


def _precise(logits: Tensor) -> Tensor:
    """Return the logits in float32 or better, also under autocast."""
    return logits if logits.dtype is torch.float64 else logits.float()


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-log softmax(z)_y."""

    @explained
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(_precise(logits), y, reduction="none")


@dataclass(frozen=True)
class LogitMargin(Loss):
    """max_{j != y} z_j - z_y: positive once the sample is misclassified; it does not saturate as probabilities do."""

    @explained
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        logits = _precise(logits)
        label_logit = logits.gather(1, y[:, None]).squeeze(1)
        other_logits = logits.scatter(1, y[:, None], float("-inf"))
        return other_logits.amax(1) - label_logit


def probability_margin(logits: Tensor, y: Tensor) -> Tensor:
    """Return p_y - max_{j != y} p_j of each sample, in [-1, 1]; negative once it is misclassified."""
    probabilities = _precise(logits).softmax(1)
    label_probability = probabilities.gather(1, y[:, None]).squeeze(1)
    other_probabilities = probabilities.scatter(1, y[:, None], 0.0)
    return label_probability - other_probabilities.amax(1)


def kl_divergence(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return KL(p || q) of p = softmax(logits) and q = softmax(other_logits), (B,); the gradient flows through both."""
    log_p, log_q = _precise(logits).log_softmax(1), _precise(other_logits).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


@dataclass(frozen=True)
class TradesLoss(PairedLoss):
    """CE(clean) + beta KL(p_clean || p_attacked), the loss of TRADES (Zhang et al. 2019)."""

    beta: float = 6.0
    """weight of the divergence; 0 is standard training"""

    def __post_init__(self) -> None:
        _check_beta(self.beta)

    def parts(self, logits: Tensor, y: Tensor, clean: Tensor) -> LossParts:
        return LossParts(self.beta * kl_divergence(clean, logits), CrossEntropy()(clean, y))


@dataclass(frozen=True)
class MartLoss(PairedLoss):
    """BCE(attacked) + beta KL(p_clean || p_attacked) (1 - p_clean,y), the loss of MART (Wang et al. 2020).

    BCE = -log p_y - log(1 - max_{j != y} p_j). The constants that keep the logarithm and the factor positive are
    those of the released code: 1.0001 + 1e-12 for the 1 of the logarithm, 1.0000001 for that of the factor.
    """

    beta: float = 5.0
    """weight of the divergence; 0 is the boosted cross-entropy alone"""
    detached: bool = False
    """whether 1 - p_y is a constant weight; as released it is not, and its gradient counts"""

    def __post_init__(self) -> None:
        _check_beta(self.beta)

    def parts(self, logits: Tensor, y: Tensor, clean: Tensor) -> LossParts:
        runner_up = _precise(logits).softmax(1).scatter(1, y[:, None], 0.0).amax(1)
        boosted = CrossEntropy()(logits, y) - (1.0001 - runner_up + 1e-12).log()
        doubt = 1.0000001 - _precise(clean).softmax(1).gather(1, y[:, None]).squeeze(1)
        doubt = doubt.detach() if self.detached else doubt
        return LossParts(boosted, self.beta * kl_divergence(clean, logits) * doubt)


def _check_beta(beta: float) -> None:
    if not 0 <= beta < float("inf"):
        raise UsageError(f"beta weighs a divergence and must be a number from 0 on, got {beta:g}")


LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "logit_margin": LogitMargin,
    "trades": TradesLoss,
    "mart": MartLoss,
}

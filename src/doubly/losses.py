"""Per-sample losses of logits: what an attack increases and a method decreases.

A plain loss looks at one set of logits. A paired loss compares those of the attacked images with those of the clean
ones, both of which depend on the network: AT and DONE take either kind, attacks only plain ones.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from doubly.errors import UsageError


@runtime_checkable
class Loss(Protocol):
    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B, classes), (B,) -> (B,)"""
        ...


class Parts(NamedTuple):
    """A paired loss is the sum of the two."""

    reweighted: Tensor  # (B,), what MAIL's weights multiply
    rest: Tensor  # (B,)


@runtime_checkable
class PairedLoss(Loss, Protocol):
    """A loss that cannot do without `clean`. Only those who look for `parts` know to hand it over."""

    def __call__(self, logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
        """Logits of the attacked images, labels, logits of the clean images -> (B,)"""
        ...

    def parts(self, logits: Tensor, y: Tensor, clean: Tensor) -> Parts: ...


def check_plain(loss: Loss, owner: str) -> None:
    """Refuses a paired loss where nobody hands over clean logits."""
    if isinstance(loss, PairedLoss):
        raise _unpaired(loss, owner)


def _unpaired(loss: PairedLoss, owner: str) -> UsageError:
    return UsageError(
        f"{owner} knows one set of logits, but {type(loss).__name__} compares those of attacked and clean images: "
        "give it to AT or DONE as their loss, and use CrossEntropy or LogitMargin here"
    )


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


def probability_margin(logits: Tensor, y: Tensor) -> Tensor:
    """p_y - max_{j != y} p_j, in [-1, 1], (B,): negative once the sample is misclassified (MAIL, WMMR)."""
    probabilities = _precise(logits).softmax(1)
    truth = probabilities.gather(1, y[:, None]).squeeze(1)
    others = probabilities.scatter(1, y[:, None], 0.0)
    return truth - others.amax(1)


def kl_divergence(logits: Tensor, others: Tensor) -> Tensor:
    """KL(p || q) of p = softmax(logits) and q = softmax(others), (B,); its gradient flows through both."""
    log_p, log_q = _precise(logits).log_softmax(1), _precise(others).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


@dataclass(frozen=True)
class TradesLoss:
    """CE(clean) + beta KL(p_clean || p_attacked), the loss of TRADES (Zhang et al. 2019)."""

    beta: float = 6.0
    """weight of the divergence; 0 is standard training"""

    def __post_init__(self) -> None:
        _check_beta(self.beta)

    def __call__(self, logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
        return _both(self, logits, y, clean)

    def parts(self, logits: Tensor, y: Tensor, clean: Tensor) -> Parts:
        return Parts(self.beta * kl_divergence(clean, logits), CrossEntropy()(clean, y))


@dataclass(frozen=True)
class MartLoss:
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

    def __call__(self, logits: Tensor, y: Tensor, clean: Tensor | None = None) -> Tensor:
        return _both(self, logits, y, clean)

    def parts(self, logits: Tensor, y: Tensor, clean: Tensor) -> Parts:
        rival = _precise(logits).softmax(1).scatter(1, y[:, None], 0.0).amax(1)
        boosted = CrossEntropy()(logits, y) - (1.0001 - rival + 1e-12).log()
        doubt = 1.0000001 - _precise(clean).softmax(1).gather(1, y[:, None]).squeeze(1)
        doubt = doubt.detach() if self.detached else doubt
        return Parts(boosted, self.beta * kl_divergence(clean, logits) * doubt)


def _both(loss: PairedLoss, logits: Tensor, y: Tensor, clean: Tensor | None) -> Tensor:
    if clean is None:
        raise _unpaired(loss, "the caller")
    reweighted, rest = loss.parts(logits, y, clean)
    return reweighted + rest


def _check_beta(beta: float) -> None:
    if not 0 <= beta < float("inf"):
        raise UsageError(f"beta weighs a divergence and must be a number from 0 on, got {beta:g}")


LOSSES: dict[str, type] = {
    "cross_entropy": CrossEntropy,
    "logit_margin": LogitMargin,
    "trades": TradesLoss,
    "mart": MartLoss,
}

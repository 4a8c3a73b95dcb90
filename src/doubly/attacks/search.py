"""Attempts on the samples that are still classified correctly: each leaves as soon as it is not."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from doubly.attacks.mode import Forward, connected
from doubly.bilevel import StepRule, projected_descent
from doubly.bilevel.rows import per_row
from doubly.checks import check_finite, check_logits
from doubly.errors import NonFiniteError
from doubly.losses import LogitMargin
from doubly.threat import Threat

ROUNDING = 1e-5  # of the largest logit: a margin below it may be negative in another batch, or in the unfolded network

Value = Callable[[Tensor, Tensor], Tensor]  # logits (B, classes), positions of the samples (B,) -> to increase, (B,)
Step = tuple[Value, StepRule]  # what to increase, and how


class Search:
    """The best perturbation of each sample so far, and which classes came how near."""

    def __init__(self, forward: Forward, x: Tensor, y: Tensor, threat: Threat) -> None:
        self.forward, self.x, self.y, self.threat = forward, x, y, threat
        with torch.no_grad():
            logits = forward(x)
        check_logits(logits, y)
        self.delta = torch.zeros_like(x)
        self.gaps = _gaps(logits, y)  # highest z_t - z_y so far, (B, classes); -inf for t = y
        self.highest = self.gaps.amax(1)  # highest logit margin so far: that of delta
        # One class cannot be wrong. Clean images that are wrong by less than rounding are attacked like correct ones.
        self.correct = (self.highest <= _rounding(logits)) & (self.gaps.shape[1] > 1)

    def margin(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return max_{j != y} z_j - z_y."""
        return LogitMargin()(logits, self.y[rows])

    def gap_to(self, target: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Return z_t - z_y of the target of each sample; `target` has those of all samples."""
        chosen = logits.gather(1, torch.stack((target[rows], self.y[rows]), 1))
        return chosen[:, 0] - chosen[:, 1]

    def nearest_classes(self, count: int) -> Tensor:
        """Return the classes with the highest z_t - z_y so far, the highest first, (B, count)."""
        return self.gaps.topk(min(count, self.gaps.shape[1] - 1), 1).indices

    def attempt(self, start: Tensor, steps: Sequence[Step]) -> None:
        """Take steps with the samples that are correct; each leaves as soon as it is not."""
        rows = self.correct.nonzero().flatten()
        delta = start[rows]
        for value, rule in steps:
            inner = partial(self._inner, rows, value)
            try:
                moved = projected_descent(inner, delta, self.threat.around(self.x[rows]), rule, 1)
            except NonFiniteError:
                raise
            except ArithmeticError:
                raise NonFiniteError("the attack's gradient: NaN or infinite, so nothing was attacked") from None
            remaining = self.correct[rows]
            rows, delta = rows[remaining], moved[remaining]
            if not len(rows):
                return
        with torch.no_grad():
            self._record(rows, delta, self.forward(self.x[rows] + delta))

    def _inner(self, rows: Tensor, value: Value, delta: Tensor) -> Tensor:
        point = self.x[rows] + delta
        logits = connected(self.forward(point), point)
        self._record(rows, delta.detach(), logits.detach())
        return -value(logits, rows)

    def _record(self, rows: Tensor, delta: Tensor, logits: Tensor) -> None:
        """Keep what is better than before, so that what breaks a sample is never replaced by what does not."""
        check_finite(logits, "the model's logits")
        gaps = _gaps(logits, self.y[rows])
        margins = gaps.amax(1)
        better = margins > self.highest[rows]
        self.delta[rows] = torch.where(per_row(better, delta), delta, self.delta[rows])
        self.highest[rows] = torch.where(better, margins, self.highest[rows])
        self.gaps[rows] = torch.maximum(gaps, self.gaps[rows])
        self.correct[rows] = margins <= _rounding(logits)


def _gaps(logits: Tensor, y: Tensor) -> Tensor:
    """Return z_t - z_y of each class t in float32 or better, (B, classes); -inf for t = y."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return (logits - logits.gather(1, y[:, None])).scatter(1, y[:, None], float("-inf"))


def _rounding(logits: Tensor) -> Tensor:
    return ROUNDING * logits.abs().amax(1)

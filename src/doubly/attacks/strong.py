"""A strong attack that is cheap: short targeted attempts on the samples that are still correct.

    first attempt:  PGD on max_{j != y} z_j - z_y from a uniform start
    each round:     for each sample the classes t with the highest z_t - z_y at any point visited so far; one after the
                    other PGD on z_t - z_y, from a uniform start and, from the second round on, from a few steps as long
                    as the radius on sum_k u_k z_k, u uniform in (-1, 1)

Step sizes fall from twice the radius to 0 along half a cosine. The step is the steepest one in the norm of the threat.
A sample leaves the batch as soon as it is misclassified, and needs no attempt if its clean image is.

The parts are known: random directions of logits as starts and falling steps from A3 (Liu et al. 2022), the choice of
targets from the multi-targeted attack (Gowal et al. 2019). Attempts are short because most samples that can be broken
are broken by another target and not by a longer search (docs/evaluation.md has the comparison with AutoAttack).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from doubly.attacks.attack import Attack
from doubly.attacks.mode import attack_context, connected
from doubly.bilevel import projected_descent
from doubly.bilevel.rows import per_row
from doubly.checks import check_finite, check_logits, checked_call
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import LogitMargin
from doubly.seeding import AnyGenerator, BatchGenerator
from doubly.threat import LinfBall, Threat, check_threat

ROUNDING = 1e-5  # of the largest logit: a margin below it may be negative in another batch

Value = Callable[[Tensor, Tensor], Tensor]  # logits (B, classes), positions of the samples (B,) -> to increase, (B,)
Step = tuple[Value, float]  # what to increase, and the size of the step


@dataclass(frozen=True)
class Strong(Attack):
    """Targeted attempts on the samples that are still correct; the iterate with the highest logit margin is kept.

    It is nearly as strong as AutoAttack at about a tenth of the gradients.

    Raises:
        UsageError: If a number is out of range.
    """

    threat: Threat = field(default_factory=LinfBall)
    """what the attacker may do"""
    steps: int = 10
    """steps of the first attempt, on the logit margin"""
    targets: int = 9
    """number of classes that a round tries, those nearest to winning; fewer where there are fewer"""
    target_steps: int = 9
    """steps toward each of them"""
    rounds: int = 2
    """number of rounds"""
    start_steps: int = 2
    """steps along a random direction of the logits that attempts start with from the second round on"""

    def __post_init__(self) -> None:
        check_threat(self.threat, type(self).__name__)
        if min(self.steps, self.targets, self.target_steps) < 1 or min(self.rounds, self.start_steps) < 0:
            raise UsageError(
                "the strong attack needs steps, targets and target_steps >= 1, rounds and start_steps >= 0, got "
                f"{self.steps}, {self.targets}, {self.target_steps}, {self.rounds} and {self.start_steps}"
            )

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        with checked_call(model, x, y), attack_context(model, "eval"):
            search = _Search(model, x, y, self.threat)
            for steps in self._attempts(search, BatchGenerator.of(generator)):
                search.attempt(*steps)
                if not search.correct.any():
                    break
        return search.delta

    def _attempts(self, search: "_Search", draws: BatchGenerator) -> Iterator[tuple[Tensor, Sequence[Step]]]:
        """Yield start and steps of each attempt; numbers are drawn for all samples, always in the same order."""
        constraint = self.threat.around(search.x)
        yield constraint.at(draws.uniform(search.x)), self._falling(search.margin, self.steps)
        for number in range(self.rounds):
            targets = search.nearest_classes(self.targets)
            for target in targets.unbind(1):
                start = constraint.at(draws.uniform(search.x))
                direction = 2 * draws.uniform(search.gaps) - 1
                along = [(partial(_along, direction), self.threat.radius)] * (self.start_steps if number else 0)
                yield start, [*along, *self._falling(partial(search.gap_to, target), self.target_steps)]

    def _falling(self, value: Value, count: int) -> list[Step]:
        """Return steps whose size falls from twice the radius along half a cosine."""
        return [(value, self.threat.radius * (1 + math.cos(math.pi * k / count))) for k in range(count)]


class _Search:
    """The best perturbation of each sample so far, and which classes came how near."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> None:
        self.model, self.x, self.y, self.threat = model, x, y, threat
        with torch.no_grad():
            logits: Tensor = model(x)
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
        for value, size in steps:
            inner = partial(self._inner, rows, value)
            try:
                moved = projected_descent(
                    inner, delta, self.threat.around(self.x[rows]), self.threat.step_rule(size), 1
                )
            except NonFiniteError:
                raise
            except ArithmeticError:
                raise NonFiniteError("the attack's gradient: NaN or infinite, so nothing was attacked") from None
            remaining = self.correct[rows]
            rows, delta = rows[remaining], moved[remaining]
            if not len(rows):
                return
        with torch.no_grad():
            self._record(rows, delta, self.model(self.x[rows] + delta))

    def _inner(self, rows: Tensor, value: Value, delta: Tensor) -> Tensor:
        point = self.x[rows] + delta
        logits = connected(self.model(point), point)
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


def _along(direction: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
    return (direction[rows] * logits).sum(1)


def _gaps(logits: Tensor, y: Tensor) -> Tensor:
    """Return z_t - z_y of each class t in float32 or better, (B, classes); -inf for t = y."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return (logits - logits.gather(1, y[:, None])).scatter(1, y[:, None], float("-inf"))


def _rounding(logits: Tensor) -> Tensor:
    return ROUNDING * logits.abs().amax(1)

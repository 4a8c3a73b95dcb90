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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from doubly.attacks.attack import Attack
from doubly.attacks.mode import attack_context
from doubly.attacks.search import Search, Step, Value
from doubly.checks import checked_call
from doubly.errors import UsageError
from doubly.seeding import AnyGenerator, BatchGenerator
from doubly.threat import LinfBall, Threat, check_threat


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
        with checked_call(model, x, y), attack_context(model, "eval", x) as forward:
            search = Search(forward, x, y, self.threat)
            for steps in self._attempts(search, BatchGenerator.of(generator)):
                search.attempt(*steps)
                if not search.correct.any():
                    break
        return search.delta

    def _attempts(self, search: Search, draws: BatchGenerator) -> Iterator[tuple[Tensor, Sequence[Step]]]:
        """Yield start and steps of each attempt; numbers are drawn for all samples, always in the same order."""
        constraint = self.threat.around(search.x)
        yield constraint.at(draws.uniform(search.x)), self._falling(search.margin, self.steps)
        for number in range(self.rounds):
            targets = search.nearest_classes(self.targets)
            for target in targets.unbind(1):
                start = constraint.at(draws.uniform(search.x))
                direction = 2 * draws.uniform(search.gaps) - 1
                start_step = (partial(_along, direction), self.threat.step_rule(self.threat.radius))
                along = [start_step] * (self.start_steps if number else 0)
                yield start, [*along, *self._falling(partial(search.gap_to, target), self.target_steps)]

    def _falling(self, value: Value, count: int) -> list[Step]:
        """Return steps whose size falls from twice the radius along half a cosine."""
        sizes = [self.threat.radius * (1 + math.cos(math.pi * k / count)) for k in range(count)]
        return [(value, self.threat.step_rule(size)) for size in sizes]


def _along(direction: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
    return (direction[rows] * logits).sum(1)

"""PGD that stops as soon as a sample is misclassified, for evaluations that only ask for accuracy."""

from dataclasses import dataclass, field, fields
from typing import Self

from torch import Tensor, nn

from doubly.attacks.attack import Attack
from doubly.attacks.mode import attack_context
from doubly.attacks.pgd import PGD, Start
from doubly.attacks.search import Search
from doubly.bilevel import NormalizedStep, SignStep, StepRule
from doubly.checks import checked_call
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss
from doubly.seeding import AnyGenerator, BatchGenerator
from doubly.threat import LinfBall, Threat


@dataclass(frozen=True)
class StoppingPGD(Attack):
    """PGD in evaluation mode on the samples that are classified correctly; each leaves as soon as it is not.

    Samples whose clean image is misclassified are not attacked. Of the others the iterate with the highest logit margin
    is kept, so accuracy is at most that under PGD with the same settings, which keeps the last iterate.

    Raises:
        UsageError: If settings are not valid for PGD, or the step has a state.
    """

    threat: Threat = field(default_factory=LinfBall)
    """what the attacker may do"""
    steps: int = 10
    """number of steps K"""
    rule: StepRule = None  # type: ignore[assignment]  # replaced by a rule before anybody sees it
    """how a step follows from the gradient; by default 2.5·ε/steps, as in PGD"""
    start: Start = "uniform"
    """uniform, gaussian or zero: see PGD"""
    restarts: int = 1
    """number of attempts"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what the attacker increases"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", self._pgd.rule)
        if not isinstance(self.rule, SignStep | NormalizedStep):
            raise UsageError(f"StoppingPGD takes a step without a state, SignStep or NormalizedStep, got {self.rule}")

    @property
    def _pgd(self) -> PGD:
        return PGD(**{setting.name: getattr(self, setting.name) for setting in fields(self)})

    @property
    def weakness(self) -> str | None:
        return self._pgd.weakness

    @classmethod
    def of(cls, attack: PGD) -> Self:
        """Return the attack with the settings of a PGD."""
        return cls(**{setting.name: getattr(attack, setting.name) for setting in fields(cls)})

    @classmethod
    def for_evaluation(cls, reference: Attack) -> Attack:
        assert isinstance(reference, PGD), "the reference attack of an evaluation"
        return cls.of(reference)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        pgd, draws = self._pgd, BatchGenerator.of(generator)

        def value(logits: Tensor, rows: Tensor) -> Tensor:
            return self.loss(logits, y[rows])

        with checked_call(model, x, y), attack_context(model, "eval", x) as forward:
            search = Search(forward, x, y, self.threat)
            for _ in range(self.restarts):
                search.attempt(pgd.start_points(x, None, draws), [(value, self.rule)] * self.steps)
        return search.delta

"""Projected gradient descent on the attack loss: PGD with any step rule, restarts, and the loop that methods share."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly import parallel
from doubly.attacks.mode import Mode, attacked
from doubly.bilevel import BarrierStep, SignStep, StepRule, projected_descent
from doubly.checks import check_finite, check_images, check_scores
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import CrossEntropy, Loss
from doubly.threat import LinfBall, Threat

Start = Literal["uniform", "zero"]


@dataclass(frozen=True)
class PGD:
    """Madry's attack: `steps` steps of `rule` on -loss, projected onto the threat's set; the last iterate is kept."""

    threat: Threat = field(default_factory=LinfBall)
    """what the attacker may do"""
    steps: int = 10
    """number of steps K"""
    rule: StepRule = field(default_factory=SignStep)
    """how a step follows from the gradient"""
    start: Start = "uniform"
    """uniform: at random inside the threat's set; zero: at the image itself"""
    restarts: int = 1
    """how often to try; the highest loss of each sample is kept"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what the attacker increases"""
    attack_mode: Mode = "eval"
    """eval: batch norm uses its running statistics while attacking; train: the batch's, which it then forgets"""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.restarts < 1:
            raise UsageError(
                f"an attack needs steps >= 0 and restarts >= 1, got steps={self.steps}, restarts={self.restarts}"
            )
        if not getattr(self.rule, "size", 1.0) > 0:
            raise UsageError(f"the step size of an attack must be positive, got {self.rule}")
        if isinstance(self.rule, BarrierStep) and not isinstance(self.threat, LinfBall):
            raise UsageError("a barrier step follows the barrier of a box: use LinfBall, or another step")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        check_images(x, y)
        with attacked(model, self.attack_mode):
            delta = self._attempt(model, x, y, generator)
            for _ in range(self.restarts - 1):
                other = self._attempt(model, x, y, generator)
                with torch.no_grad():
                    better = self.loss(model(x + other), y) > self.loss(model(x + delta), y)
                delta = torch.where(better.view(-1, *[1] * (x.dim() - 1)), other, delta)
        return delta

    def _attempt(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        constraint = self.threat.around(x)
        start = torch.zeros_like(x)
        if self.start == "uniform":
            start = constraint.at(parallel.uniform(x, generator))

        checked = False

        def inner(delta: Tensor) -> Tensor:
            nonlocal checked
            logits = model(x + delta)
            if not checked:  # once per attack: reading the labels waits for the device
                check_scores(logits, y)
                checked = True
            return -self.loss(logits, y)

        try:
            return projected_descent(inner, start, constraint, self.rule, self.steps)
        except ArithmeticError:
            with torch.no_grad():
                check_finite(model(x + start), "the model's logits")
            raise NonFiniteError("the attack's gradient: NaN or infinite, so nothing was attacked") from None

"""Projected gradient descent on the attack loss: PGD with any step rule, restarts, and the loop that methods share."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from doubly.attacks.forward import Forward, Mode, connected
from doubly.attacks.mode import attacked
from doubly.bilevel import BarrierStep, FirstThen, SignStep, StepRule, projected_descent
from doubly.checks import check_finite, check_images, check_scores
from doubly.distributed import collectives as parallel
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import CrossEntropy, Loss, check_plain, kl_divergence
from doubly.threat import LinfBall, Threat

Start = Literal["uniform", "gaussian", "zero"]
Value = Callable[[Tensor], Tensor]  # logits (B, classes) -> what the attacker increases, (B,)


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
    """uniform: at random in the threat's set; gaussian: noise of 0.001 around the image; zero: at the image itself"""
    restarts: int = 1
    """how often to try; the highest loss of each sample is kept"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what the attacker increases"""
    attack_mode: Mode = "eval"
    """eval: batch norm uses its running statistics while attacking; train: the batch's, which it then forgets"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "an attack")
        if self.steps < 0 or self.restarts < 1:
            raise UsageError(
                f"an attack needs steps >= 0 and restarts >= 1, got steps={self.steps}, restarts={self.restarts}"
            )
        for rule in (self.rule.first, self.rule.then) if isinstance(self.rule, FirstThen) else (self.rule,):
            if not getattr(rule, "size", 1.0) > 0:
                raise UsageError(f"the step size of an attack must be positive, got {rule}")
            if isinstance(rule, BarrierStep) and not isinstance(self.threat, LinfBall):
                raise UsageError("a barrier step follows the barrier of a box: use LinfBall, or another step")

    def scaled(self, share: float) -> "PGD":
        """The attack within `share` of the radius, with steps as much shorter."""
        return replace(self, threat=self.threat.scaled(share), rule=_shortened(self.rule, share))

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        return self.search(model, x, y, generator, lambda logits: self.loss(logits, y))

    def search(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        generator: torch.Generator,
        value: Value,
        moving: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """The same attack on any function of the logits. Each step calls it once, at the iterate that it leaves.

        `moving` is asked after each step which samples go on, (B,): the others leave the batch, and `value` is shown
        their last logits again. For rules without a state, in evaluation mode, where samples do not see each other.
        """
        check_images(x, y)
        with attacked(model, self.attack_mode):
            delta = self._attempt(model, x, y, generator, value, moving)
            for _ in range(self.restarts - 1):
                other = self._attempt(model, x, y, generator, value, moving)
                with torch.no_grad():
                    better = value(model(x + other)) > value(model(x + delta))
                delta = torch.where(better.view(-1, *[1] * (x.dim() - 1)), other, delta)
        return delta

    def diverge(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        """The same attack on KL(p(x) || p(x + delta)), which is that of TRADES; y is only checked.

        p(x) is taken once: taking it anew in each step gives the same, since the network does not change meanwhile.
        """
        self.check_diverge()
        check_images(x, y)
        with attacked(model, self.attack_mode), torch.no_grad():
            clean = model(x)
        return self.search(model, x, y, generator, lambda logits: kl_divergence(clean, logits))

    def check_diverge(self) -> None:
        """Refuses what `diverge` has no use for; for methods, when they are made."""
        if self.start == "zero":
            raise UsageError(
                "the divergence from p(x) has no gradient at x itself, so its attack would not leave a start at zero: "
                "use start gaussian or uniform"
            )
        if self.loss != CrossEntropy():
            raise UsageError(
                f"an attack on the divergence does not look at its loss, got {self.loss}: leave the loss out, or let "
                "attack_on be cross_entropy"
            )

    def _attempt(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        generator: torch.Generator,
        value: Value,
        moving: Callable[[], Tensor] | None,
    ) -> Tensor:
        start, checked = self._start(x, generator), False

        def inner(point: Tensor) -> Tensor:
            nonlocal checked
            logits: Tensor = model(point)
            if not checked:  # once per attack: reading the labels waits for the device
                check_scores(logits, y)
                checked = True
            return connected(logits, point)

        try:
            if moving is not None:
                return self._shrinking(inner, x, start, value, moving)
            constraint = self.threat.around(x)
            return projected_descent(lambda d: -value(inner(x + d)), start, constraint, self.rule, self.steps)
        except ArithmeticError:
            with torch.no_grad():
                check_finite(model(x + start), "the model's logits")
            raise NonFiniteError("the attack's gradient: NaN or infinite, so nothing was attacked") from None

    def _start(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if self.start == "zero":
            return torch.zeros_like(x)
        constraint, drawn = self.threat.around(x), parallel.uniform(x, generator)
        if self.start == "uniform":
            return constraint.at(drawn)
        # From uniform draws, which are alike at any number of processes.
        return constraint.project(0.001 * torch.special.ndtri(drawn.clamp(1e-6, 1 - 1e-6)))

    def _shrinking(
        self, scores: Forward, x: Tensor, start: Tensor, value: Value, moving: Callable[[], Tensor]
    ) -> Tensor:
        """One step at a time, of the samples that still move."""
        delta, rows = start.clone(), torch.arange(len(x), device=x.device)
        latest: Tensor | None = None  # logits of all samples

        def inner(part: Tensor) -> Tensor:
            nonlocal latest
            logits = scores(x[rows] + part)
            whole = logits if latest is None else latest.index_copy(0, rows, logits)
            latest = whole.detach()
            return -value(whole)

        for _ in range(self.steps):
            delta[rows] = projected_descent(inner, delta[rows], self.threat.around(x[rows]), self.rule, 1)
            rows = moving().nonzero().flatten()
            if len(rows) == 0:
                break
        return delta


def _shortened(rule: Any, share: float) -> Any:
    if isinstance(rule, FirstThen):
        return FirstThen(_shortened(rule.first, share), _shortened(rule.then, share))
    if not hasattr(rule, "size"):
        raise UsageError(f"{type(rule).__name__} has no size, so its steps cannot be scaled: use a step rule with one")
    return replace(rule, size=share * rule.size)

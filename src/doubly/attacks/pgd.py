"""PGD: projected gradient descent on the attack loss, with any step rule, restarts, and early stopping of samples."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from doubly.attacks.attack import Attack
from doubly.attacks.mode import Forward, Mode, attack_context, connected
from doubly.bilevel import Box, Constraint, StepRule, projected_descent
from doubly.bilevel.arguments import show
from doubly.bilevel.rows import per_row
from doubly.checks import check_finite, check_scores, checked_call
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import CrossEntropy, LogitMargin, Loss, check_plain, kl_divergence
from doubly.seeding import AnyGenerator, BatchGenerator
from doubly.threat import TOLERANCE, LinfBall, Threat, check_threat

Start = Literal["uniform", "gaussian", "zero"]
Value = Callable[[Tensor], Tensor]  # logits (B, classes) -> what the attacker increases, (B,)
REACH = (
    2.5  # radii that all steps of the default rule reach together: Madry's choice, which crosses the ball and returns
)
GAUSSIAN_START = 0.001  # standard deviation, as in the released code of TRADES, MART and MAIL


def default_rule(threat: Threat, steps: int) -> StepRule:
    """Return the step of an attack that names none: the steepest one in the norm of the threat, 2.5·radius/steps."""
    rule = threat.step_rule(threat.radius * (REACH / max(1, steps)))
    object.__setattr__(rule, "made_for", threat)  # dataclasses.replace hands the rule on, to another threat as well
    return rule


@dataclass(frozen=True)
class PGD(Attack):
    """Projected gradient descent: `steps` projected steps of `rule` that increase the loss; the last iterate is kept.

    Raises:
        UsageError: If a number is out of range, the rule does not fit the threat, or the loss compares with clean
            logits.
    """

    threat: Threat = field(default_factory=LinfBall)
    """what the attacker may do"""
    steps: int = 10
    """number of steps K"""
    rule: StepRule = None  # type: ignore[assignment]  # replaced by a rule before anybody sees it
    """how a step follows from the gradient; by default 2.5 radii over all steps, 2.5·ε/steps: a sign step for LinfBall,
    a step of that length along the gradient for L2Ball; such a step follows dataclasses.replace(attack, threat=…)"""
    start: Start = "uniform"
    """uniform: at random in the threat's set; gaussian: noise of 0.001 around the image; zero: at the image itself"""
    restarts: int = 1
    """number of attempts; the highest loss of each sample is kept"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what the attacker increases"""
    attack_mode: Mode = "eval"
    """eval: batch norm uses its running statistics during the attack; train: those of the batch, not updating them"""

    def __post_init__(self) -> None:
        check_threat(self.threat, type(self).__name__)
        check_plain(self.loss, "an attack")
        if self.steps < 0 or self.restarts < 1:
            raise UsageError(
                f"an attack needs steps >= 0 and restarts >= 1, got steps={self.steps}, restarts={self.restarts}"
            )
        is_rule = isinstance(self.rule, StepRule)
        if self.rule is None or (is_rule and self.rule.made_for is not None and self.rule.made_for != self.threat):
            # Stored as the rule it stands for, so that config.json names the step.
            object.__setattr__(self, "rule", default_rule(self.threat, self.steps))
        if not isinstance(self.rule, StepRule):
            raise UsageError(
                f"rule is a step rule such as SignStep(2 / 255), got {self.rule!r:.60}: leave it out for 2.5·ε/steps"
            )
        if not all(size > 0 for size in self.rule.sizes):
            raise UsageError(f"the step size of an attack must be positive, got {self.rule}")
        if self.rule.needs_box and not self.threat.has_barrier:
            raise UsageError("a barrier step follows the barrier of a box: use LinfBall, or another step")

    @property
    def weakness(self) -> str | None:
        if self.steps == 0:
            return f"{type(self).__name__} with 0 steps only adds noise, so accuracy under it is too high: take more"
        if self.rule.norm != self.threat.norm:
            return None
        reach = self.steps * self.rule.sizes[0] / self.threat.radius
        needed = 1 if self.steps == 1 or self.start != "uniform" else 2  # radii, from where the attack starts
        if reach >= needed * (1 - TOLERANCE):
            return None
        return (
            f"PGD with {self.steps} steps of {self.rule.sizes[0]:.4g} moves by at most {reach:.2g} radii, and crossing "
            f"its ball of radius {self.threat.radius:.4g} takes {needed}, so accuracy under it is too high: leave rule "
            "out, which makes the step 2.5·ε/steps, or take larger or more steps"
        )

    @classmethod
    def for_evaluation(cls, reference: Attack) -> Attack:
        return reference

    def with_class_factors(self, factors: Tensor) -> "PGD":
        check_factors(factors)
        settings = {setting.name: getattr(self, setting.name) for setting in fields(PGD)}
        return _ClassFactorPGD(**settings, factors=factors)

    def scaled(self, factor: float) -> Self:
        try:
            return replace(self, threat=self.threat.scaled(factor), rule=self.rule.scaled(factor))
        except TypeError as error:  # a rule without a size
            raise UsageError(str(error)) from None

    def within(self, threat: Threat) -> Self:
        factor = threat.radius / self.threat.radius
        if type(threat) is type(self.threat):
            return replace(self.scaled(factor), threat=threat)
        if type(self.rule) is not type(self.threat.step_rule(1.0)):
            raise UsageError(
                f"{type(self.rule).__name__} was chosen for {type(self.threat).__name__}: with another norm, choose a "
                "method whose attack takes the usual step of its norm, such as at, or set the threat and rule by --set"
            )
        return replace(self, threat=threat, rule=threat.step_rule(factor * self.rule.sizes[0]))

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        if self.weakness and (generator is None or isinstance(generator, int)):  # training mentions it once
            warnings.warn(self.weakness, stacklevel=2)
        return self.maximize(model, x, y, generator, lambda logits: self.loss(logits, y))

    def maximize(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        generator: AnyGenerator,
        value: Value,
        active: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Run the attack on any function of the logits.

        Args:
            model: The network; it is left as it was found.
            x: Images in [0, 1].
            y: Their labels.
            generator: Random numbers for the start.
            value: What to increase, from logits to one number per sample. Each step calls it once, at the iterate that
                the step starts from.
            active: Called after each step; returns which samples continue, (B,). The others leave the batch, and
                `value` receives their last logits again. For step rules without a state, in evaluation mode, where
                samples do not influence each other.

        Returns:
            delta, of the shape of `x`.

        Raises:
            UsageError: If images, labels and logits do not fit each other.
            NonFiniteError: If logits or the gradient are NaN or infinite.
        """
        draws = BatchGenerator.of(generator)
        with checked_call(model, x, y), attack_context(model, self.attack_mode, x) as forward:
            delta = self._attempt(forward, x, y, draws, value, active)
            for _ in range(self.restarts - 1):
                other = self._attempt(forward, x, y, draws, value, active)
                with torch.no_grad():
                    better = value(forward(x + other)) > value(forward(x + delta))
                delta = torch.where(per_row(better, x), other, delta)
        return delta

    def maximize_divergence(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator) -> Tensor:
        """Run the attack on KL(p(x) || p(x + delta)), as TRADES does.

        p(x) is computed once: the network does not change during the attack.

        Args:
            model: The network; it is left as it was found.
            x: Images in [0, 1].
            y: Their labels, which are only checked.
            generator: Random numbers for the start of the attack.

        Returns:
            The perturbation of each image.

        Raises:
            UsageError: If the attack starts at the image, has a loss of its own, or images and labels do not fit.
            NonFiniteError: If logits or the gradient are NaN or infinite.
        """
        self.check_divergence()
        with checked_call(model, x, y), attack_context(model, self.attack_mode, x) as forward, torch.no_grad():
            clean = forward(x)
        return self.maximize(model, x, y, generator, lambda logits: kl_divergence(clean, logits))

    def check_divergence(self) -> None:
        """Refuse settings with which `maximize_divergence` cannot work.

        Raises:
            UsageError: If the attack starts at the image, or has a loss of its own.
        """
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
        network: Forward,
        x: Tensor,
        y: Tensor,
        generator: BatchGenerator,
        value: Value,
        active: Callable[[], Tensor] | None,
    ) -> Tensor:
        scale = self.sample_factors(x, y)
        start, checked = self.start_points(x, scale, generator), False

        def forward(point: Tensor) -> Tensor:
            nonlocal checked
            logits = network(point)
            if not checked:  # once per attack: reading the labels waits for the device
                check_scores(logits, y)
                checked = True
            return connected(logits, point)

        try:
            if active is not None:
                delta = self._attempt_active(forward, x, scale, start, value, active)
            else:
                constraint = self._constraint(x, scale)
                delta = projected_descent(
                    lambda d: -value(forward(x + _times(d, scale))), start, constraint, self.rule, self.steps
                )
            return _times(delta, scale)
        except ArithmeticError:
            with torch.no_grad():
                check_finite(network(x + _times(start, scale)), "the model's logits")
            raise NonFiniteError("the attack's gradient: NaN or infinite, so nothing was attacked") from None

    def sample_factors(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return factors of the radius and step size of each sample, of a shape that broadcasts with `x`.

        None stands for 1. The attack moves delta / factor, which has the radius and step size of the settings.

        Args:
            x: Images in [0, 1].
            y: Their labels.
        """
        return None

    def _constraint(self, x: Tensor, scale: Tensor | None) -> Constraint:
        """Return the set in which delta / scale has to lie."""
        return self.threat.around(x) if scale is None else self.threat.between(-x / scale, (1 - x) / scale)

    def start_points(self, x: Tensor, scale: Tensor | None, generator: BatchGenerator) -> Tensor:
        """Return delta / scale where an attempt starts.

        Args:
            x: Images in [0, 1].
            scale: What `sample_factors` returned.
            generator: Random numbers.
        """
        if self.start == "zero":
            return torch.zeros_like(x)
        constraint, uniform = self._constraint(x, scale), generator.uniform(x)
        if self.start == "uniform":
            return constraint.at(uniform)
        # From uniform draws, which do not depend on the number of processes.
        return constraint.project(GAUSSIAN_START * torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)))

    def _attempt_active(
        self,
        forward: Forward,
        x: Tensor,
        scale: Tensor | None,
        start: Tensor,
        value: Value,
        active: Callable[[], Tensor],
    ) -> Tensor:
        """Take one step at a time, of the samples that are still active."""
        delta, rows = start.clone(), torch.arange(len(x), device=x.device)
        last_logits: Tensor | None = None  # of all samples

        def inner(part: Tensor) -> Tensor:
            nonlocal last_logits
            logits = forward(x[rows] + _times(part, None if scale is None else scale[rows]))
            all_logits = logits if last_logits is None else last_logits.index_copy(0, rows, logits)
            last_logits = all_logits.detach()
            return -value(all_logits)

        for _ in range(self.steps):
            constraint = self._constraint(x[rows], None if scale is None else scale[rows])
            delta[rows] = projected_descent(inner, delta[rows], constraint, self.rule, 1)
            rows = active().nonzero().flatten()
            if len(rows) == 0:
                break
        return delta


@dataclass(frozen=True)
class MarginPGD(PGD):
    """PGD on the logit margin, which finds what cross-entropy misses where the softmax is saturated."""

    loss: Loss = field(default_factory=LogitMargin)
    """what the attacker increases"""

    @classmethod
    def for_evaluation(cls, reference: Attack) -> Attack:
        return replace(reference, loss=LogitMargin())  # type: ignore[type-var]  # the reference is a PGD


@dataclass(frozen=True, eq=False)
class _ClassFactorPGD(PGD):
    """PGD with radii and step sizes that depend on the class; made by `with_class_factors`, not by a recipe."""

    factors: Tensor = field(default_factory=lambda: torch.ones(1))
    """factor of the radius and of the step size by class, (classes,)"""

    def with_class_factors(self, factors: Tensor) -> PGD:
        return replace(self, factors=self.factors * factors)

    def sample_factors(self, x: Tensor, y: Tensor) -> Tensor:
        labels = y.clamp(0, len(self.factors) - 1)  # others are refused with the first logits
        return per_row(self.factors[labels].to(x), x)

    def box(self, x: Tensor, y: Tensor) -> Box:
        return self.threat.box(x, self.sample_factors(x, y))


def check_factors(factors: Any) -> None:
    """Refuse class factors that are not a number for each class."""
    numbers = isinstance(factors, Tensor) and factors.is_floating_point() and factors.layout is torch.strided
    if not numbers or factors.dim() != 1 or not factors.numel() or factors.is_meta:
        raise UsageError(f"class factors are a tensor (classes,) of positive numbers, got {show(factors)}")


def _times(delta: Tensor, scale: Tensor | None) -> Tensor:
    return delta if scale is None else scale * delta

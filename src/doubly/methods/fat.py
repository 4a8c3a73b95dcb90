"""Friendly adversarial training (FAT; Zhang et al. 2020): the attack on a sample stops soon after it fools the model.

    mean loss(x_stop),   stop = first k < K at which x_k is misclassified for the (tau + 1)-th time, else K

The check comes before a step, at the iterate the step would leave, so with tau = 0 the random start itself may be kept.
A sample that stops adds nothing to what the attack increases; its gradient is 0 and so is its step. It then leaves the
batch, and later passes are the smaller. Samples keep their order; the released code loops over samples and returns them
in another order, with the same loss. Left out: the Gaussian noise of 0.001 that the released code
adds to each step, since steps here follow from the gradient alone.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD
from doubly.bilevel import GradientStep, NormalizedStep, SignStep
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.schedules import Piecewise, Schedule
from doubly.types import Batch, Objective, State, TrainStep


@dataclass(frozen=True)
class FAT:
    """mean loss(x + delta), delta by an attack that leaves a sample alone once it was fooled tau + 1 times."""

    attack: PGD = field(default_factory=PGD)
    """the attack that is stopped early; its steps must stand still where the gradient is 0"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""
    tau: Schedule = field(default_factory=lambda: Piecewise((0.0, 1.0, 2.0), (50 / 120, 90 / 120)))
    """how often a fooled sample may go on, a whole number from 0 to the number of steps K; K is AT"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "FAT")
        tau, steps = self.tau, self.attack.steps
        values = tau.values if isinstance(tau, Piecewise) else [tau.at(percent / 100) for percent in range(100)]
        wrong = [value for value in values if value not in range(steps + 1)]
        if wrong:
            raise UsageError(
                f"tau must be a whole number from 0 to the attack's {steps} steps, got {wrong[0]:g}: "
                "give a constant or piecewise schedule of such numbers"
            )
        if not isinstance(self.attack.rule, SignStep | GradientStep | NormalizedStep):
            raise UsageError(
                "FAT stops a sample by a gradient of 0, so its attack needs a rule that then stands still: SignStep, "
                f"GradientStep or NormalizedStep, got {type(self.attack.rule).__name__}"
            )
        if self.attack.restarts != 1 or self.attack.attack_mode != "eval":
            raise UsageError(
                "FAT needs an attack with restarts 1, since a restart keeps the highest loss, and attack_mode eval, "
                f"since batch statistics let samples move each other; got restarts {self.attack.restarts}, "
                f"attack_mode {self.attack.attack_mode}"
            )

    def init(self, counts: Tensor | None = None) -> State:
        return {}

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        delta, taken = self.stopped(model, batch, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        record = {"backpropagations": taken.to(losses).mean()}
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state, record)

    def stopped(self, model: nn.Module, batch: Batch, step: TrainStep) -> tuple[Tensor, Tensor]:
        """delta, and how many steps each sample took, which is how often it was back-propagated through."""
        budget = torch.full_like(batch.y, int(self.tau.at(step.progress)))
        moving, taken = torch.ones_like(batch.y, dtype=torch.bool), torch.zeros_like(batch.y)

        def value(logits: Tensor) -> Tensor:
            nonlocal budget, moving, taken
            fooled = logits.detach().argmax(1) != batch.y
            moving = moving & ~(fooled & (budget == 0))
            budget, taken = budget - (fooled & moving).long(), taken + moving.long()
            losses = self.attack.loss(logits, batch.y)
            return torch.where(moving, losses, torch.zeros_like(losses))

        delta = self.attack.search(model, batch.x, batch.y, step.generator("attack"), value, lambda: moving)
        return delta, taken

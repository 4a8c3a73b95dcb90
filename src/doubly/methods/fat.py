"""FAT, friendly adversarial training (Zhang et al. 2020): the attack on a sample stops soon after it fools the model.

    mean loss(x_stop),   stop = first k < K at which x_k is misclassified for the (tau + 1)-th time, else K

The check comes before a step, at the iterate that the step would leave, so with tau = 0 the random start itself may be
kept. A sample that stops adds nothing to what the attack increases: its gradient is 0, and so is its step. It then
leaves the batch, which makes later passes smaller. Samples keep their order; the released code returns them in another
order, with the same loss. Left out: the Gaussian noise of 0.001 that the released code adds to each step.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from doubly.attacks import PGD
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.methods.method import Method
from doubly.schedules import Constant, Piecewise, Schedule
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class FAT(Method):
    """Adversarial training with an attack that stops on a sample once it was misclassified tau + 1 times.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=PGD)
    """the attack that is stopped early; its steps must not move where the gradient is 0"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""
    tau: Schedule = field(default_factory=lambda: Piecewise((0.0, 1.0, 2.0), (50 / 120, 90 / 120)))
    """number of times that a sample may be misclassified before its attack stops; from 0 to the steps K, which is AT"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "FAT")
        steps = self.attack.steps
        wrong = [value for value in self.tau.values_taken() if value not in range(steps + 1)]
        if wrong:
            raise UsageError(
                f"tau must be a whole number from 0 to the attack's {steps} steps, got {wrong[0]:g}: "
                "give a constant or piecewise schedule of such numbers"
            )
        if not self.attack.rule.rests_without_gradient:
            raise UsageError(
                "FAT stops a sample by a gradient of 0, so its attack needs a rule that then does not move: SignStep, "
                f"GradientStep or NormalizedStep, got {type(self.attack.rule).__name__}"
            )
        if self.attack.restarts != 1 or self.attack.attack_mode != "eval":
            raise UsageError(
                "FAT needs an attack with restarts 1, since a restart keeps the highest loss, and attack_mode eval, "
                f"since batch statistics let samples move each other; got restarts {self.attack.restarts}, "
                f"attack_mode {self.attack.attack_mode}"
            )

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        """Attack with early stopping; the values are how many steps each sample took."""
        budget = torch.full_like(batch.y, int(self.tau.at(step.progress)))
        active, steps = torch.ones_like(batch.y, dtype=torch.bool), torch.zeros_like(batch.y)

        def value(logits: Tensor) -> Tensor:
            nonlocal budget, active, steps
            fooled = logits.detach().argmax(1) != batch.y
            active = active & ~(fooled & (budget == 0))
            budget, steps = budget - (fooled & active).long(), steps + active.long()
            losses = self.attack.loss(logits, batch.y)
            return torch.where(active, losses, torch.zeros_like(losses))

        delta = self.attack.maximize(model, batch.x, batch.y, step.generator("attack"), value, lambda: active)
        return Perturbation(delta, {"steps": steps})

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, values = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        record = {"backpropagations": values["steps"].to(losses).mean()}
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state, record)

    def costliest(self) -> "FAT":
        return replace(self, tau=Constant(float(self.attack.steps)))

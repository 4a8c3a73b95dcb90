"""Fast-AT with gradient alignment (GradAlign; Andriushchenko and Flammarion 2020).

    mean CE(x + delta) + strength * (1 - mean cos(g(x), g(x + e))),  g = input gradient of CE,  e ~ U(-epsilon, epsilon)

A network whose input gradient turns within the ball is one that a single step cannot attack: the penalty keeps it
straight. g(x) is a constant, g(x + e) is differentiated; samples without a gradient do not count. The released code
reuses the attack's own gradient as g(x), which is that at x only for a zero start; here it is always taken at x.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from doubly.attacks import FGSM, frozen_statistics, replay_rng, rng_state
from doubly.checks import check_logits
from doubly.distributed import Communicator
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss
from doubly.methods.method import Method, check_attack
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class FastATGA(Method):
    """FGSM training with aligned input gradients.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: FGSM = field(default_factory=lambda: FGSM(reach=1.25))
    """one sign step; from the image, so that its projection makes it exactly epsilon long"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""
    strength: float = 0.2
    """weight of the penalty; published for CIFAR-10: 0.2 at 8/255, 0.632 at 12/255, 2 at 16/255; SVHN 2.5 at 8/255"""

    checks_itself: ClassVar[tuple[str, ...]] = ("attack",)  # any attack works

    def __post_init__(self) -> None:
        check_attack(self.attack, "FastATGA")
        if not self.strength >= 0:
            raise UsageError(f"the strength of gradient alignment must not be negative, got {self.strength:g}")

    @property
    def needs_second_derivatives(self) -> bool:
        return self.strength > 0

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        if self.strength == 0:
            return None
        with frozen_statistics(model), torch.autocast(batch.x.device.type, enabled=False):
            at_image, at_noise = self._gradients(model, batch, step, create_graph=False)
        return _nonzero(at_image, at_noise).long()

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        dropout = rng_state()
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        loss, alignment = losses.mean(), torch.ones((), device=losses.device)
        if self.strength > 0:
            # The second derivative drowns in half precision.
            with frozen_statistics(model), torch.autocast(batch.x.device.type, enabled=False), replay_rng(dropout):
                at_image, at_noise = self._gradients(model, batch, step, create_graph=True)
            alignment = _mean_cosine(at_image, at_noise, step.communicator)
            loss = loss + self.strength * (1 - alignment)
        weights = torch.ones_like(losses)
        record = {"alignment": alignment.detach()}
        return Objective(loss, losses.detach(), weights, logits.detach(), state, record)

    def _gradients(
        self, model: nn.Module, batch: Batch, step: TrainStep, *, create_graph: bool
    ) -> tuple[Tensor, Tensor]:
        """Return g(x) and g(x + e), one row per sample, under the same dropout."""
        noise = self.attack.threat.radius * (2 * step.generator("alignment").uniform(batch.x) - 1)
        dropout = rng_state()
        at_image = self._gradient(model, batch.x, batch.y, create_graph=False)
        with replay_rng(dropout):
            return at_image, self._gradient(model, batch.x + noise, batch.y, create_graph=create_graph)

    def _gradient(self, model: nn.Module, x: Tensor, y: Tensor, *, create_graph: bool) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.loss(model(x), y).sum(), x, create_graph=create_graph)[0].flatten(1)


def _nonzero(constant: Tensor, other: Tensor) -> Tensor:
    """Return which samples have gradients that are not zero, (B,)."""
    tiny = torch.finfo(other.dtype).tiny
    return (constant.square().sum(1) > tiny) & (other.detach().square().sum(1) > tiny)


def _mean_cosine(constant: Tensor, other: Tensor, communicator: Communicator) -> Tensor:
    """Return this process's share of the mean over all samples whose gradients are not zero; 1 if there is none."""
    nonzero = _nonzero(constant, other)
    all_nonzero = communicator.all_gather(nonzero.long())
    if not all_nonzero.any():
        return torch.ones((), dtype=other.dtype, device=other.device)
    cosines = torch.cosine_similarity(constant[nonzero], other[nonzero], dim=1)
    return cosines.sum() * (len(all_nonzero) / len(nonzero)) / all_nonzero.sum()

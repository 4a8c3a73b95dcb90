"""Fast-AT with gradient alignment (GradAlign; Andriushchenko and Flammarion 2020).

    mean CE(x + delta) + strength * (1 - mean cos(g(x), g(x + e))),  g = input gradient of CE,  e ~ U(-epsilon, epsilon)

A network whose input gradient turns within the ball is one that a single step cannot attack: the penalty keeps it
straight. g(x) is a constant, g(x + e) is differentiated; samples without a gradient do not count. The released code
reuses the attack's own gradient as g(x), which is that at x only for a zero start; here it is always taken at x.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import FGSM, draws, repeating, statistics_frozen
from doubly.checks import check_logits
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss
from doubly.types import Batch, Objective, State, TrainStep


@dataclass(frozen=True)
class FastATGA:
    """FGSM training with aligned input gradients."""

    attack: FGSM = field(default_factory=lambda: FGSM(reach=1.25))
    """one sign step; from the image, so that its projection makes it exactly epsilon long"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""
    strength: float = 0.2
    """of the penalty; published for CIFAR-10: 0.2 at 8/255, 0.632 at 12/255, 2 at 16/255; SVHN 2.5 at 8/255"""

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise UsageError(f"the strength of gradient alignment is not negative, got {self.strength:g}")

    @property
    def differentiates_twice(self) -> bool:
        return self.strength > 0

    def init(self, counts: Tensor | None = None) -> State:
        return {}

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        delta = self.attack(model, batch.x, batch.y, step.generator("attack"))
        stand = draws()
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        scalar, alignment = losses.mean(), torch.ones((), device=losses.device)
        if self.strength > 0:
            radius = self.attack.threat.radius
            noise = radius * (2 * parallel.uniform(batch.x, step.generator("alignment")) - 1)
            # The second derivative drowns in half precision.
            with statistics_frozen(model), torch.autocast(batch.x.device.type, enabled=False):
                with repeating(stand):
                    here = self._gradient(model, batch.x, batch.y, create_graph=False)
                with repeating(stand):
                    there = self._gradient(model, batch.x + noise, batch.y, create_graph=True)
            alignment = _mean_cosine(here, there)
            scalar = scalar + self.strength * (1 - alignment)
        weights = torch.ones_like(losses)
        record = {"alignment": alignment.detach()}
        return Objective(scalar, losses.detach(), weights, logits.detach(), state, record)

    def _gradient(self, model: nn.Module, x: Tensor, y: Tensor, create_graph: bool) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.loss(model(x), y).sum(), x, create_graph=create_graph)[0].flatten(1)


def _mean_cosine(constant: Tensor, other: Tensor) -> Tensor:
    """This process's share of the mean over all samples whose gradients are not zero; 1 where there is none."""
    tiny = torch.finfo(other.dtype).tiny
    alive = (constant.square().sum(1) > tiny) & (other.detach().square().sum(1) > tiny)
    everyone = parallel.gather(alive.long())
    if not everyone.any():
        return torch.ones((), dtype=other.dtype, device=other.device)
    cosines = torch.cosine_similarity(constant[alive], other[alive], dim=1)
    return cosines.sum() * (len(everyone) / len(alive)) / everyone.sum()

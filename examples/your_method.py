"""A method of your own: adversarial training on smoothed labels. Only `objective` has to be written."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from doubly import PGD, Batch, LinfBall, Objective, TrainStep, evaluate, train
from doubly.attacks import Attack
from doubly.methods import Method
from doubly.types import State


@dataclass(frozen=True)
class SmoothedAT(Method):
    """AT with smoothed labels."""

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    smoothing: float = 0.1
    """share of the label that is spread over all classes"""

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        delta = self.attack(model, batch.x, batch.y, step.generator("attack"))
        logits = model(batch.x + delta)
        losses = F.cross_entropy(logits, batch.y, reduction="none", label_smoothing=self.smoothing)
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state)


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    train(model, (x[:1400], y[:1400]), SmoothedAT(PGD(LinfBall(0.1))), epochs=10)
    result = evaluate(model, (x[1400:], y[1400:]), LinfBall(0.1))
    print(f"accuracy {result.sa:.1%}, under attack {result.ra_pgd:.1%}, weakest classes {result.ra_tail_30:.1%}")

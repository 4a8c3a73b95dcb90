"""An attack of your own: shift the brightness of an image. It can be trained on and evaluated with."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from doubly import AT, PGD, LinfBall, evaluate, train
from doubly.attacks import Attack, attack_context
from doubly.seeding import BatchGenerator


@dataclass(frozen=True)
class Brightness(Attack):
    """The one shift of all pixels, out of `tries` between -radius and radius, at which the loss is highest."""

    threat: LinfBall = field(default_factory=LinfBall)
    """what the attacker may do"""
    tries: int = 11
    """shifts to try"""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: BatchGenerator | torch.Generator) -> Tensor:
        allowed = self.threat.around(x)  # the ball, cut to the image range
        best, highest = torch.zeros_like(x), torch.full_like(x[:, 0, 0, 0], -torch.inf)
        with attack_context(model, "eval"), torch.no_grad():  # leaves the model as it was
            for shift in torch.linspace(-self.threat.radius, self.threat.radius, self.tries):
                delta = allowed.project(torch.full_like(x, shift.item()))
                losses = F.cross_entropy(model(x + delta), y, reduction="none")
                better = losses > highest
                best = torch.where(better.view(-1, 1, 1, 1), delta, best)
                highest = torch.where(better, losses, highest)
        return best


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
    ball = LinfBall(0.1)
    for attack in (Brightness(ball), PGD(ball)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        train(model, (x[:1400], y[:1400]), AT(attack), epochs=10)
        attacks = {"pgd": PGD(ball, steps=20), "brightness": Brightness(ball)}
        result = evaluate(model, (x[1400:], y[1400:]), ball, attacks)
        shifted, pgd = result.accuracy("brightness"), result.ra_pgd
        print(f"trained with {type(attack).__name__}: brightness {shifted:.1%}, PGD {pgd:.1%}")

"""Small problems that several methods are tested on."""

import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.threat import LinfBall
from doubly.types import Batch

NO_ATTACK = PGD(LinfBall(0.1), 0, start="zero")  # delta = 0, so that the logits are known


def trained_network():
    """Return a network that knows the classes of `labeled_noise` somewhat: an attack needs 0 to more than K steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)
        model = nn.Sequential(nn.Flatten(), *layers).double().train()
    samples = labeled_noise(64)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(25):
        optimizer.zero_grad()
        F.cross_entropy(model(samples.x), samples.y).backward()
        optimizer.step()
    model.zero_grad()
    return model


def labeled_noise(count=24):
    """Return noise that is brighter the higher its class."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 4
    x = torch.rand(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return Batch(0.6 * x + 0.1 * y.view(-1, 1, 1, 1), y, torch.arange(count))


def plain_noise(count=8):
    """Return noise with random labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return Batch(x, torch.randint(4, (count,), generator=generator), torch.arange(count))


def by_batch_statistics(model, x):
    """Return the network's logits in training mode, without updating its running statistics."""
    norm = model[2]
    return model[4](F.batch_norm(model[1](x.flatten(1)), None, None, norm.weight, norm.bias, True).tanh())


def gradients(loss, model):
    """Return the gradients of the parameters."""
    return torch.autograd.grad(loss, list(model.parameters()))


def flat_gradient(loss, model):
    """Return the gradient of all parameters as one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients(loss, model)])


def small_network(classes=3):
    """Return a network with batch norm, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes)]
        return nn.Sequential(*layers).double().train()


def three_classes(count=9):
    """Return noise of three classes, in turn."""
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


class Oracle(nn.Module):
    """Predicts class z for an image whose only pixel is z / 10."""

    def __init__(self, classes=3):
        super().__init__()
        self.classes, self.scale = classes, nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        prediction = (10 * x.flatten(1)[:, 0]).round().long()
        return self.scale * F.one_hot(prediction, self.classes).to(x)


def predicted(predictions, y):
    """Return images for which Oracle makes these predictions."""
    return Batch(torch.tensor(predictions).view(-1, 1, 1, 1) / 10, torch.tensor(y), torch.arange(len(y)))

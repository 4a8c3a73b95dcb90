"""PGD in an l2 ball against foolbox's; that in an l-infinity ball is in tests/attacks/test_pgd.py."""

import warnings

import eagerpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import NormalisedStep
from doubly.threat import L2Ball

with warnings.catch_warnings(action="ignore"):  # foolbox imports a name that scipy has moved
    import foolbox

EPSILON, SIZE = 0.4, 0.15


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8 * 9, 5)).eval()


@pytest.fixture(scope="module")
def batch():
    """Away from the ends of the image range, where foolbox clips and doubly projects onto ball and range at once."""
    generator = torch.Generator().manual_seed(1)
    return 0.4 + 0.2 * torch.rand(12, 1, 8, 8, generator=generator), torch.randint(5, (12,), generator=generator)


class FromStart(foolbox.attacks.L2PGD):
    """Foolbox's attack from a start that is handed in."""

    def __init__(self, start, **settings):
        super().__init__(random_start=True, **settings)
        self.start = start

    def get_random_start(self, x0, epsilon):
        return eagerpy.astensor(x0.raw + self.start)


@pytest.mark.parametrize("start", ["zero", "uniform"])
def test_an_l2_attack_has_the_losses_of_foolbox_step_by_step(model, batch, start):
    x, y = batch
    begin = PGD(L2Ball(EPSILON), 0, NormalisedStep(SIZE), start)(model, x, y, torch.Generator().manual_seed(0))
    assert (begin.abs().max() > 0) == (start == "uniform")
    theirs = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    previous = -torch.inf
    for steps in range(1, 9):
        attack = FromStart(begin, steps=steps, abs_stepsize=SIZE)
        expected = attack.run(theirs, x, foolbox.criteria.Misclassification(y), epsilon=EPSILON) - x
        found = PGD(L2Ball(EPSILON), steps, NormalisedStep(SIZE), start)(model, x, y, torch.Generator().manual_seed(0))
        ours, others = (F.cross_entropy(model(x + d), y, reduction="none").detach() for d in (found, expected))
        assert torch.allclose(ours, others, atol=1e-5) and torch.allclose(found, expected, atol=1e-5)
        assert ours.mean() > previous - 1e-4
        previous = ours.mean()
    assert torch.allclose(found.flatten(1).norm(dim=1), torch.tensor(EPSILON), rtol=1e-4)  # the ball was reached

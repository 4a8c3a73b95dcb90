"""The steps of an attack must not wait for the device: what reads a number is done once, however many there are."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from doubly.attacks import FGSM, NFGSM, PGD
from doubly.bilevel import AdamStep, BarrierStep, FirstThen, GradientStep, MomentumStep, NormalizedStep, SignStep
from doubly.losses import LOSSES, PairedLoss
from doubly.methods import AT, DONE, GAIRAT, TRADES
from doubly.types import Batch, TrainStep

WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "allclose", "item"}
RULES = [SignStep(), GradientStep(), NormalizedStep(), MomentumStep(), AdamStep(), BarrierStep(), FirstThen()]
X, Y = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


class Waits(TorchDispatchMode):
    """Counts the operations that read a value on the host, or whose result has a shape that depends on one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        masks = args[1] if name in ("index", "index_put", "index_put_") else []
        self.count += name in WAITS or any(mask is not None and mask.dtype is torch.bool for mask in masks)
        return function(*args, **(kwargs or {}))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))


def waits(work):
    with Waits() as found:
        work()
    return found.count


def attacked(kind):
    return waits(lambda: kind(network(), X, Y, torch.Generator().manual_seed(0)))


def test_reading_a_number_is_noticed():
    assert waits(lambda: X.sum().item()) == 1
    assert waits(lambda: bool(X.any())) >= 1
    assert waits(lambda: X[X > 0.5]) >= 1 and waits(lambda: (X > 0.5).nonzero()) == 1
    assert waits(lambda: X + 1) == 0


@pytest.mark.parametrize("start", ["uniform", "gaussian", "zero"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_the_steps_of_an_attack_do_not_wait(rule, start):
    few, many = (attacked(PGD(steps=steps, rule=rule, start=start)) for steps in (1, 7))
    assert few == many < 10


@pytest.mark.parametrize("loss", [kind() for kind in LOSSES.values() if not issubclass(kind, PairedLoss)], ids=repr)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_nor_do_losses_and_modes(loss, mode):
    few, many = (attacked(PGD(steps=steps, loss=loss, attack_mode=mode)) for steps in (1, 7))
    assert few == many < 10


@pytest.mark.parametrize("kind", [FGSM(), NFGSM()], ids=repr)
def test_nor_do_the_single_steps(kind):
    assert attacked(kind) < 10


@pytest.mark.parametrize("method", [AT, DONE, GAIRAT, TRADES])
def test_nor_does_what_methods_count_on_the_way(method):
    def step(steps):
        made = method(PGD(steps=steps, start="gaussian"))
        made.objective(network().train(), Batch(X, Y, torch.arange(6)), made.init(), TrainStep())

    few, many = (waits(lambda steps=steps: step(steps)) for steps in (2, 7))
    assert few == many

"""The steps of an attack must not wait for the device: numbers are read once per attack, however many steps it has."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from doubly.attacks import FGSM, NFGSM, PGD
from doubly.bilevel import STEP_RULES
from doubly.losses import LOSSES, PairedLoss
from doubly.methods import AT, DONE, GAIRAT, TRADES
from doubly.types import Batch, TrainStep

WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "allclose", "item"}
RULES = [kind() for kind in STEP_RULES.values()]
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
    with Waits() as counter:
        work()
    return counter.count


def attack_waits(attack):
    return waits(lambda: attack(network(), X, Y, torch.Generator().manual_seed(0)))


def test_reading_a_number_is_noticed():
    assert waits(lambda: X.sum().item()) == 1
    assert waits(lambda: bool(X.any())) >= 1
    assert waits(lambda: X[X > 0.5]) >= 1 and waits(lambda: (X > 0.5).nonzero()) == 1
    assert waits(lambda: X + 1) == 0


def test_the_steps_of_an_attack_do_not_wait():
    plain_losses = [kind() for kind in LOSSES.values() if not issubclass(kind, PairedLoss)]
    settings = [
        *({"rule": rule, "start": start} for rule in RULES for start in ("uniform", "gaussian", "zero")),
        *({"loss": loss, "attack_mode": mode} for loss in plain_losses for mode in ("eval", "train")),
    ]
    for values in settings:
        short, long = (attack_waits(PGD(steps=steps, **values)) for steps in (1, 7))
        assert short == long < 10, values
    for attack in (FGSM(), NFGSM()):
        assert attack_waits(attack) < 10, attack


def test_nor_do_methods_that_count_along_the_attack():
    def train_step(kind, steps):
        method = kind(PGD(steps=steps, start="gaussian"))
        method.objective(network().train(), Batch(X, Y, torch.arange(6)), method.init(), TrainStep())

    for kind in (AT, DONE, GAIRAT, TRADES):
        short, long = (waits(lambda steps=steps, kind=kind: train_step(kind, steps)) for steps in (2, 7))
        assert short == long, kind

"""The passes that one update costs, counted: not one more than the formula needs."""

from typing import NamedTuple

import torch
from torch import nn

from doubly.attacks import PGD
from doubly.attacks.folding import FoldedForward
from doubly.bilevel import SignStep
from doubly.losses import LogitMargin
from doubly.methods import AT, AWP, DONE, METHODS, FastATGA, FastBAT, Standard
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep

K = 4


class Passes(NamedTuple):
    forward: int  # through the network
    backward: int  # of the output, to the input or to the parameters
    double: int  # through a backward pass
    batches: int  # forward passes in training mode that update batch norm's statistics


class Tick(torch.autograd.Function):
    """The identity; counts how often a gradient flows back through it, and how often through that again."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.count["backward"] += 1
        return TickBack.apply(gradient, ctx.count), None


class TickBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, count):
        ctx.count = count
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, gradient):
        ctx.count["double"] += 1
        return gradient, None


class Counted(nn.Module):
    """A small network with batch norm that counts the passes through the middle of it."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Tanh())
            self.last = nn.Linear(12, 3)
        self.count = {"forward": 0, "backward": 0, "double": 0}

    def forward(self, x):
        self.count["forward"] += 1
        return self.last(Tick.apply(self.first(x), self.count))


def passes(method, progress=0.7):
    model = Counted().eval()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(6, 1, 4, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    FoldedForward(model, x)  # once per network, which layers can be folded is found by further passes
    model.train().count.update(dict.fromkeys(model.count, 0))
    result = method.objective(model, Batch(x, y, y), method.init(torch.full((3,), 2)), TrainStep(progress=progress))
    result.loss.backward()
    return Passes(*model.count.values(), int(model.first[2].num_batches_tracked))


def attack(**values):
    return PGD(LinfBall(0.1), K, SignStep(0.03), **values)


def test_the_passes_of_standard_training_at_and_done():
    assert passes(Standard()) == Passes(1, 1, 0, 1)
    at = passes(AT(attack()))  # K steps of the attack, and one pass to train
    assert at == passes(AT(attack(attack_mode="train"))) == Passes(K + 1, K + 1, 0, 1)
    assert passes(DONE(attack(), implicit="none")) == at
    assert passes(DONE(attack(), implicit="first_order")) == Passes(at.forward + 1, at.backward + 1, 0, 1)
    exact = passes(DONE(attack(), implicit="exact"))
    assert exact == Passes(at.forward, at.backward + 1, 1, 1)
    two_losses = DONE(attack(loss=LogitMargin()), implicit="exact")
    assert passes(two_losses) == Passes(at.forward, at.backward + 2, 1, 1)
    full = passes(DONE(attack(), implicit="exact", curvature="full"))
    assert full.forward == exact.forward and full.batches == 1
    assert full.double - exact.double == 1 + 10  # the first residual, and ten iterations


def test_methods_declare_whether_they_differentiate_twice():
    single = [
        DONE(implicit="first_order"),
        DONE(implicit="none"),
        FastBAT(curvature=float("inf")),
        FastATGA(strength=0),
        AWP(AT()),
    ]
    double = [DONE(), FastBAT(), FastATGA(), AWP(DONE()), AWP(FastATGA())]
    for method in (*(kind() for kind in METHODS.values()), *single, *double):
        assert method.needs_second_derivatives == (passes(method).double > 0), method
    assert all(method.needs_second_derivatives for method in double)
    assert not any(method.needs_second_derivatives for method in single)


def test_parameters_are_frozen_while_attacking():
    for implicit in ("none", "first_order", "exact"):
        flags, model = [], Counted()
        model.last.register_forward_hook(lambda module, *_, flags=flags: flags.append(module.weight.requires_grad))
        y = torch.tensor([0, 1, 2])
        DONE(attack(), implicit=implicit).objective(model, Batch(torch.rand(3, 1, 4, 4), y, y), {}, TrainStep())
        assert flags == [False] * K + [True] * (len(flags) - K)

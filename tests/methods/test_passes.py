"""The passes that one update costs, counted: no pass more than the formula needs."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.losses import LogitMargin
from doubly.methods import AT, DONE, Standard
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep

K = 4


class Passes(NamedTuple):
    forward: int  # through the network
    backward: int  # of the output, to the input or to the parameters
    double: int  # through a backward pass
    batches: int  # forward passes in training mode that batch norm remembers


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


def passes(method, progress=0.0):
    model = Counted().train()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(6, 1, 4, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    found = method.objective(model, Batch(x, y, y), method.init(), TrainStep(progress=progress))
    found.loss.backward()
    return Passes(*model.count.values(), int(model.first[2].num_batches_tracked))


def attack(**values):
    return PGD(LinfBall(0.1), K, SignStep(0.03), **values)


def test_standard_is_one_forward_and_one_backward():
    assert passes(Standard()) == Passes(1, 1, 0, 1)


def test_at_is_k_attack_steps_and_one_pass():
    assert passes(AT(attack())) == Passes(K + 1, K + 1, 0, 1)


def test_done_without_implicit_term_costs_what_at_costs():
    assert passes(DONE(attack(), implicit="none")) == passes(AT(attack()))


def test_first_order_is_one_forward_and_one_backward_more():
    at = passes(AT(attack()))
    assert passes(DONE(attack(), implicit="first_order")) == Passes(at.forward + 1, at.backward + 1, 0, 1)


def test_exact_is_one_backward_more_and_its_double_backward():
    at = passes(AT(attack()))
    assert passes(DONE(attack(), implicit="exact")) == Passes(at.forward, at.backward + 1, 1, 1)


def test_exact_with_its_own_attack_loss_is_two_backward_passes_more():
    at = passes(AT(attack()))
    method = DONE(attack(loss=LogitMargin()), implicit="exact")
    assert passes(method) == Passes(at.forward, at.backward + 2, 1, 1)


def test_full_curvature_adds_one_product_per_iteration_and_no_forward():
    exact, full = (passes(DONE(attack(), implicit="exact", curvature=word)) for word in ("barrier", "full"))
    assert full.forward == exact.forward and full.batches == 1
    assert full.double - exact.double == 1 + 10  # the first residual, and ten iterations


def test_an_attack_in_training_mode_costs_the_same():
    assert passes(AT(attack(attack_mode="train"))) == passes(AT(attack()))


@pytest.mark.parametrize("implicit", ["none", "first_order", "exact"])
def test_parameters_are_frozen_while_attacking(implicit):
    seen = []
    model = Counted()
    model.last.register_forward_hook(lambda module, *_: seen.append(module.weight.requires_grad))
    y = torch.tensor([0, 1, 2])
    DONE(attack(), implicit=implicit).objective(model, Batch(torch.rand(3, 1, 4, 4), y, y), {}, TrainStep())
    assert seen == [False] * K + [True] * (len(seen) - K)

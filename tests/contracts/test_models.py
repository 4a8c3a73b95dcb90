"""Every entry of MODELS, with the values that make it small enough to run here."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
import torch

import doubly.models
from doubly.models import MODELS, Model, Normalize

SMALL = {"wide_resnet": {"depth": 10, "widen": 1}}
STATISTICS = {1: ((0.3,), (0.4,)), 3: ((0.3, 0.4, 0.5), (0.2, 0.3, 0.4))}
each_model = pytest.mark.parametrize("name", MODELS)


def build(name, channels=3, classes=10):
    torch.manual_seed(0)
    return MODELS[name](**SMALL.get(name, {})).build(channels, classes, *STATISTICS[channels])


def test_every_spec_in_the_folder_is_listed():
    result = set()
    for module in pkgutil.iter_modules(doubly.models.__path__):
        for _, thing in inspect.getmembers(importlib.import_module(f"doubly.models.{module.name}"), inspect.isclass):
            if hasattr(thing, "build") and thing is not Model:
                result.add(thing)
    assert result == set(MODELS.values())


@each_model
def test_is_a_frozen_value_with_defaults(name):
    spec = MODELS[name]()
    assert isinstance(spec, Model)
    assert spec == MODELS[name]() and hash(spec) == hash(MODELS[name]())
    assert spec.__dataclass_params__.frozen
    for field in dataclasses.fields(spec):
        assert isinstance(getattr(spec, field.name), int | float | str | bool)


@each_model
@pytest.mark.parametrize(("channels", "classes"), [(1, 2), (3, 10), (1, 43)])
def test_any_size_gives_finite_logits(name, channels, classes):
    network = build(name, channels, classes)
    for side in (8, 32, 96):
        logits = network(torch.rand(2, channels, side, side + 1))
        assert logits.shape == (2, classes)
        assert logits.isfinite().all()


@each_model
def test_normalizes_first_and_stores_it(name):
    network = build(name)
    layers = list(network.children())
    assert isinstance(layers[0], Normalize)
    assert sum(isinstance(layer, Normalize) for layer in network.modules()) == 1
    x = torch.rand(4, 3, 8, 8)
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in STATISTICS[3])
    network.eval()
    expected = network(x)
    with torch.no_grad():
        layers[0].mean.zero_()
        layers[0].std.fill_(1)
    assert torch.allclose(network((x - mean) / std), expected, atol=1e-5)
    assert {key for key in network.state_dict() if key.startswith("normalize.")} == {"normalize.mean", "normalize.std"}


@each_model
@pytest.mark.parametrize("training", [True, False])
def test_double_backward_matches_finite_differences(name, training):
    """The implicit gradient differentiates dh/d delta again, so second derivatives must be right, not just there."""
    network = build(name, channels=1).double().train(training)
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 0.0
    x = torch.rand(3, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y, v = (
        torch.tensor([0, 1, 2]),
        torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    )
    last = list(network.parameters())[-2]  # of the head

    def slope():
        loss = torch.nn.functional.cross_entropy(network(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return (gradient * v).sum()

    (mixed,) = torch.autograd.grad(slope(), last)
    direction, step = mixed / mixed.norm(), 1e-5
    assert mixed.norm() > 0
    with torch.no_grad():
        last += step * direction
    above = slope().item()
    with torch.no_grad():
        last -= 2 * step * direction
    below = slope().item()
    assert (above - below) / (2 * step) == pytest.approx(mixed.norm().item(), rel=1e-5)


@each_model
def test_equal_seeds_give_equal_weights(name):
    one, other = build(name).state_dict(), build(name).state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


@each_model
def test_every_parameter_gets_a_gradient(name):
    network = build(name)
    network(torch.rand(4, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in network.parameters())

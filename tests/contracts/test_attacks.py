"""Every entry of ATTACKS keeps the promises of an attack: a new one is tested by being listed."""

import dataclasses
import importlib
import inspect
import pkgutil
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import doubly.attacks
from doubly.attacks import ATTACKS, PGD, Attack
from doubly.bilevel import NormalizedStep
from doubly.data import Digits
from doubly.threat import L2Ball, LinfBall

EPS = 0.15


def with_fields(attack, **values):
    """The attack with those of the values for which it has a field."""
    names = {field.name for field in dataclasses.fields(attack)}
    return dataclasses.replace(attack, **{name: value for name, value in values.items() if name in names})


def modes(name):
    return ("eval", "train") if "attack_mode" in {f.name for f in dataclasses.fields(ATTACKS[name])} else (None,)


CASES = [(name, mode) for name in ATTACKS for mode in modes(name)]
each_attack = pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{n}-{m}" if m else n for n, m in CASES])


def build(name, mode=None, **values):
    values = {"threat": LinfBall(EPS), **values}
    return with_fields(ATTACKS[name](), **(values if mode is None else {**values, "attack_mode": mode}))


@pytest.fixture(scope="module")
def images():
    test = Digits().load().test
    return test.pixels(slice(0, 64)), test.y[:64]


@pytest.fixture(scope="module")
def trained():
    """A digits network with batch norm and dropout, trained on clean images for a second."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(12 * 64, 10))
        train = Digits().load().train
        x, y = train.pixels(slice(None)), train.y
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for step in range(120):
            rows = torch.randperm(len(y))[:128] if step else slice(0, 128)
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model


@pytest.fixture
def model(trained):
    """In a mixture of modes, with one frozen parameter and old gradients: all of it has to survive."""
    trained.train()
    trained[3].eval()
    trained[0].bias.requires_grad_(False)
    for number, parameter in enumerate(trained.parameters()):
        parameter.grad = torch.full_like(parameter, float(number)) if parameter.requires_grad else None
    return trained


def snapshot(model):
    return {
        "mode": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "tracking": [getattr(m, "track_running_stats", None) for m in model.modules()],
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()],
    }


def assert_same(before, after):
    for key in ("mode", "requires_grad", "tracking", "hooks"):
        assert before[key] == after[key], key
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name
    for one, other in zip(before["grad"], after["grad"], strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def accuracy(model, x, y):
    was = [m.training for m in model.modules()]
    model.eval()
    with torch.no_grad():
        share = (model(x).argmax(1) == y).double().mean().item()
    for module, training in zip(model.modules(), was, strict=True):
        module.training = training
    return share


def test_the_attacks_that_leave_the_ball_are_these():
    assert [name for name, kind in ATTACKS.items() if not kind.stays_inside] == ["n_fgsm"]


def test_every_public_attack_in_the_folder_is_listed():
    subclasses, callables, silent = set(), set(), set()
    for module in pkgutil.iter_modules(doubly.attacks.__path__):
        source = importlib.import_module(f"doubly.attacks.{module.name}")
        classes = {c for _, c in inspect.getmembers(source, inspect.isclass) if c.__module__ == source.__name__}
        classes = {c for c in classes if not c.__name__.startswith("_")}
        subclasses |= {c for c in classes if issubclass(c, Attack) and c is not Attack}
        if module.name in ("attack", "autoattack", "folding", "half", "mode", "search"):  # a driver runs AutoAttack
            continue
        attacks = {c for c in classes if dataclasses.is_dataclass(c) and any("__call__" in vars(k) for k in c.__mro__)}
        callables |= attacks
        if not attacks & set(ATTACKS.values()):
            silent.add(module.name)
    assert not silent and set(ATTACKS.values()) <= callables
    assert subclasses == set(ATTACKS.values())


@pytest.mark.parametrize("name", ATTACKS)
def test_is_a_frozen_value_with_defaults(name):
    attack = ATTACKS[name]()
    assert isinstance(attack, Attack)
    assert attack == ATTACKS[name]() and attack.__dataclass_params__.frozen


@pytest.mark.parametrize("name", ATTACKS)
def test_an_evaluation_runs_it_within_the_threat_of_its_reference(name):
    for reference in (PGD(LinfBall(EPS), 7, attack_mode="train"), PGD(L2Ball(0.7), 7, NormalizedStep(0.2))):
        attack = ATTACKS[name].for_evaluation(reference)
        assert attack.threat == reference.threat
        if isinstance(attack, PGD):  # and with the settings of the reference; only the loss may be another one
            assert dataclasses.replace(attack, loss=reference.loss) == reference
        else:
            assert type(attack) is ATTACKS[name]
        if "loss" in {field.name for field in dataclasses.fields(attack)}:
            assert attack.loss == ATTACKS[name]().loss


@pytest.mark.parametrize("name", ATTACKS)
def test_scaling_shortens_everything_it_does(name, model, images):
    x = torch.full_like(images[0], 0.5)  # far from the ends of the image range
    attack = build(name)
    whole, half = (a(model, x, images[1], seeded()).abs().max() for a in (attack, attack.scaled(0.5)))
    assert attack.scaled(0.5).threat == attack.threat.scaled(0.5)
    assert half.item() == pytest.approx(0.5 * whole.item(), rel=0.1)


@each_attack
def test_stays_in_the_ball_and_in_the_image_range_exactly(name, mode, model, images):
    x, y = images
    delta = build(name, mode)(model, x, y, seeded())
    assert delta.shape == x.shape and delta.dtype == x.dtype and not delta.requires_grad
    if ATTACKS[name].stays_inside:  # named exceptions, for training only
        assert delta.abs().max() <= EPS
    assert (x + delta).min() >= 0 and (x + delta).max() <= 1


@each_attack
def test_leaves_no_trace_in_the_model(name, mode, model, images):
    x, y = images
    before = snapshot(model)
    build(name, mode)(model, x, y, seeded())
    assert_same(before, snapshot(model))


@each_attack
def test_leaves_no_trace_in_a_model_that_is_evaluated(name, mode, model, images):
    x, y = images
    model.eval()
    before = snapshot(model)
    build(name, mode)(model, x, y, seeded())
    assert_same(before, snapshot(model))


@each_attack
def test_leaves_no_trace_after_an_error(name, mode, model, images):
    x, y = images
    before, calls = snapshot(model), []

    def fail(*_):
        calls.append(1)
        raise RuntimeError("by design")

    handle = model[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="by design"):
        build(name, mode)(model, x, y, seeded())
    handle.remove()
    assert calls
    assert_same(before, snapshot(model))


@each_attack
def test_leaves_the_images_alone(name, mode, model, images):
    x, y = images[0].clone(), images[1].clone()
    build(name, mode)(model, x, y, seeded())
    assert torch.equal(x, images[0]) and torch.equal(y, images[1])
    assert not x.requires_grad and x.grad is None


@each_attack
def test_leaves_the_global_generators_alone(name, mode, model, images):
    model[3].train()  # dropout
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    build(name, mode)(model, *images, seeded())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and (np.random.get_state()[1] == before[2]).all()


@each_attack
def test_lowers_the_accuracy_of_a_trained_network(name, mode, model, images):
    x, y = images
    delta = build(name, mode)(model, x, y, seeded())
    clean, attacked = accuracy(model, x, y), accuracy(model, x + delta, y)
    assert clean > 0.9 and attacked < clean - 0.2


@each_attack
def test_equal_seeds_give_equal_perturbations_and_different_seeds_different_ones(name, mode, model, images):
    attack = build(name, mode, start="uniform")
    first, again, other = (attack(model, *images, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@each_attack
def test_works_where_gradients_are_switched_off(name, mode, model, images):
    with torch.no_grad():
        quiet = build(name, mode)(model, *images, seeded())
    assert torch.equal(quiet, build(name, mode)(model, *images, seeded()))

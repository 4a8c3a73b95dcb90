"""Every entry of METHODS keeps the promises of a method: a new one is tested by being listed."""

import dataclasses
import importlib
import inspect
import pkgutil
import random
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import doubly.methods
from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.methods import METHODS, Method
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep


def fields(name):
    return {field.name for field in dataclasses.fields(METHODS[name])}


def cases():
    """Each method as it comes, and with each of the words that `implicit` may be."""
    for name, kind in METHODS.items():
        words = get_args(get_type_hints(kind)["implicit"]) if "implicit" in fields(name) else ()
        yield from ((name, {"implicit": word}) for word in words) if words else [(name, {})]
        if "cap" in fields(name):
            yield name, {"cap": 3.0}


CASES = list(cases())
each_method = pytest.mark.parametrize(("name", "values"), CASES, ids=[f"{n}{list(v.values()) or ''}" for n, v in CASES])


def build(name, values):
    attack = PGD(LinfBall(0.1), 3, SignStep(0.05))
    return METHODS[name](**({"attack": attack} if "attack" in fields(name) else {}), **values)


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.0), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(6 * 16, 3)).train()


def batch(count=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = 0.5 * torch.rand(count, 1, 4, 4, generator=generator) + 0.2 * y.view(-1, 1, 1, 1)
    return Batch(x, y, torch.arange(count))


LEARNS = {"mail": {"normalize": "batch"}}  # as released, a sample on the boundary weighs 0.02: nothing in 40 steps
COUNTS = torch.tensor([40, 20, 10])  # training images per class, for methods that treat classes differently
TRAIN_STEP = TrainStep(epoch=1, step=2, progress=0.7, seed=3)


def objective(method, model, samples=None, state=None, step=TRAIN_STEP):
    return method.objective(model, samples or batch(), method.init(COUNTS) if state is None else state, step)


def test_every_method_in_the_folder_is_listed():
    result = set()
    for module in pkgutil.iter_modules(doubly.methods.__path__):
        source = importlib.import_module(f"doubly.methods.{module.name}")
        result |= {c for _, c in inspect.getmembers(source, inspect.isclass) if hasattr(c, "objective")} - {Method}
    assert result == set(METHODS.values())


@pytest.mark.parametrize("name", METHODS)
def test_is_a_frozen_value_with_defaults(name):
    method = METHODS[name]()
    assert isinstance(method, Method)
    assert method == METHODS[name]() and method.__dataclass_params__.frozen


@each_method
def test_the_loss_is_finite_and_reaches_every_parameter(name, values):
    model = network()
    result = objective(build(name, values), model)
    assert result.loss.shape == () and result.loss.isfinite()
    result.loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, key


@each_method
def test_losses_weights_and_logits_are_one_per_sample_and_for_the_record(name, values):
    result = objective(build(name, values), network())
    assert result.sample_losses.shape == result.weights.shape == (12,) and result.logits.shape == (12, 3)
    assert (result.weights >= 0).all() and result.weights.isfinite().all() and result.sample_losses.isfinite().all()
    assert not any(
        t.requires_grad for t in (result.sample_losses, result.weights, result.logits, *result.state.values())
    )


@each_method
def test_leaves_modes_gradients_parameters_and_flags_alone(name, values):
    model = network()
    model[3].eval()
    model[0].bias.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    modes = [m.training for m in model.modules()]
    parameters = [p.detach().clone() for p in model.parameters()]
    objective(build(name, values), model)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
    assert [p.requires_grad for p in model.parameters()] == [True, False] + [True] * 4
    assert model[0].bias.grad is None
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.requires_grad)
    assert model[1].track_running_stats


@each_method
def test_leaves_batch_and_state_alone(name, values):
    method, model = build(name, values), network()
    samples, state = batch(), objective(build(name, values), network()).state
    copied = {key: value.clone() for key, value in state.items()}
    objective(method, model, samples, state)
    assert all(torch.equal(a, b) for a, b in zip(samples, batch(), strict=True))
    assert not samples.x.requires_grad
    assert state.keys() == copied.keys() and all(torch.equal(state[key], copied[key]) for key in copied)


@each_method
def test_leaves_the_global_generators_alone(name, values):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    objective(build(name, values), network()).loss.backward()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and (np.random.get_state()[1] == before[2]).all()


@each_method
def test_batch_norm_remembers_exactly_one_batch_per_update(name, values):
    model, inputs, outputs = network(), [], []
    model[1].register_forward_hook(lambda module, args, out: inputs.append(args[0].detach()))
    model.register_forward_hook(lambda module, args, out: outputs.append(out.detach()))
    result = objective(build(name, values), model)
    result.loss.backward()
    assert model[1].num_batches_tracked == 1
    # The one batch is that of the outer pass, whose logits are returned; at whatever weights that was (AWP).
    pairs = [pair for pair in zip(inputs, outputs, strict=True) if len(pair[1]) == len(result.logits)]
    outer = next(x for x, logits in pairs if torch.allclose(logits, result.logits, atol=1e-5))
    twin = nn.BatchNorm2d(6)
    twin(outer)
    assert torch.allclose(model[1].running_mean, twin.running_mean, atol=1e-7)
    assert torch.allclose(model[1].running_var, twin.running_var, atol=1e-7)


@each_method
def test_state_survives_saving_and_loading(name, values, tmp_path):
    method = build(name, values)
    state = objective(method, network(), batch(seed=5)).state
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    gradients = []
    for saved_state in (state, loaded):
        model = network()
        result = objective(method, model, state=saved_state)
        result.loss.backward()
        new_state = [result.state[key] for key in sorted(result.state)]
        gradients.append((result.weights, result.sample_losses, *[p.grad for p in model.parameters()], *new_state))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@each_method
def test_equal_steps_give_equal_objectives(name, values):
    method = build(name, values)
    one, other = (objective(method, network()) for _ in range(2))
    assert torch.equal(one.loss, other.loss) and torch.equal(one.sample_losses, other.sample_losses)
    if "attack" in fields(name):
        assert not torch.equal(
            one.sample_losses, objective(method, network(), step=TRAIN_STEP._replace(step=3)).sample_losses
        )


@each_method
def test_the_order_of_the_samples_does_not_matter(name, values, monkeypatch):
    # Draws belong to positions in the batch, so here all are alike.
    monkeypatch.setattr("doubly.seeding.BatchGenerator.uniform", lambda self, like: torch.full_like(like, 0.7))
    method, samples = build(name, values), batch()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    mixed = Batch(*(part[order] for part in samples))
    models = network().eval().double(), network().eval().double()  # evaluation mode: no sample sees another
    result = [
        objective(method, model, one._replace(x=one.x.double()))
        for model, one in zip(models, (samples, mixed), strict=True)
    ]
    assert torch.allclose(result[0].sample_losses[order], result[1].sample_losses, atol=1e-12)
    assert torch.allclose(result[0].weights[order], result[1].weights, atol=1e-10)
    for one in result:
        one.loss.backward()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-8)


@each_method
def test_the_loss_falls_on_a_tiny_problem(name, values):
    method, model = build(name, {**values, **LEARNS.get(name, {})}), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    state, losses = method.init(COUNTS), []
    for step in range(40):
        result = objective(method, model, state=state, step=TrainStep(0, step, 0.7))
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        state = result.state
        losses.append(result.sample_losses.mean().item())
    assert sum(losses[-5:]) < 0.7 * 5 * losses[0]


@each_method
def test_sampling_is_a_distribution_over_classes_or_nothing(name, values):
    method = build(name, values)
    probabilities = method.sampling(objective(method, network()).state)
    if probabilities is not None:
        assert (probabilities >= 0).all() and probabilities.sum().item() == pytest.approx(1)


@each_method
def test_a_label_that_the_model_does_not_know_is_refused_with_the_fix(name, values):
    samples = batch()
    with pytest.raises(doubly.UsageError, match="3 logits"):
        objective(build(name, values), network(), samples._replace(y=samples.y + 1))


@pytest.mark.parametrize("values", [{}, {"driver": "holdout"}], ids=["as it comes", "driver holdout"])
@pytest.mark.parametrize("name", METHODS)
def test_held_out_images_change_the_state_and_nothing_else(name, values):
    if not values.keys() <= fields(name) or build(name, values).validation_interval is None:
        return
    method, model = build(name, values), network().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = objective(method, network()).state
    saved, global_state = {key: value.clone() for key, value in state.items()}, torch.get_rng_state()
    learned = method.on_validation(model, batch(seed=2), state, TRAIN_STEP)
    again = method.on_validation(model, batch(seed=2), state, TRAIN_STEP)
    assert all(torch.equal(state[key], saved[key]) for key in saved) and learned.keys() == state.keys()
    assert all(torch.equal(learned[key], again[key]) for key in learned)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), global_state)
    assert any(not torch.equal(learned[key], state[key]) for key in state)

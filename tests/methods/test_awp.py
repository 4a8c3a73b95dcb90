"""AWP: another method at perturbed weights, compared with copies of the network whose weights were moved by hand."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import SignStep
from doubly.config.serialize import from_json, to_json
from doubly.errors import UsageError
from doubly.methods import AT, AWP, CFOL, DONE, FAT, FRL, GAIRAT, METHODS, TRADES, Standard
from doubly.methods.awp import perturbed_weights
from doubly.schedules import Constant
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import flat_gradient, gradients

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.7, seed=9)
COUNTS = torch.tensor([40, 20, 10])
WRAPPED = [kind for name, kind in METHODS.items() if name != "awp"]


def smooth():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def normalized(dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(dropout), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(6 * 9, 3)).double().train()


def samples(count=6):
    x = torch.rand(count, 1, 3, 3, generator=torch.Generator().manual_seed(1)).double()
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


def objective(method, model, state=None, step=TRAIN_STEP):
    return method.objective(model, samples(), method.init(COUNTS) if state is None else state, step)


def moved_weights(model, slopes, gamma):
    """Return a copy of the network whose matrices lie gamma of their length further along their slope."""
    other = copy.deepcopy(model)
    for p, q, slope in zip(model.parameters(), other.parameters(), slopes, strict=True):
        if p.dim() > 1:
            q.data = p.data + gamma * p.data.square().sum().sqrt() * slope / slope.square().sum().sqrt()
    return other


def test_the_update_is_the_gradient_of_at_at_the_perturbed_weights():
    model, batch = smooth(), samples()
    delta = ATTACK(model, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    loss = F.cross_entropy(model(batch.x + delta), batch.y)
    other = moved_weights(model, gradients(loss, model), 0.05)
    expected = F.cross_entropy(other(batch.x + delta), batch.y)
    result = objective(AWP(AT(ATTACK), 0.05), model)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(flat_gradient(result.loss, model), flat_gradient(expected, other), rtol=1e-10, atol=1e-14)
    assert result.record["awp_rise"].item() == pytest.approx((expected - loss).item(), rel=1e-9) and expected > loss


def test_one_weight_matrix_by_hand():
    model = nn.Linear(1, 2).double()
    model.weight.data, model.bias.data = torch.tensor([[3.0], [4.0]]).double(), torch.zeros(2).double()
    batch = Batch(torch.ones(1, 1).double(), torch.tensor([0]))
    result = AWP(Standard(), 0.1).objective(model, batch, {}, TRAIN_STEP)
    # z = W x = (3, 4), and dCE/dW = (-p_1, p_1) points along (-1, 1) / sqrt 2. |W| = 5, so v = 0.5 (-1, 1) / sqrt 2.
    gap = torch.tensor(1 + 1 / 2**0.5, dtype=torch.float64)
    assert result.loss.item() == pytest.approx(gap.exp().log1p().item(), rel=1e-12)
    result.loss.backward()
    rate = gap.sigmoid().item()
    assert model.weight.grad.flatten().tolist() == pytest.approx([-rate, rate], rel=1e-12)
    assert model.weight.tolist() == [[3.0], [4.0]]


def test_only_matrices_named_weight_move_each_by_gamma_of_its_length():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.network, self.kernel = normalized(), nn.Parameter(torch.eye(3).double())

        def forward(self, x):
            return self.network(x) @ self.kernel

    model = Odd().eval()
    model.network[0].weight.requires_grad_(False)
    weights = perturbed_weights(model)
    assert weights.keys() == {"network.5.weight"}
    weight = weights["network.5.weight"]
    (slope,) = torch.autograd.grad(AT(ATTACK).objective(model, samples(), {}, TRAIN_STEP).loss, weight)
    shift = AWP(gamma=0.2).perturbation(model, {"network.5.weight": slope})["network.5.weight"]
    assert not shift.requires_grad and shift.norm().item() == pytest.approx(0.2 * weight.norm().item())
    assert F.cosine_similarity(shift.flatten(), slope.flatten(), 0).item() == pytest.approx(1)  # upwards
    still = AWP().perturbation(model, {"network.5.weight": torch.zeros_like(weight)})
    assert not still["network.5.weight"].any()
    seen = []
    hook = model.network[5].register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    AWP(Standard(), 0.2).objective(model, samples(), {}, TRAIN_STEP)
    hook.remove()
    assert torch.equal(seen[0], weight) and not torch.equal(seen[1], weight)


def test_done_keeps_its_implicit_term_at_the_perturbed_weights():
    attack = PGD(LinfBall(0.2, barrier=1e-2), 3, SignStep(0.05))
    model, batch = smooth(), samples()
    delta = attack(model, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    cases = [("exact", "barrier"), ("exact", "full"), ("first_order", "barrier"), ("none", "barrier")]
    for implicit, curvature in cases:
        done = DONE(attack, temperature=Constant(0.5), damping=1.0, implicit=implicit, curvature=curvature)
        state = done.direction(model, batch, delta, {}, TRAIN_STEP).state
        slopes = gradients(done.direction(model, batch, delta, state, TRAIN_STEP).loss, model)
        other = moved_weights(model, slopes, 0.05)
        expected = done.direction(other, batch, delta, state, TRAIN_STEP)
        result = objective(AWP(done, 0.05), model, state)
        rough = curvature == "full" or implicit == "first_order"  # a solve, or a quotient of small differences
        slope = flat_gradient(expected.loss, other)
        tolerance = {"rtol": 1e-6 if rough else 1e-9, "atol": 1e-10}
        assert torch.allclose(flat_gradient(result.loss, model), slope, **tolerance), (implicit, curvature)
        assert torch.allclose(result.weights, expected.cotangents)
        assert torch.allclose(result.sample_losses, expected.values)
        assert all(torch.allclose(result.state[key], expected.state[key]) for key in expected.state)
        plain = dataclasses.replace(done, implicit="none", curvature="barrier")
        without = flat_gradient(plain.direction(other, batch, delta, state, TRAIN_STEP).loss, other)
        assert implicit == "none" or (slope - without).norm() > 1e-3 * without.norm()  # the term is there to be seen


def test_done_exact_is_the_penalty_written_out_at_the_perturbed_weights():
    """Independently of `cid`: W l + W G' C^-1 G / 2 with W, C constant, differentiated at w + v."""
    attack = PGD(LinfBall(0.2, barrier=1e-2), 3, SignStep(0.05))
    done = DONE(attack, temperature=Constant(0.5), eta=1.0, damping=1.0)
    model, batch = smooth(), samples()
    delta = attack(model, batch.x, batch.y, TRAIN_STEP.generator("attack")).requires_grad_()

    def written_out(network):
        losses = F.cross_entropy(network(batch.x + delta), batch.y, reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), delta, create_graph=True)
        upper, lower = (1 - batch.x).clamp(max=0.2) - delta, delta - (-batch.x).clamp(min=-0.2)
        inverse = 1 / (1e-2 * (upper**-2 + lower**-2) + 1.0)  # 0 where delta is on a face
        W = torch.softmax(losses / 0.5, 0).detach() * len(batch.y)
        return (W * losses + 0.5 * W * (slope * slope * inverse.detach()).flatten(1).sum(1)).mean()

    other = moved_weights(model, gradients(written_out(model), model), 0.05)
    result = objective(AWP(done, 0.05), model)
    expected = flat_gradient(written_out(other), other)
    assert torch.allclose(flat_gradient(result.loss, model), expected, rtol=1e-8, atol=1e-12)


def test_gamma_zero_and_the_warm_up_are_the_wrapped_method_exactly():
    for kind in WRAPPED:
        method, plain = kind(), normalized()
        expected = objective(method, plain)
        slope = flat_gradient(expected.loss, plain)
        for wrapper in (AWP(method, 0.0), AWP(method, 0.3, warm_up=0.71)):
            model = normalized()
            result = objective(wrapper, model)
            assert torch.equal(flat_gradient(result.loss, model), slope), kind
            assert torch.equal(result.sample_losses, expected.sample_losses)
            assert result.record.keys() == expected.record.keys()
            assert torch.equal(model[1].running_mean, plain[1].running_mean)
        later = objective(AWP(method, 0.3, warm_up=0.7), normalized())
        assert not torch.equal(later.sample_losses, expected.sample_losses)


class Counting(nn.Module):
    """Counts forward passes, separately in evaluation and in training mode."""

    def __init__(self, network):
        super().__init__()
        self.network, self.passes = network, {False: 0, True: 0}

    def forward(self, x):
        self.passes[self.training] += 1
        return self.network(x)


def test_a_tiny_gamma_is_nearly_the_wrapped_method_and_its_attack_runs_once():
    """For every method, with dropout, state and record."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    for name, kind in METHODS.items():
        if name == "awp":
            continue
        method, wrapper = kind(), AWP(kind(), 1e-9)
        one, other = Counting(normalized(0.3)), Counting(normalized(0.3))
        state, other_state = method.init(COUNTS), wrapper.init(COUNTS)
        for epoch in range(2):
            step = TrainStep(epoch, 0, 0.7)
            with step.network_rng():
                plain = objective(method, one, state, step)
            result = objective(wrapper, other, other_state, step)
            state, other_state = plain.state, result.state
            assert torch.allclose(flat_gradient(plain.loss, one), flat_gradient(result.loss, other), **tolerance), name
            assert torch.allclose(plain.weights, result.weights, **tolerance)
            assert torch.allclose(plain.sample_losses, result.sample_losses, **tolerance)
            assert torch.allclose(one.network[1].running_mean, other.network[1].running_mean, **tolerance)
            assert state.keys() == other_state.keys()
            assert all(torch.allclose(state[key], other_state[key], **tolerance) for key in state)
            for key, value in plain.record.items():
                assert torch.allclose(result.record[key], value, **tolerance), (name, key)
        assert other.passes[False] == one.passes[False]  # attacks are the passes in evaluation mode
        assert other.passes[True] == 2 * one.passes[True]


def test_the_attack_runs_once_at_the_weights_as_they_are():
    for method in (AT(ATTACK), AT(FGSM(LinfBall(0.1))), DONE(ATTACK), TRADES(ATTACK), FRL(ATTACK)):
        networks, model, attack = [], smooth(), method.attack

        class Recording(type(attack)):
            def __call__(self, network, *arguments, networks=networks):
                networks.append(network)
                return super().__call__(network, *arguments)

            def maximize_divergence(self, network, *arguments, networks=networks):
                networks.append(network)
                return super().maximize_divergence(network, *arguments)

        recording = Recording(**{f.name: getattr(attack, f.name) for f in dataclasses.fields(attack)})
        objective(AWP(dataclasses.replace(method, attack=recording), 0.3), model)
        assert len(networks) == 1 and networks[0] is model


def test_counts_along_the_attack_are_those_of_the_one_attack_that_ran():
    """kappa and the steps of FAT are read from logits at w, not at w + v."""
    fat, gairat = FAT(ATTACK, tau=Constant(1.0)), GAIRAT(ATTACK, burn_in=0.0)
    for gamma in (0.02, 0.5):
        for method, name in ((fat, "backpropagations"), (gairat, "kappa")):
            result, plain = objective(AWP(method, gamma), smooth()), objective(method, smooth())
            assert result.record[name] == plain.record[name]
            if name == "kappa":
                assert torch.equal(result.weights, plain.weights)
        assert 0 < plain.record["kappa"] < 3


def test_batch_norm_remembers_the_pass_at_the_perturbed_weights_alone():
    model, inputs, outputs = normalized(), [], []
    model[1].register_forward_hook(lambda module, args, out: inputs.append(args[0].detach()))
    model.register_forward_hook(lambda module, args, out: outputs.append(out.detach()))
    result = objective(AWP(AT(ATTACK), 0.1), model)
    assert model[1].num_batches_tracked == 1 and torch.equal(outputs[-1], result.logits)
    assert not torch.allclose(outputs[-1], outputs[-2], rtol=1e-3)
    assert torch.allclose(model[1].running_mean, 0.1 * inputs[-1].mean((0, 2, 3)))


def test_tied_weights_move_together():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.last = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.last(self.two(self.one(x.flatten(1)).tanh()))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tied().double()
    other = moved_weights(model, gradients(objective(AT(ATTACK), model).loss, model), 0.1)
    assert other.two.weight is other.one.weight
    delta = ATTACK(model, samples().x, samples().y, TRAIN_STEP.generator("attack"))
    expected = F.cross_entropy(other(samples().x + delta), samples().y)
    loss = objective(AWP(AT(ATTACK), 0.1), model).loss
    assert torch.allclose(flat_gradient(loss, model), flat_gradient(expected, other), rtol=1e-9, atol=1e-14)


def test_what_it_declares_is_that_of_the_wrapped_method():
    cfol = CFOL(ATTACK, eta=0.1)
    state = objective(AWP(cfol), normalized()).state
    assert torch.equal(AWP(cfol).sampling(state), cfol.sampling(state)) and state["scores"].sum() > 0
    assert AWP(AT()).sampling({}) is None and AWP(cfol).wrapped is cfol and AWP(cfol).attack is ATTACK
    assert AWP(AT(ATTACK)).scaled(0.5) == AWP(AT(ATTACK.scaled(0.5)))
    assert AWP(FAT(ATTACK, tau=Constant(1.0))).costliest() == AWP(FAT(ATTACK, tau=Constant(3.0)))
    with pytest.raises(UsageError, match="counts"):
        AWP(cfol).init()
    method = AWP(DONE(ATTACK, cap=3.0), 0.005, 0.1)
    assert from_json(to_json(method)) == method and AWP().method == AT()


def test_refusals():
    for settings, message in [
        ({"gamma": -0.1}, "gamma"),
        ({"gamma": float("nan")}, "gamma"),
        ({"warm_up": 1.0}, r"\[0, 1\)"),
        ({"warm_up": -0.1}, r"\[0, 1\)"),
        ({"method": AWP()}, "twice"),
    ]:
        with pytest.raises(UsageError, match=message):
            AWP(**settings)
    model = smooth()
    for layer in (1, 3):
        model[layer].weight.requires_grad_(False)
    with pytest.raises(UsageError, match="name them so"):
        objective(AWP(), model)


def test_the_state_of_the_wrapped_method_is_recorded():
    assert AWP(DONE()).recorded_state({"r": torch.tensor(3.0)}) == {"r": 3.0}
    assert AWP(AT()).recorded_state({}) == AWP(DONE(divergence="cvar", cap=2.0)).recorded_state({}) == {}

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
from doubly.schedules import Constant
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.7, seed=9)
COUNTS = torch.tensor([40, 20, 10])


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


def gradient(scalar, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(scalar, list(model.parameters()))])


def objective(method, model, state=None, moment=TRAIN_STEP):
    return method.objective(model, samples(), method.init(COUNTS) if state is None else state, moment)


def moved(model, slopes, gamma):
    """The dumb twin: a copy of the network whose matrices are gamma of their length further along their slope."""
    other = copy.deepcopy(model)
    for p, q, slope in zip(model.parameters(), other.parameters(), slopes, strict=True):
        if p.dim() > 1:
            q.data = p.data + gamma * p.data.square().sum().sqrt() * slope / slope.square().sum().sqrt()
    return other


class Counting(nn.Module):
    """Counts forward passes, apart in evaluation and in training mode."""

    def __init__(self, network):
        super().__init__()
        self.network, self.passes = network, {False: 0, True: 0}

    def forward(self, x):
        self.passes[self.training] += 1
        return self.network(x)


# --- the formula ---


def test_the_update_is_the_gradient_of_at_at_the_perturbed_weights():
    model, batch = smooth(), samples()
    delta = ATTACK(model, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    loss = F.cross_entropy(model(batch.x + delta), batch.y)
    other = moved(model, torch.autograd.grad(loss, list(model.parameters())), 0.05)
    expected = F.cross_entropy(other(batch.x + delta), batch.y)
    found = objective(AWP(AT(ATTACK), 0.05), model)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradient(found.loss, model), gradient(expected, other), rtol=1e-10, atol=1e-14)
    assert found.record["awp_rise"].item() == pytest.approx((expected - loss).item(), rel=1e-9) and expected > loss


def test_one_weight_matrix_by_hand():
    model = nn.Linear(1, 2).double()
    model.weight.data, model.bias.data = torch.tensor([[3.0], [4.0]]).double(), torch.zeros(2).double()
    batch = Batch(torch.ones(1, 1).double(), torch.tensor([0]))
    found = AWP(Standard(), 0.1).objective(model, batch, {}, TRAIN_STEP)
    # z = W x = (3, 4), and dCE/dW = (-p_1, p_1) points along (-1, 1) / sqrt 2. |W| = 5, so v = 0.5 (-1, 1) / sqrt 2.
    gap = torch.tensor(1 + 1 / 2**0.5, dtype=torch.float64)
    assert found.loss.item() == pytest.approx(gap.exp().log1p().item(), rel=1e-12)
    found.loss.backward()
    rate = gap.sigmoid().item()
    assert model.weight.grad.flatten().tolist() == pytest.approx([-rate, rate], rel=1e-12)
    assert model.weight.tolist() == [[3.0], [4.0]]


def test_only_tensors_named_weight_with_more_than_one_dimension_move_each_by_gamma_of_its_length():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.network, self.kernel = normalized(), nn.Parameter(torch.eye(3).double())

        def forward(self, x):
            return self.network(x) @ self.kernel

    model = Odd().eval()
    model.network[0].weight.requires_grad_(False)
    scalar = AT(ATTACK).objective(model, samples(), {}, TRAIN_STEP).loss
    found = AWP(gamma=0.2).perturbation(model, scalar)
    assert found.keys() == {"network.5.weight"}
    weight = model.network[5].weight
    (slope,) = torch.autograd.grad(AT(ATTACK).objective(model, samples(), {}, TRAIN_STEP).loss, weight)
    shift = found["network.5.weight"]
    assert not shift.requires_grad and shift.norm().item() == pytest.approx(0.2 * weight.norm().item())
    assert F.cosine_similarity(shift.flatten(), slope.flatten(), 0).item() == pytest.approx(1)  # upwards


def test_a_tensor_without_gradient_stays():
    model = smooth()
    scalar = (model[3].weight ** 2).sum()
    assert torch.equal(AWP().perturbation(model, scalar)["1.weight"], torch.zeros(5, 9).double())


@pytest.mark.parametrize(
    ("implicit", "curvature"),
    [("exact", "barrier"), ("exact", "full"), ("first_order", "barrier"), ("none", "barrier")],
)
def test_done_keeps_its_implicit_term_at_the_perturbed_weights(implicit, curvature):
    attack = PGD(LinfBall(0.2, barrier=1e-2), 3, SignStep(0.05))
    done = DONE(attack, temperature=Constant(0.5), damping=1.0, implicit=implicit, curvature=curvature)
    model, batch = smooth(), samples()
    delta = attack(model, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    state = done.direction(model, batch, delta, {}, TRAIN_STEP).state
    slopes = torch.autograd.grad(done.direction(model, batch, delta, state, TRAIN_STEP).loss, list(model.parameters()))
    other = moved(model, slopes, 0.05)
    expected = done.direction(other, batch, delta, state, TRAIN_STEP)
    found = objective(AWP(done, 0.05), model, state)
    rough = curvature == "full" or implicit == "first_order"  # a solve, or a quotient of small differences
    slope = gradient(expected.loss, other)
    assert torch.allclose(gradient(found.loss, model), slope, rtol=1e-6 if rough else 1e-9, atol=1e-10)
    assert torch.allclose(found.weights, expected.cotangents) and torch.allclose(found.sample_losses, expected.values)
    assert all(torch.allclose(found.state[key], expected.state[key]) for key in expected.state)
    plain = dataclasses.replace(done, implicit="none", curvature="barrier")
    without = gradient(plain.direction(other, batch, delta, state, TRAIN_STEP).loss, other)
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

    slopes = torch.autograd.grad(written_out(model), list(model.parameters()))
    other = moved(model, slopes, 0.05)
    found = objective(AWP(done, 0.05), model)
    assert torch.allclose(gradient(found.loss, model), gradient(written_out(other), other), rtol=1e-8, atol=1e-12)


# --- what it becomes at its ends ---


@pytest.mark.parametrize("name", [name for name in METHODS if name != "awp"])
def test_gamma_zero_and_warm_up_are_the_wrapped_method_exactly(name):
    method = METHODS[name]()
    plain = normalized()
    expected = objective(method, plain)
    slope = gradient(expected.loss, plain)
    for wrapped in (AWP(method, 0.0), AWP(method, 0.3, warm_up=0.71)):
        model = normalized()
        found = objective(wrapped, model)
        assert torch.equal(gradient(found.loss, model), slope)
        assert torch.equal(found.sample_losses, expected.sample_losses) and found.record.keys() == expected.record.keys()
        assert torch.equal(model[1].running_mean, plain[1].running_mean)
    begun = objective(AWP(method, 0.3, warm_up=0.7), normalized())
    assert not torch.equal(begun.sample_losses, expected.sample_losses)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "awp"])
def test_a_tiny_gamma_is_nearly_the_wrapped_method_and_its_attack_runs_once(name):
    """Every method as it comes, replay, state and record included."""
    method, wrapped = METHODS[name](), AWP(METHODS[name](), 1e-9)
    one, other = Counting(normalized(0.3)), Counting(normalized(0.3))
    stand, after = torch.get_rng_state(), []
    state, kept, same = method.init(COUNTS), wrapped.init(COUNTS), {"rtol": 1e-5, "atol": 1e-6}
    for epoch in range(2):
        found = []
        for kind, model, remembered in ((method, one, state), (wrapped, other, kept)):
            torch.set_rng_state(stand)
            found.append(objective(kind, model, remembered, TrainStep(epoch, 0, 0.7)))
            after.append(torch.get_rng_state())
        state, kept = found[0].state, found[1].state
        assert torch.allclose(gradient(found[0].loss, one), gradient(found[1].loss, other), **same)
        assert torch.allclose(found[0].weights, found[1].weights, **same)
        assert torch.allclose(found[0].sample_losses, found[1].sample_losses, **same)
        assert torch.allclose(one.network[1].running_mean, other.network[1].running_mean, **same)
        assert state.keys() == kept.keys() and all(torch.allclose(state[k], kept[k], **same) for k in state)
        for key, value in found[0].record.items():
            assert torch.allclose(found[1].record[key], value, **same), key
    assert all(torch.equal(after[0], other) for other in after[1:])  # dropout draws as if it were alone
    # Attacks are the passes in evaluation mode. Fast-BAT's second step is part of its formula, not of its attack.
    assert other.passes[False] == one.passes[False] + (2 if name == "fast_bat" else 0)
    assert other.passes[True] == 2 * one.passes[True]


# --- one attack, replayed ---


@pytest.mark.parametrize("method", [AT(ATTACK), AT(FGSM(LinfBall(0.1))), DONE(ATTACK), TRADES(ATTACK), FRL(ATTACK)])
def test_the_attack_runs_once_at_the_weights_as_they_are(method):
    seen, model = [], smooth()
    attack = method.attack
    kind = type(attack)

    class Told(kind):
        def __call__(self, network, *given):
            seen.append(network)
            return super().__call__(network, *given)

        def diverge(self, network, *given):
            seen.append(network)
            return super().diverge(network, *given)

    told = Told(**{f.name: getattr(attack, f.name) for f in dataclasses.fields(attack)})
    objective(AWP(dataclasses.replace(method, attack=told), 0.3), model)
    assert len(seen) == 1 and seen[0] is model


@pytest.mark.parametrize("gamma", [0.02, 0.5])
def test_counts_along_the_attack_are_those_of_the_one_attack_that_ran(gamma):
    """kappa and the friendly steps are read from logits at w, not at w + v."""
    fat, gairat = FAT(ATTACK, tau=Constant(1.0)), GAIRAT(ATTACK, burn_in=0.0)
    for method, name in ((fat, "backpropagations"), (gairat, "kappa")):
        found, alone = objective(AWP(method, gamma), smooth()), objective(method, smooth())
        assert found.record[name] == alone.record[name]
        if name == "kappa":
            assert torch.equal(found.weights, alone.weights)
    assert 0 < alone.record["kappa"] < 3


def test_restarts_are_replayed_in_their_order():
    attack, shown = dataclasses.replace(ATTACK, restarts=3), []

    @dataclasses.dataclass(frozen=True)
    class Listening(AT):
        def objective(self, model, batch, state, moment):
            def value(logits):
                shown[-1].append(logits.detach().clone())
                return F.cross_entropy(logits, batch.y, reduction="none")

            shown.append([])
            delta = self.attack.search(model, batch.x, batch.y, moment.generator("attack"), value)
            return dataclasses.replace(self, attack=lambda *_: delta).at(model, batch, state, moment)

        def at(self, *given):
            return AT.objective(self, *given)

    model = smooth()
    found = objective(AWP(Listening(attack), 0.1), model)
    expected = objective(AWP(AT(attack), 0.1), model)
    assert torch.equal(found.sample_losses, expected.sample_losses)
    assert len(shown) == 2 and len(shown[0]) == len(shown[1]) == 3 * 3 + 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(*shown, strict=True))


# --- what it leaves alone, and what it hands on ---


def test_batch_norm_remembers_the_pass_at_the_perturbed_weights_alone():
    model, seen, answers = normalized(), [], []
    model[1].register_forward_hook(lambda module, given, out: seen.append(given[0].detach()))
    model.register_forward_hook(lambda module, given, out: answers.append(out.detach()))
    found = objective(AWP(AT(ATTACK), 0.1), model)
    assert model[1].num_batches_tracked == 1 and torch.equal(answers[-1], found.logits)
    assert not torch.allclose(answers[-1], answers[-2], rtol=1e-3)
    assert torch.allclose(model[1].running_mean, 0.1 * seen[-1].mean((0, 2, 3)))


def test_weights_flags_modes_and_gradients_stay_and_only_backward_adds_to_them():
    model = normalized()
    model[3].eval()
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    found = objective(AWP(DONE(ATTACK), 0.3), model)
    names = dict(model.named_parameters())
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in names)
    assert all(p.grad is None for p in model.parameters()) and not model[3].training and model[1].training
    assert [p.requires_grad for p in model.parameters()] == [True, False] + [True] * 4
    found.loss.backward()
    assert model[0].bias.grad is None and all(p.grad is not None for p in model.parameters() if p.requires_grad)


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
    scalar = objective(AT(ATTACK), model).loss
    other = moved(model, torch.autograd.grad(scalar, list(model.parameters())), 0.1)
    assert other.two.weight is other.one.weight
    delta = ATTACK(model, samples().x, samples().y, TRAIN_STEP.generator("attack"))
    expected = F.cross_entropy(other(samples().x + delta), samples().y)
    found = objective(AWP(AT(ATTACK), 0.1), model).loss
    assert torch.allclose(gradient(found, model), gradient(expected, other), rtol=1e-9, atol=1e-14)


def test_state_and_sampling_are_those_of_the_wrapped_method():
    cfol = CFOL(ATTACK, eta=0.1)
    state = objective(AWP(cfol), normalized()).state
    assert torch.equal(AWP(cfol).sampling(state), cfol.sampling(state)) and state["scores"].sum() > 0
    assert AWP(AT()).sampling({}) is None
    with pytest.raises(UsageError, match="counts"):
        AWP(cfol).init()


def test_two_processes_perturb_as_one(monkeypatch):
    """The gradient that chooses v is that of all processes' samples."""
    model = smooth()
    halves = [samples()._replace(x=part.x, y=part.y) for part in (_rows(0, 3), _rows(3, 6))]
    scalars = [Standard().objective(model, half, {}, TRAIN_STEP).loss for half in halves]
    together = AWP().perturbation(model, Standard().objective(model, samples(), {}, TRAIN_STEP).loss)
    weights = [model[1].weight, model[3].weight]
    theirs = torch.autograd.grad(scalars[1], weights)
    monkeypatch.setattr(
        "doubly.distributed.collectives.mean", lambda own: [(a + b) / 2 for a, b in zip(own, theirs, strict=True)]
    )
    shared = AWP().perturbation(model, scalars[0])
    assert all(torch.allclose(shared[name], together[name], rtol=1e-12) for name in together)


def _rows(first, last):
    return Batch(*(part[first:last] for part in samples()))


def test_a_wrapped_method_is_saved_and_read_as_a_tree():
    method = AWP(DONE(ATTACK, cap=3.0), 0.005, 0.1)
    assert from_json(to_json(method)) == method
    assert AWP().method == AT()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gamma": -0.1}, "gamma"),
        ({"gamma": float("nan")}, "gamma"),
        ({"warm_up": 1.0}, r"\[0, 1\)"),
        ({"warm_up": -0.1}, r"\[0, 1\)"),
        ({"method": AWP()}, "twice"),
    ],
)
def test_options_that_do_not_fit_are_refused(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        AWP(**values)


def test_a_model_without_weights_to_perturb_is_refused():
    model = smooth()
    for name in (1, 3):
        model[name].weight.requires_grad_(False)
    with pytest.raises(UsageError, match="name them so"):
        objective(AWP(), model)

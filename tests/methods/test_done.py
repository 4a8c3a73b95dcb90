"""DONE: its ends, its divergences, and its implicit gradient compared with a dense computation."""

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call

from dense_cid import dense_cid
from doubly.attacks import PGD
from doubly.bilevel import (
    AdamStep,
    BarrierStep,
    ChiSquare,
    CVaR,
    GradientStep,
    SignStep,
    cid_first_order_parts,
)
from doubly.data import Digits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, LogitMargin, MartLoss, TradesLoss
from doubly.methods import AT, DONE
from doubly.models import SmallCNN
from doubly.recipes import recipe
from doubly.schedules import Constant, Piecewise
from doubly.threat import L2Ball, LinfBall
from doubly.types import Batch, TrainStep
from method_problems import flat_gradient as gradient

THREAT = LinfBall(0.2, barrier=1e-2)
START = TrainStep()


def smooth(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def samples(count=6, dtype=torch.float64, shift=0):
    """Return noise; `shift` changes the labels."""
    x = torch.rand(count, 1, 3, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Batch(x, (torch.arange(count) + shift) % 3, torch.arange(count))


def interior(batch, seed=2):
    """Return perturbations away from the faces of the box."""
    return THREAT.around(batch.x).shrunk(0.05).sample(torch.Generator().manual_seed(seed))


def test_large_r_and_cap_one_are_at_in_every_step():
    attack = PGD(THREAT, 3, SignStep(0.05))
    model = smooth()
    for settings in [
        {"temperature": Constant(1e10)},
        {"temperature": Constant(1e10), "divergence": "chi2"},
        {"cap": 1.0, "temperature": Constant(0.1)},
        {"cap": 1.0, "divergence": "chi2"},
        {"cap": 1.0, "divergence": "cvar"},
    ]:
        method, state = DONE(attack, implicit="none", **settings), {}
        for step in range(3):
            batch = samples(shift=step)
            result = method.objective(model, batch, state, TrainStep(step=step))
            expected = AT(attack).objective(model, batch, {}, TrainStep(step=step))
            slopes = gradient(result.loss, model), gradient(expected.loss, model)
            assert torch.allclose(*slopes, rtol=1e-7, atol=1e-10), settings
            state = result.state


def test_small_r_is_the_gradient_of_the_worst_sample():
    model, batch = smooth(), samples()
    method = DONE(PGD(THREAT, 3), temperature=Constant(1e-4), implicit="none")
    result = method.objective(model, batch, {}, START)
    delta = method.attack(model, batch.x, batch.y, START.generator("attack"))
    worst = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none").max()
    assert torch.allclose(gradient(result.loss, model), gradient(worst, model), rtol=1e-6)


def test_u_starts_anew_when_the_temperature_changes():
    method, model, batch = DONE(PGD(THREAT, 1, SignStep(2 / 255)), implicit="none"), smooth(), samples()
    state = {}
    for step, (progress, r) in enumerate([(0.0, 10.0), (0.5, 10.0), (0.7, 1.0), (0.9, 0.1)]):
        result = method.objective(model, batch, state, TrainStep(step=step, progress=progress))
        assert result.state["r"].item() == r
        softmax = torch.softmax(result.sample_losses / r, 0) * len(batch.y)
        assert torch.allclose(result.weights, softmax) == (progress != 0.5)  # where u is the average of two batches
        assert not result.record
        state = result.state
    limited = DONE(PGD(THREAT, 1), implicit="none", mean_weight_limit=1.001)
    assert limited.objective(model, batch, {}, START).record == {"weight_limited": 0}
    after_high_losses = {"nu": torch.tensor(5.0, dtype=torch.float64), "r": torch.tensor(10.0, dtype=torch.float64)}
    assert limited.objective(model, batch, after_high_losses, START).record == {"weight_limited": 1}


def test_the_variants_run_with_every_implicit_term():
    model, batch = smooth(torch.float32), samples(dtype=torch.float32)
    for rule in (SignStep(0.05), BarrierStep(1.0), AdamStep(0.05), GradientStep(1.0)):
        for implicit in ("exact", "first_order", "none"):
            method = DONE(PGD(THREAT, 4, rule), cap=5.0, implicit=implicit)
            for progress in (0.1, 0.7, 0.9):
                result = method.objective(model, batch, {}, TrainStep(progress=progress))
                assert gradient(result.loss, model).isfinite().all() and result.weights.max() <= 5
    l2 = DONE(PGD(L2Ball(0.3), 3, GradientStep(1.0)), implicit="none")
    assert l2.objective(smooth(), samples(), {}, START).loss.isfinite()


DIVERGENCES = [
    ({"divergence": "chi2"}, ChiSquare(0.1, 0.6)),
    ({"divergence": "chi2", "cap": 1.5}, ChiSquare(0.1, 0.6, 1.5)),
    ({"divergence": "cvar", "cap": 2.5}, CVaR(0.4, 0.6)),
]
each_divergence = pytest.mark.parametrize(("settings", "composition"), DIVERGENCES, ids=["chi2", "chi2, cap", "cvar"])


def with_divergence(settings, **others):
    return DONE(PGD(THREAT, 3), temperature=Constant(0.1), eta=0.6, **settings, **others)


@each_divergence
def test_the_weights_of_a_divergence_are_those_of_its_composition(settings, composition):
    model = smooth()
    for implicit in ("exact", "first_order", "none"):
        method, state, expected_state = with_divergence(settings, implicit=implicit), {}, {}
        for step in range(3):
            result = method.objective(model, samples(12, shift=step), state, TrainStep(step=step))
            expected, expected_state = composition.update(result.sample_losses, result.sample_losses, expected_state)
            state = result.state
            assert torch.equal(result.weights, expected) and result.weights.std() > 0.1
            assert state.keys() == expected_state.keys()
            assert all(torch.equal(state[key], expected_state[key]) for key in state)


@each_divergence
def test_without_implicit_term_a_divergence_is_a_weighted_mean_of_the_losses(settings, composition):
    method, model, batch = with_divergence(settings, implicit="none"), smooth(), samples(12)
    result = method.objective(model, batch, {}, START)
    delta = method.attack(model, batch.x, batch.y, START.generator("attack"))
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    expected = gradient((result.weights * losses).mean(), model)
    assert torch.allclose(gradient(result.loss, model), expected, rtol=1e-9, atol=1e-12)


def test_cvar_follows_the_cap_and_no_temperature():
    model, batch = smooth(), samples(12)
    one, other = (
        DONE(PGD(THREAT, 3), temperature=Constant(r), divergence="cvar", cap=3.0).objective(model, batch, {}, START)
        for r in (0.1, 10.0)
    )
    assert torch.equal(one.weights, other.weights)
    worst = one.sample_losses.argsort(descending=True)
    assert torch.allclose(one.weights[worst], torch.tensor([3.0] * 4 + [0.0] * 8).double())


@each_divergence
def test_the_state_of_a_divergence_can_be_saved_and_matters(tmp_path, settings, composition):
    method, model = with_divergence(settings), smooth()
    state = method.objective(model, samples(12), method.init(), START).state
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    batch = samples(12, shift=1)
    one, again, anew = (method.objective(model, batch, s, TrainStep(step=1)) for s in (state, loaded, {}))
    assert torch.equal(one.weights, again.weights)
    assert all(torch.equal(one.state[key], again.state[key]) for key in one.state)
    assert not all(torch.equal(one.state[key], anew.state[key]) for key in one.state)


@each_divergence
def test_first_order_is_the_exact_term_for_every_divergence(settings, composition):
    model, batch = smooth(), samples(12)
    delta = interior(batch)
    none, exact, first_order = (
        gradient(
            with_divergence(settings, damping=1.0, implicit=implicit).direction(model, batch, delta, {}, START).loss,
            model,
        )
        for implicit in ("none", "exact", "first_order")
    )
    assert (exact - none).norm() > 0.01 * none.norm()
    assert torch.allclose(first_order - none, exact - none, rtol=0, atol=1e-3 * (exact - none).norm().item())


def exponential_and_penalized(model, batch, r, damping, attack_loss, outer=None):
    """Return g_i = exp(l_i / r), h_i = l'_i + barrier + damping, and the curvature of the barrier, for `dense_cid`.

    They are functions of flat parameters and one delta. l_i is the cross-entropy, or `outer` of the probabilities of
    the attacked and the clean image and the label.
    """
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def logits(theta, delta, i):
        parts = zip(shapes.items(), theta.split(sizes), strict=True)
        return functional_call(model, {n: part.view(s) for (n, s), part in parts}, batch.x[i : i + 1] + delta)

    def g(theta, delta, i):
        if outer is not None:
            probabilities = (logits(theta, d, i)[0].softmax(0) for d in (delta.view(1, 1, 3, 3), 0.0))
            return (outer(*probabilities, int(batch.y[i])) / r).exp()
        return (F.cross_entropy(logits(theta, delta.view(1, 1, 3, 3), i), batch.y[i : i + 1]) / r).exp()

    def barrier(delta, i):
        x = batch.x[i].flatten()
        upper, lower = (1 - x).clamp(max=THREAT.radius), (-x).clamp(min=-THREAT.radius)
        return -THREAT.barrier * ((upper - delta).log() + (delta - lower).log()).sum() + damping / 2 * delta @ delta

    def h(theta, delta, i):
        z, y = logits(theta, delta.view(1, 1, 3, 3), i)[0], int(batch.y[i])
        rival = max(z[j] for j in range(3) if j != y) if attack_loss == LogitMargin() else z.logsumexp(0)
        return barrier(delta, i) - (rival - z[y])

    return g, h, lambda delta, i: torch.autograd.functional.hessian(lambda d: barrier(d, i), delta)


def trades(q, p, y):
    return -p[y].log() + 20 * (p * (p / q).log()).sum()


def mart(q, p, y):
    runner_up = max(q[j] for j in range(3) if j != y)
    return -q[y].log() - (1.0001 - runner_up).log() + 20 * (p * (p / q).log()).sum() * (1.0000001 - p[y])


@pytest.mark.parametrize("curvature", ["barrier", "full"])
@pytest.mark.parametrize(
    ("attack_loss", "loss", "outer", "damping"),
    [
        (CrossEntropy(), CrossEntropy(), None, 0.0),
        (CrossEntropy(), CrossEntropy(), None, 2.0),
        (LogitMargin(), CrossEntropy(), None, 0.0),
        (LogitMargin(), CrossEntropy(), None, 2.0),
        (CrossEntropy(), TradesLoss(20.0), trades, 0.0),  # clean logits depend on theta and not on delta
        (CrossEntropy(), MartLoss(20.0), mart, 0.0),
    ],
    ids=["ce", "ce, damped", "margin", "margin, damped", "trades", "mart"],
)
def test_exact_equals_the_dense_computation(curvature, attack_loss, loss, outer, damping):
    model, batch = smooth(), samples()
    delta = interior(batch)
    method = DONE(
        PGD(THREAT, loss=attack_loss), loss, Constant(0.5), damping=damping, implicit="exact", curvature=curvature
    )
    direction = method.direction(model, batch, delta, {}, START)
    g, h, of_barrier = exponential_and_penalized(model, batch, 0.5, damping, attack_loss, outer)
    theta, rows = torch.cat([p.flatten() for p in model.parameters()]).detach(), delta.flatten(1)
    expected = dense_cid(
        g, h, theta, rows, lambda u: 0.5 * u.log(), curvature=of_barrier if curvature == "barrier" else None
    )
    tolerance = 1e-8 if curvature == "barrier" else 1e-6  # conjugate gradients stop at a residual of 1e-6
    assert torch.allclose(gradient(direction.loss, model), expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(direction.values, torch.stack([0.5 * g(theta, rows[i], i).log() for i in range(6)]))
    none = dataclasses.replace(method, implicit="none", curvature="barrier")
    plain = gradient(none.direction(model, batch, delta, {}, START).loss, model)
    assert (expected - plain).norm() > 1e3 * tolerance * expected.norm()  # the term is there to be seen


def test_with_a_paired_loss_and_large_r_done_is_at_with_that_loss():
    attack, batch = PGD(THREAT, 3, SignStep(0.05)), samples()
    for loss in (TradesLoss(), MartLoss()):
        for implicit in ("exact", "none"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
            twin = copy.deepcopy(model)
            # So much damping that nothing is left of the implicit term.
            method = DONE(attack, loss, Constant(1e10), damping=1e12, implicit=implicit)
            result = method.objective(model, batch, {}, START)
            expected = AT(attack, loss).objective(twin, batch, {}, START)
            assert torch.allclose(result.sample_losses, expected.sample_losses)
            assert torch.equal(result.logits, expected.logits)
            assert torch.allclose(gradient(result.loss, model), gradient(expected.loss, twin), rtol=1e-7, atol=1e-9)
            assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_mean, twin[2].running_mean)
    weighted = DONE(PGD(THREAT, 3), TradesLoss(), Constant(0.5)).objective(smooth(), batch, {}, START)
    assert torch.allclose(weighted.weights, 6 * torch.softmax(weighted.sample_losses / 0.5, 0))


def test_the_implicit_term_is_an_input_gradient_penalty_in_the_metric_of_the_barrier():
    model, batch = smooth(), samples()
    delta = interior(batch).requires_grad_()
    method = DONE(PGD(THREAT), temperature=Constant(0.5), damping=1.0)
    direction = method.direction(model, batch, delta.detach(), {}, START)
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    (G,) = torch.autograd.grad(losses.sum(), delta, create_graph=True)
    upper, lower = (1 - batch.x).clamp(max=0.2), (-batch.x).clamp(min=-0.2)
    C = 1e-2 * ((upper - delta) ** -2 + (delta - lower) ** -2) + 1.0
    W = torch.softmax(losses / 0.5, 0).detach() * len(batch.y)
    penalty = 0.5 * W * (G * G / C.detach()).flatten(1).sum(1)
    expected = gradient((W * losses + penalty).mean(), model)
    assert torch.allclose(gradient(direction.loss, model), expected, rtol=1e-9, atol=1e-12)


def test_full_curvature_works_with_an_attack_loss_without_curvature():
    """The margin of a ReLU network is piecewise linear in delta: full and barrier curvature are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    batch = samples()
    barrier, full = (
        DONE(PGD(THREAT, loss=LogitMargin()), curvature=name).direction(model, batch, interior(batch), {}, START)
        for name in ("barrier", "full")
    )
    assert torch.allclose(gradient(full.loss, model), gradient(barrier.loss, model), rtol=1e-10)


def test_first_order_repeats_the_draws_of_dropout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 50), nn.Tanh(), nn.Dropout(0.5), nn.Linear(50, 3)).double().train()
    batch = samples()
    delta, state = interior(batch), torch.get_rng_state()
    slopes = []
    for implicit in ("exact", "first_order"):
        torch.set_rng_state(state)
        method = DONE(PGD(THREAT), temperature=Constant(1.0), damping=1.0, implicit=implicit)
        slopes.append(gradient(method.direction(model, batch, delta, {}, START).loss, model))
    assert torch.allclose(*slopes, rtol=1e-2, atol=1e-4)


@pytest.fixture(scope="module")
def trained():
    """Return a ReLU network that was trained adversarially on digits for a few epochs, and its images."""
    images, method = Digits().load().train, AT(PGD(LinfBall(0.15), 3, SignStep(0.1)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SmallCNN(16).build(1, 10, *images.channel_statistics())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(80):
        batch = rows_of(images, 128 * (step % 11), 128)
        optimizer.zero_grad()
        method.objective(model, batch, {}, TrainStep(step=step)).loss.backward()
        optimizer.step()
    return model, images


def rows_of(images, start, count):
    rows = slice(start, start + count)
    return Batch(images.pixels(rows), images.y[rows], images.ids[rows])


def implicit_terms(model, batch, rule, r, cap, dtype=torch.float32):
    """Return the gradient without term, the exact term, that of first_order, and the share of interior coordinates."""
    attack = PGD(LinfBall(0.15), 10, rule)
    delta = attack(model, batch.x, batch.y, START.generator("attack"))
    model, batch = copy.deepcopy(model).to(dtype), batch._replace(x=batch.x.to(dtype))
    none, exact, first_order = (
        gradient(
            DONE(attack, temperature=Constant(r), cap=cap, damping=10.0, implicit=implicit)
            .direction(model, batch, delta.to(dtype), {}, START)
            .loss,
            model,
        )
        for implicit in ("none", "exact", "first_order")
    )
    box = attack.threat.around(batch.x)
    share = (box.inverse_curvature(delta, 10.0) > 0.05).double().mean().item()
    return none, exact - none, first_order - none, share


def compare(one, other):
    return F.cosine_similarity(one, other, 0).item(), (one.norm() / other.norm()).item()


PGD_RULE, ADAM_RULE, GD_RULE = SignStep(0.15 / 4), AdamStep(0.15 / 4), BarrierStep(1.0)


@pytest.mark.parametrize(
    ("rule", "r", "cap"),
    [(PGD_RULE, 10.0, None), (PGD_RULE, 0.1, 5.0), (ADAM_RULE, 1.0, None), (GD_RULE, 0.1, 5.0)],
    ids=["pgd, r 10", "pgd, r 0.1", "adam", "gd"],
)
def test_first_order_is_the_exact_term_on_a_trained_relu_network(trained, rule, r, cap):
    """In the median batch. In others a ReLU changes its piece within the shift, and the quotient makes that large."""
    model, images = trained
    rows = []
    for start in range(0, 11 * 32, 32):
        _, exact, first_order, share = implicit_terms(model, rows_of(images, start, 32), rule, r, cap)
        rows.append((*compare(first_order, exact), share))
    cosine, length, share = torch.tensor(rows).median(0).values.tolist()
    assert 0.02 < share < 0.9
    assert cosine >= 0.99 and length == pytest.approx(1, abs=0.05)


def test_what_first_order_misses_is_kinks_and_rounding_not_the_formula(trained, monkeypatch):
    """In double precision the shift can be so short that no ReLU changes its piece: then every batch agrees."""
    short = functools.partial(cid_first_order_parts, span=1e-9)
    monkeypatch.setattr("doubly.methods.done.cid_first_order_parts", short)
    model, images = trained
    for rule in (PGD_RULE, GD_RULE):
        for start in (0, 128, 256):
            batch = rows_of(images, start, 128)
            _, exact, first_order, _ = implicit_terms(model, batch, rule, 0.1, 5.0, torch.float64)
            cosine, length = compare(first_order, exact)
            assert cosine > 0.999 and length == pytest.approx(1, abs=0.01)


def test_the_second_step_of_fast_done_acts_where_the_first_one_saturated(trained):
    model, images = trained
    batch, attack = rows_of(images, 0, 512), recipe("digits.done_fast").method.attack

    def attacked(steps):
        delta = dataclasses.replace(attack, steps=steps)(model, batch.x, batch.y, START.generator("attack"))
        delta.requires_grad_()
        loss = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
        (slope,) = torch.autograd.grad(loss.sum(), delta)
        return delta.detach(), loss.detach(), slope

    model.eval()
    (first, loss, slope), (second, final, _) = attacked(1), attacked(2)
    box = attack.threat.around(batch.x)
    inward = ((first == box.upper) & (slope < 0)) | ((first == box.lower) & (slope > 0))
    assert inward.float().mean() > 0.02 and ((second - first)[inward].abs() > 0).float().mean() > 0.99
    moved = (second - first)[inward] / 0.15  # a barrier step leaves them at the face: 0.002 of the radius
    assert moved.abs().mean() > 0.1 and (moved * slope[inward] > 0).all()
    assert final.mean() > loss.mean() and (final > loss).float().mean() > 0.9
    rule = dataclasses.replace(attack.rule, then=BarrierStep(4.0))
    barrier = dataclasses.replace(attack, rule=rule)(model, batch.x, batch.y, START.generator("attack"))
    assert final.mean() > F.cross_entropy(model(batch.x + barrier), batch.y)


def test_refusals():
    gradient_attack = PGD(L2Ball(), rule=GradientStep())
    for settings, message in [
        ({"attack": gradient_attack}, "LinfBall"),
        ({"attack": gradient_attack, "implicit": "first_order"}, "LinfBall"),
        ({"eta": 0.0}, "eta"),
        ({"eta": 1.5}, "eta"),
        ({"cap": 0.9}, "cap"),
        ({"mean_weight_limit": 0.1}, "mean_weight_limit"),
        ({"cap": 5.0, "mean_weight_limit": 10.0}, "exclude"),
        ({"damping": -1.0}, "damping"),
        ({"temperature": Constant(0.0)}, "r=0"),
        ({"temperature": Piecewise((10.0, 1.0, 0.0), (2 / 3, 5 / 6))}, "r=0"),
        ({"implicit": "first_order", "attack": PGD(loss=LogitMargin())}, "use exact"),
        ({"implicit": "first_order", "curvature": "full"}, "use exact"),
        ({"implicit": "first_order", "loss": TradesLoss()}, "one loss for attack and model: use exact"),
        ({"divergence": "cvar"}, "divergence cvar needs a cap"),
        ({"divergence": "cvar", "cap": 0.5}, r"cap=0\.5"),
        ({"divergence": "chi2", "cap": 0.5}, r"cap=0\.5"),
        ({"divergence": "chi2", "mean_weight_limit": 10.0}, "mean_weight_limit belongs to divergence kl"),
        ({"divergence": "cvar", "cap": 2.0, "mean_weight_limit": 10.0}, "mean_weight_limit belongs to divergence kl"),
        ({"divergence": "chi2", "temperature": Constant(0.0)}, "r=0"),
    ]:
        with pytest.raises(UsageError, match=message):
            DONE(**settings)

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call

from doubly.attacks import PGD
from doubly.bilevel import (
    AdamStep,
    BarrierStep,
    ChiSquare,
    CVaR,
    GradientStep,
    MeanVariance,
    SignStep,
    cid_first_order,
)
from doubly.data import load_splits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, LogitMargin, MartLoss, TradesLoss
from doubly.methods import AT, DONE
from doubly.recipes import recipe
from doubly.schedules import Constant, Piecewise
from doubly.threat import L2Ball, LinfBall
from doubly.training.loop import train_run
from doubly.types import Batch, TrainStep

THREAT = LinfBall(0.2, barrier=1e-2)


def smooth(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def samples(count=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 1, 3, 3, generator=generator).to(dtype)
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


def interior(batch, seed=2):
    return THREAT.around(batch.x).shrunk(0.05).sample(torch.Generator().manual_seed(seed))


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def gradient(scalar, model):
    return flat(torch.autograd.grad(scalar, list(model.parameters())))


def moment(step=0, progress=0.0):
    return TrainStep(step=step, progress=progress)


# --- what it becomes at its ends ---


@pytest.mark.parametrize(
    "ends", [{"temperature": Constant(1e10)}, {"cap": 1.0, "temperature": Constant(0.1)}], ids=["r", "cap"]
)
def test_large_r_and_cap_one_are_at_in_every_step(ends):
    attack = PGD(THREAT, 3, SignStep(0.05))
    method, state = DONE(attack, implicit="none", **ends), {}
    model = smooth()
    for step in range(3):
        batch = samples()._replace(y=(samples().y + step) % 3)
        found = method.objective(model, batch, state, moment(step))
        expected = AT(attack).objective(model, batch, {}, moment(step))
        assert torch.allclose(gradient(found.loss, model), gradient(expected.loss, model), rtol=1e-7, atol=1e-10)
        state = found.state


def test_small_r_is_the_gradient_of_the_worst_sample():
    model, batch = smooth(), samples()
    method = DONE(PGD(THREAT, 3), temperature=Constant(1e-4), implicit="none")
    found = method.objective(model, batch, {}, moment())
    delta = method.attack(model, batch.x, batch.y, moment().generator("attack"))
    worst = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none").max()
    assert torch.allclose(gradient(found.loss, model), gradient(worst, model), rtol=1e-6)


def test_the_temperature_follows_training_and_seeds_again():
    method, model, batch = DONE(PGD(THREAT, 1), implicit="none"), smooth(), samples()
    state = {}
    for progress, r in [(0.0, 10.0), (0.5, 10.0), (0.7, 1.0), (0.9, 0.1)]:
        found = method.objective(model, batch, state, moment(progress=progress))
        assert found.state["r"].item() == r
        by_hand = torch.softmax(found.sample_losses / r, 0) * len(batch.y)
        assert torch.allclose(found.weights, by_hand) or progress == 0.5
        state = found.state


@pytest.mark.parametrize("implicit", ["exact", "first_order", "none"])
@pytest.mark.parametrize("rule", [SignStep(0.05), BarrierStep(1.0), AdamStep(0.05), GradientStep(1.0)])
def test_the_variants_run_with_every_implicit_term(rule, implicit):
    model, batch = smooth(torch.float32), samples(dtype=torch.float32)
    method = DONE(PGD(THREAT, 4, rule), cap=5.0, implicit=implicit)
    for progress in (0.1, 0.7, 0.9):
        found = method.objective(model, batch, {}, moment(progress=progress))
        assert gradient(found.loss, model).isfinite().all() and found.weights.max() <= 5


# --- other divergences, by name ---

DIVERGENCES = [
    ("chi2", {}, ChiSquare(0.1, 0.6)),
    ("chi2", {"cap": 1.5}, ChiSquare(0.1, 0.6, 1.5)),
    ("cvar", {"cap": 2.5}, CVaR(0.4, 0.6)),
    ("mean_variance", {}, MeanVariance(0.1, 0.6)),
]
each_divergence = pytest.mark.parametrize(
    ("divergence", "options", "composition"), DIVERGENCES, ids=[f"{name} {o or ''}" for name, o, _ in DIVERGENCES]
)


def with_divergence(divergence, options, **others):
    return DONE(PGD(THREAT, 3), temperature=Constant(0.1), eta=0.6, divergence=divergence, **options, **others)


@each_divergence
@pytest.mark.parametrize("implicit", ["exact", "first_order", "none"])
def test_the_weights_of_a_divergence_are_those_of_its_composition(divergence, options, composition, implicit):
    method, model = with_divergence(divergence, options, implicit=implicit), smooth()
    state, expected_state = {}, {}
    for step in range(3):
        batch = samples(12)._replace(y=(samples(12).y + step) % 3)
        found = method.objective(model, batch, state, moment(step))
        expected, expected_state = composition.update(found.sample_losses, found.sample_losses, expected_state)
        state = found.state
        assert torch.equal(found.weights, expected) and found.weights.std() > 0.1
        assert state.keys() == expected_state.keys()
        assert all(torch.equal(state[key], expected_state[key]) for key in state)


@each_divergence
def test_without_implicit_term_a_divergence_is_a_weighted_mean_of_the_losses(divergence, options, composition):
    method, model, batch = with_divergence(divergence, options, implicit="none"), smooth(), samples(12)
    found = method.objective(model, batch, {}, moment())
    delta = method.attack(model, batch.x, batch.y, moment().generator("attack"))
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    expected = gradient((found.weights * losses).mean(), model)
    assert torch.allclose(gradient(found.loss, model), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divergence", ["chi2", "cvar"])
@pytest.mark.parametrize(
    "steps",
    [1, 3],
)
def test_cap_one_is_at_with_other_divergences_too(divergence, steps):
    attack = PGD(THREAT, 3, SignStep(0.05))
    method, model, state = DONE(attack, divergence=divergence, cap=1.0, implicit="none"), smooth(), {}
    for step in range(steps):
        batch = samples()._replace(y=(samples().y + step) % 3)
        found = method.objective(model, batch, state, moment(step))
        expected = AT(attack).objective(model, batch, {}, moment(step))
        assert torch.allclose(gradient(found.loss, model), gradient(expected.loss, model), rtol=1e-7, atol=1e-10)
        state = found.state


def test_large_r_is_at_with_a_chi_square_too():
    attack = PGD(THREAT, 3, SignStep(0.05))
    model, batch = smooth(), samples()
    for divergence in ("chi2", "mean_variance"):
        method = DONE(attack, temperature=Constant(1e10), divergence=divergence, implicit="none")
        found, expected = (m.objective(model, batch, {}, moment()) for m in (method, AT(attack)))
        assert torch.allclose(gradient(found.loss, model), gradient(expected.loss, model), rtol=1e-7, atol=1e-10)


def test_cvar_follows_the_cap_and_no_temperature():
    model, batch = smooth(), samples(12)
    found = [
        DONE(PGD(THREAT, 3), temperature=Constant(r), divergence="cvar", cap=3.0).objective(model, batch, {}, moment())
        for r in (0.1, 10.0)
    ]
    assert torch.equal(found[0].weights, found[1].weights)
    worst = found[0].sample_losses.argsort(descending=True)
    assert torch.allclose(found[0].weights[worst], torch.tensor([3.0] * 4 + [0.0] * 8).double())


@each_divergence
def test_the_state_of_a_divergence_is_plain_tensors_that_are_saved_and_go_on(
    tmp_path, divergence, options, composition
):
    method, model = with_divergence(divergence, options), smooth()
    state = method.objective(model, samples(12), method.init(), moment()).state
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    batch = samples(12)._replace(y=(samples(12).y + 1) % 3)
    kept, again, anew = (method.objective(model, batch, s, moment(1)) for s in (state, loaded, {}))
    assert torch.equal(kept.weights, again.weights)
    assert all(torch.equal(kept.state[key], again.state[key]) for key in kept.state)
    assert not all(torch.equal(kept.state[key], anew.state[key]) for key in kept.state)


@pytest.mark.parametrize(
    ("divergence", "options"),
    [
        ("chi2", {}),
        ("chi2", {"cap": 1.5}),
        ("cvar", {"cap": 2.5}),
        pytest.param(
            "mean_variance",
            {},
        ),
    ],
)
def test_first_order_is_the_exact_term_for_every_divergence(divergence, options):
    model, batch = smooth(), samples(12)
    delta = interior(batch)
    none, exact, quick = (
        gradient(
            with_divergence(divergence, options, damping=1.0, implicit=implicit)
            .direction(model, batch, delta, {}, moment())
            .loss,
            model,
        )
        for implicit in ("none", "exact", "first_order")
    )
    assert (exact - none).norm() > 0.01 * none.norm()
    assert torch.allclose(quick - none, exact - none, rtol=0, atol=1e-3 * (exact - none).norm().item())


# --- the implicit gradient ---


def exponential_and_penalized(model, batch, r, damping, attack_loss, outer=None):
    """g_i = exp(l_i / r) and h_i = l'_i + barrier + damping, of flat parameters and one delta: for the dense twin.

    l_i is the cross-entropy, or `outer` of the probabilities of the attacked and the clean image and the label.
    """
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def logits(theta, delta, i):
        parts = zip(shapes.items(), theta.split(sizes), strict=True)
        return functional_call(model, {n: part.view(s) for (n, s), part in parts}, batch.x[i : i + 1] + delta)

    def g(theta, delta, i):
        if outer is not None:
            answers = (logits(theta, d, i)[0].softmax(0) for d in (delta.view(1, 1, 3, 3), 0.0))
            return (outer(*answers, int(batch.y[i])) / r).exp()
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


@pytest.mark.parametrize("curvature", ["barrier", "full"])
@pytest.mark.parametrize("attack_loss", [CrossEntropy(), LogitMargin()])
@pytest.mark.parametrize("damping", [0.0, 2.0])
def test_exact_equals_the_dense_twin(dense_cid, curvature, attack_loss, damping):
    model, batch = smooth(), samples()
    delta = interior(batch)
    method = DONE(
        PGD(THREAT, loss=attack_loss), temperature=Constant(0.5), damping=damping, implicit="exact", curvature=curvature
    )
    found = gradient(method.direction(model, batch, delta, {}, moment()).loss, model)
    g, h, alone = exponential_and_penalized(model, batch, 0.5, damping, attack_loss)
    theta = flat(model.parameters()).detach()
    rows = delta.flatten(1)
    expected = dense_cid(
        g, h, theta, rows, lambda u: 0.5 * u.log(), curvature=alone if curvature == "barrier" else None
    )
    tolerance = 1e-8 if curvature == "barrier" else 1e-6  # conjugate gradients stop at a residual of 1e-6
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
    none = dataclasses.replace(method, implicit="none", curvature="barrier")
    plain = gradient(none.direction(model, batch, delta, {}, moment()).loss, model)
    assert (expected - plain).norm() > 1e3 * tolerance * expected.norm()  # the term is there to be seen


def trades(q, p, y):
    return -p[y].log() + 20 * (p * (p / q).log()).sum()


def mart(q, p, y):
    rival = max(q[j] for j in range(3) if j != y)
    return -q[y].log() - (1.0001 - rival).log() + 20 * (p * (p / q).log()).sum() * (1.0000001 - p[y])


@pytest.mark.parametrize("curvature", ["barrier", "full"])
@pytest.mark.parametrize(("loss", "outer"), [(TradesLoss(20.0), trades), (MartLoss(20.0), mart)])
def test_exact_with_a_paired_loss_equals_the_dense_twin(dense_cid, curvature, loss, outer):
    """The clean logits depend on theta and not on delta; the attack stays one on the cross-entropy."""
    model, batch = smooth(), samples()
    delta = interior(batch)
    method = DONE(PGD(THREAT), loss, Constant(0.5), damping=0.0, implicit="exact", curvature=curvature)
    found = method.direction(model, batch, delta, {}, moment())
    g, h, alone = exponential_and_penalized(model, batch, 0.5, 0.0, CrossEntropy(), outer)
    theta = flat(model.parameters()).detach()
    rows = delta.flatten(1)
    expected = dense_cid(
        g, h, theta, rows, lambda u: 0.5 * u.log(), curvature=alone if curvature == "barrier" else None
    )
    tolerance = 1e-8 if curvature == "barrier" else 1e-6
    assert torch.allclose(gradient(found.loss, model), expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(found.values, torch.stack([0.5 * g(theta, rows[i], i).log() for i in range(6)]))
    none = dataclasses.replace(method, implicit="none", curvature="barrier")
    plain = gradient(none.direction(model, batch, delta, {}, moment()).loss, model)
    assert (expected - plain).norm() > 1e3 * tolerance * expected.norm()


@pytest.mark.parametrize("implicit", ["exact", "none"])
@pytest.mark.parametrize("loss", [TradesLoss(), MartLoss()])
def test_with_a_paired_loss_and_large_r_done_is_at_with_that_loss(loss, implicit):
    attack = PGD(THREAT, 3, SignStep(0.05))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    twin, batch = copy.deepcopy(model), samples()
    # So much damping that of the implicit term nothing is left.
    method = DONE(attack, loss, Constant(1e10), damping=1e12, implicit=implicit)
    found = method.objective(model, batch, {}, moment())
    expected = AT(attack, loss).objective(twin, batch, {}, moment())
    assert torch.allclose(found.sample_losses, expected.sample_losses) and torch.equal(found.logits, expected.logits)
    assert torch.allclose(gradient(found.loss, model), gradient(expected.loss, twin), rtol=1e-7, atol=1e-9)
    assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_mean, twin[2].running_mean)


def test_done_weighs_samples_by_their_paired_loss():
    found = DONE(PGD(THREAT, 3), TradesLoss(), Constant(0.5)).objective(smooth(), samples(), {}, moment())
    assert torch.allclose(found.weights, 6 * torch.softmax(found.sample_losses / 0.5, 0))


def test_the_implicit_term_is_an_input_gradient_penalty_in_the_barrier_s_metric():
    model, batch = smooth(), samples()
    delta = interior(batch).requires_grad_()
    method = DONE(PGD(THREAT), temperature=Constant(0.5), damping=1.0)
    found = method.direction(model, batch, delta.detach(), {}, moment())
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    (G,) = torch.autograd.grad(losses.sum(), delta, create_graph=True)
    upper, lower = (1 - batch.x).clamp(max=0.2), (-batch.x).clamp(min=-0.2)
    C = 1e-2 * ((upper - delta) ** -2 + (delta - lower) ** -2) + 1.0
    W = torch.softmax(losses / 0.5, 0).detach() * len(batch.y)
    penalty = 0.5 * W * (G * G / C.detach()).flatten(1).sum(1)
    expected = gradient((W * losses + penalty).mean(), model)
    assert torch.allclose(gradient(found.loss, model), expected, rtol=1e-9, atol=1e-12)


def test_full_curvature_takes_an_attack_loss_without_curvature():
    """The margin of a ReLU network is piecewise linear in delta: full and barrier curvature are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    batch = samples()
    delta = interior(batch)
    barrier, full = (
        DONE(PGD(THREAT, loss=LogitMargin()), curvature=word).direction(model, batch, delta, {}, moment())
        for word in ("barrier", "full")
    )
    assert torch.allclose(gradient(full.loss, model), gradient(barrier.loss, model), rtol=1e-10)


def test_first_order_repeats_the_draws_of_dropout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 50), nn.Tanh(), nn.Dropout(0.5), nn.Linear(50, 3)).double().train()
    batch = samples()
    delta, stand = interior(batch), torch.get_rng_state()
    found = []
    for implicit in ("exact", "first_order"):
        torch.set_rng_state(stand)
        method = DONE(PGD(THREAT), temperature=Constant(1.0), damping=1.0, implicit=implicit)
        found.append(gradient(method.direction(model, batch, delta, {}, moment()).loss, model))
    assert torch.allclose(*found, rtol=1e-2, atol=1e-4)


# --- on a trained ReLU network ---


@pytest.fixture(scope="module")
def trained():
    run = recipe("digits.imbalanced.at")
    run = dataclasses.replace(run, epochs=10, validation=dataclasses.replace(run.validation, every=100, size=50))
    splits = load_splits(run.data)
    return train_run(run, None, splits=splits), splits.train


def implicit_terms(model, batch, rule, r, cap, dtype=torch.float32):
    """(plain gradient, exact term, first_order's term)"""
    attack = PGD(LinfBall(0.15), 10, rule)
    delta = attack(model, batch.x, batch.y, moment().generator("attack"))
    model, batch = copy.deepcopy(model).to(dtype), batch._replace(x=batch.x.to(dtype))
    made = [
        gradient(
            DONE(attack, temperature=Constant(r), cap=cap, damping=10.0, implicit=implicit)
            .direction(model, batch, delta.to(dtype), {}, moment())
            .loss,
            model,
        )
        for implicit in ("none", "exact", "first_order")
    ]
    box = attack.threat.around(batch.x)
    share = (box.inverse_curvature(delta, 10.0) > 0.05).double().mean().item()
    return made[0], made[1] - made[0], made[2] - made[0], share


def batches(images, count=15, size=32):
    for first in range(0, count * size, size):
        picked = slice(first, first + size)
        yield Batch(images.pixels(picked), images.y[picked], images.ids[picked])


def compare(one, other):
    return F.cosine_similarity(one, other, 0).item(), (one.norm() / other.norm()).item()


PGD_RULE, ADAM_RULE, GD_RULE = SignStep(0.15 / 4), AdamStep(0.15 / 4), BarrierStep(1.0)


@pytest.mark.parametrize(
    ("rule", "r", "cap"),
    [
        (PGD_RULE, 10.0, None),
        (PGD_RULE, 1.0, None),
        (PGD_RULE, 0.1, 5.0),
        (ADAM_RULE, 10.0, None),
        (ADAM_RULE, 0.1, 5.0),
        (GD_RULE, 0.1, 5.0),
    ],
)
def test_first_order_is_the_exact_term_on_a_trained_relu_network(trained, rule, r, cap):
    """In the median batch. In others a ReLU changes its piece within the shift, and the quotient makes that large."""
    model, images = trained
    rows = []
    for batch in batches(images):
        none, exact, quick, share = implicit_terms(model, batch, rule, r, cap)
        rows.append((*compare(quick, exact), compare(none, none + exact)[0], share))
    cosine, length, plain, share = torch.tensor(rows).median(0).values.tolist()
    off = sum(row[0] < 0.99 for row in rows) / len(rows)
    print(
        f"\n{type(rule).__name__} r={r} cap={cap}: cosine {cosine:.4f}, length {length:.4f}, batches below 0.99 "
        f"{off:.0%}, cos(none, exact) {plain:.6f}, interior {share:.1%}"
    )
    assert 0.02 < share < 0.9
    assert cosine >= 0.99 and length == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("rule", [PGD_RULE, GD_RULE])
def test_what_first_order_misses_is_kinks_and_rounding_not_the_formula(trained, rule, monkeypatch):
    """In double precision the shift can be so short that no ReLU changes its piece: then every batch agrees."""
    short = functools.partial(cid_first_order, span=1e-9)
    monkeypatch.setattr("doubly.methods.done.cid_first_order", short)
    model, images = trained
    for batch in batches(images, 5, 128):
        _, exact, quick, _ = implicit_terms(model, batch, rule, 0.1, 5.0, torch.float64)
        cosine, length = compare(quick, exact)
        assert cosine > 0.999 and length == pytest.approx(1, abs=0.01)


# --- options that mean nothing ---


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attack": PGD(L2Ball(), rule=GradientStep())}, "LinfBall"),
        ({"attack": PGD(L2Ball(), rule=GradientStep()), "implicit": "first_order"}, "LinfBall"),
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
        ({"divergence": "cvar"}, "divergence cvar needs a cap"),
        pytest.param(
            {"divergence": "cvar", "cap": 0.5},
            r"cap=0\.5",
        ),
        ({"divergence": "chi2", "cap": 0.5}, r"cap=0\.5"),
        ({"divergence": "mean_variance", "cap": 2.0}, "mean_variance has no cap: use chi2"),
        ({"divergence": "chi2", "mean_weight_limit": 10.0}, "mean_weight_limit belongs to divergence kl"),
        ({"divergence": "cvar", "cap": 2.0, "mean_weight_limit": 10.0}, "mean_weight_limit belongs to divergence kl"),
        ({"divergence": "chi2", "temperature": Constant(0.0)}, "r=0"),
        ({"implicit": "first_order", "loss": TradesLoss()}, "one loss for attack and model: use exact"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_fix(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        DONE(**options)


def test_an_l2_threat_trains_without_implicit_term():
    method = DONE(PGD(L2Ball(0.3), 3, GradientStep(1.0)), implicit="none")
    assert method.objective(smooth(), samples(), {}, moment()).loss.isfinite()

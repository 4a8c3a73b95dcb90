import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, LogitMargin, kl_divergence
from doubly.methods import AT, MAIL, MART, TRADES
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep

PROBLEMS = runpy.run_path(str(Path(__file__).parent / "problems.py"))
data, by_batch_statistics = PROBLEMS["plain_noise"], PROBLEMS["by_batch_statistics"]

LATE = TrainStep(epoch=80, step=4, progress=0.7, seed=9)
EARLY = LATE._replace(progress=0.5)
ATTACK = PGD(LinfBall(0.1), 4, SignStep(0.03), "gaussian")
FORMS = ("at", "trades", "mart")
MARGINS = ("adversarial", "natural", "difference")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4)
        model = nn.Sequential(nn.Flatten(), *layers).double().train()
        model[2].running_mean.normal_()  # so that evaluation and training mode answer differently
        model[4].weight.data *= 5
    return model


def gradients(scalar, model):
    return torch.autograd.grad(scalar, list(model.parameters()))


def plain(form, beta=5.0, attack_on="cross_entropy"):
    made = {"at": AT(ATTACK), "trades": TRADES(ATTACK, beta, attack_on), "mart": MART(ATTACK, beta)}
    return made[form]


def with_margins(*margins):
    """Logits of two classes whose probabilities are (1 + PM) / 2 for the truth, class 0, and (1 - PM) / 2."""
    rows = [[math.log((1 + m) / 2), math.log((1 - m) / 2)] for m in margins]
    return torch.tensor(rows, dtype=torch.float64), torch.zeros(len(margins), dtype=torch.int64)


# --- the weights ---


@pytest.mark.parametrize(
    ("slope", "bias", "weights"),
    [
        (10.0, -0.5, (2.98, 1.5, 0.0201, 0.00166)),  # the fact sheet's table for MAIL-AT, rounded
        (2.0, 0.0, (2.64, 2.193, 1.5, 1.133)),
    ],
)
def test_the_released_weights_by_hand(slope, bias, weights):
    margins = (-0.9999, -0.5, 0.0, 0.25)
    logits, y = with_margins(*margins)
    found = MAIL(slope=slope, bias=bias).weights(logits, y, logits).tolist()
    assert found == pytest.approx([3 / (1 + math.exp(-slope * (bias - m))) for m in margins], rel=1e-9)
    assert found == pytest.approx(weights, rel=5e-3)


def test_normalised_weights_by_hand():
    margins = (-0.9, -0.5, 0.0, 0.4)
    logits, y = with_margins(*margins)
    sigmoids = [1 / (1 + math.exp(-4 * (0.1 - m))) for m in margins]
    found = MAIL(slope=4.0, bias=0.1, normalize="batch").weights(logits, y, logits).tolist()
    assert found == pytest.approx([4 * s / sum(sigmoids) for s in sigmoids], rel=1e-9)
    assert sum(found) == pytest.approx(4)


def test_the_three_margins_by_hand():
    attacked = torch.tensor([[1.0, 0.0, -1.0], [0.0, 2.0, 1.0]], dtype=torch.float64)
    clean = torch.tensor([[3.0, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0, 2])

    def shares(row):
        return [math.exp(z) / sum(math.exp(other) for other in row) for z in row]

    def margin(row, label):
        p = shares(row)
        return p[label] - max(share for k, share in enumerate(p) if k != label)

    rows = list(zip(attacked.tolist(), clean.tolist(), y.tolist(), strict=True))
    by_hand = {
        "adversarial": [margin(a, label) for a, _, label in rows],
        "natural": [margin(c, label) for _, c, label in rows],
        "difference": [shares(c)[label] - shares(a)[label] for a, c, label in rows],
    }
    for word, margins in by_hand.items():
        found = MAIL(margin=word, slope=2.0, bias=0.3).weights(attacked, y, clean).tolist()
        assert found == pytest.approx([3 / (1 + math.exp(-2 * (0.3 - m))) for m in margins], rel=1e-9), word


@pytest.mark.parametrize("bias", [-5.0, 0.0, 5.0])
def test_a_steep_slope_leaves_no_batch_without_weight(bias):
    logits, y = with_margins(0.2, 0.5, 0.9)
    found = MAIL(slope=1e4, bias=bias, normalize="batch").weights(logits.float(), y, logits.float())
    assert found.isfinite().all() and found.mean().item() == pytest.approx(1)
    assert (MAIL(slope=1e4, bias=bias).weights(logits.float(), y, logits.float()) >= 0).all()


def test_a_mean_of_one_is_that_over_all_processes(monkeypatch):
    logits, y = with_margins(-0.9, -0.5, 0.0, 0.4)
    method = MAIL(slope=4.0, bias=0.1, normalize="batch")
    together = method.weights(logits, y, logits)
    halves = [MAIL(slope=4.0, bias=0.1).weights(logits[part], y[part], None) for part in (slice(2), slice(2, 4))]
    monkeypatch.setattr(parallel, "gather", lambda mine: torch.cat([(half / 3).log() for half in halves]))
    apart = [method.weights(logits[part], y[part], None) for part in (slice(2), slice(2, 4))]
    assert torch.allclose(torch.cat(apart), together)


# --- the objective ---


@pytest.mark.parametrize("normalize", ["x3", "batch"])
@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("form", FORMS)
def test_the_objective_is_its_formula_with_constant_weights_from_training_mode(form, margin, normalize):
    model, twin, batch = network(), network(), data()
    method = MAIL(ATTACK, form, margin, 3.0, 0.1, normalize, beta=2.0)
    found = method.objective(model, batch, {}, LATE)
    y = batch.y
    attacked = twin(batch.x + ATTACK(twin, batch.x, y, LATE.generator("attack")))
    clean = by_batch_statistics(twin, batch.x)
    q, p = attacked.softmax(1), clean.softmax(1)
    rows = torch.arange(8)
    rival_of = {name: s.masked_fill(F.one_hot(y, 4).bool(), 0.0).amax(1) for name, s in (("q", q), ("p", p))}
    margins = {
        "adversarial": q[rows, y] - rival_of["q"],
        "natural": p[rows, y] - rival_of["p"],
        "difference": p[rows, y] - q[rows, y],
    }
    weights = torch.sigmoid(3 * (0.1 - margins[margin])).detach()
    weights = 3 * weights if normalize == "x3" else weights / weights.mean()
    divergence = 2 * (p * (p / q).log()).sum(1)
    reweighted, rest = {
        "at": (-q[rows, y].log(), torch.zeros(8)),
        "trades": (divergence, -p[rows, y].log()),
        "mart": (-q[rows, y].log() - (1.0001 - rival_of["q"] + 1e-12).log(), divergence * (1.0000001 - p[rows, y])),
    }[form]
    assert torch.allclose(found.weights, weights) and found.weights.std() > 0.01
    assert torch.allclose(found.sample_losses, (reweighted + rest).detach()) and torch.equal(found.logits, attacked.detach())
    expected = (weights * reweighted).mean() + rest.mean()
    assert torch.allclose(found.loss, expected)
    for a, b in zip(gradients(found.loss, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_mean, twin[2].running_mean)


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize(("form", "attack_on"), [*((form, "cross_entropy") for form in FORMS), ("trades", "kl")])
def test_slope_zero_with_a_mean_of_one_is_the_plain_method_exactly(form, attack_on, margin):
    model, twin, batch = network(), network(), data()
    method = MAIL(ATTACK, form, margin, slope=0.0, normalize="batch", attack_on=attack_on)
    found = method.objective(model, batch, {}, LATE)
    expected = plain(form, attack_on=attack_on).objective(twin, batch, {}, LATE)
    assert torch.equal(found.weights, torch.ones(8).double()) and torch.equal(found.sample_losses, expected.sample_losses)
    for a, b in zip(gradients(found.loss, model), gradients(expected.loss, twin), strict=True):
        assert torch.equal(a, b)


def test_slope_zero_times_three_is_one_and_a_half_times_at():
    model, twin, batch = network(), network(), data()
    found = MAIL(ATTACK, slope=0.0).objective(model, batch, {}, LATE)
    expected = AT(ATTACK).objective(twin, batch, {}, LATE)
    for a, b in zip(gradients(found.loss, model), gradients(1.5 * expected.loss, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_during_the_burn_in_it_is_the_plain_method_exactly(form):
    model, twin, batch = network(), network(), data()
    found = MAIL(ATTACK, form, "natural").objective(model, batch, {}, EARLY)
    expected = plain(form).objective(twin, batch, {}, EARLY)
    assert torch.equal(found.weights, torch.ones(8).double())
    for a, b in zip(gradients(found.loss, model), gradients(expected.loss, twin), strict=True):
        assert torch.equal(a, b)


def test_the_burn_in_ends_with_epoch_76_of_120():
    uniform = [
        bool((MAIL(ATTACK).objective(network(), data(), {}, EARLY._replace(progress=p)).weights == 1).all())
        for p in ((75 + 390 / 391) / 120, 76 / 120)
    ]
    assert uniform == [True, False]
    assert (MAIL(ATTACK, burn_in=0.0).objective(network(), data(), {}, TrainStep()).weights != 1).all()


@pytest.mark.parametrize(
    ("form", "margin", "moment", "passes"),
    [
        ("at", "adversarial", LATE, 1),
        ("at", "natural", EARLY, 1),
        ("at", "natural", LATE, 2),
        ("at", "difference", LATE, 2),
        ("trades", "adversarial", EARLY, 2),
        ("mart", "natural", LATE, 2),
    ],
)
def test_the_clean_images_are_passed_only_where_they_are_needed(form, margin, moment, passes):
    model, modes = network(), []
    model[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    MAIL(ATTACK, form, margin).objective(model, data(), {}, moment)
    assert (modes.count(False), modes.count(True)) == (4, passes)


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_the_samples_does_not_matter(form, margin, monkeypatch):
    monkeypatch.setattr(parallel, "uniform", lambda like, generator: torch.full_like(like, 0.7))  # not by position
    batch, order = data(), torch.randperm(8, generator=torch.Generator().manual_seed(0))
    models = network(), network()
    mixed = Batch(*(part[order] for part in batch))
    method = MAIL(ATTACK, form, margin, 3.0, 0.0, "batch")
    one, other = (method.objective(m, b, {}, LATE) for m, b in zip(models, (batch, mixed), strict=True))
    assert torch.allclose(one.weights[order], other.weights) and torch.allclose(one.sample_losses[order], other.sample_losses)
    for a, b in zip(gradients(one.loss, models[0]), gradients(other.loss, models[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)


def test_the_attack_on_the_divergence_is_that_of_trades():
    batch, model = data(), network()
    delta = ATTACK.diverge(model, batch.x, batch.y, LATE.generator("attack"))
    found = MAIL(ATTACK, "trades", attack_on="kl").objective(model, batch, {}, LATE)
    assert torch.equal(found.logits, network()(batch.x + delta).detach())
    other = MAIL(ATTACK, "trades").objective(network(), batch, {}, LATE)
    twin = network()
    expected = CrossEntropy()(by_batch_statistics(twin, batch.x), batch.y)
    expected = expected + 5 * kl_divergence(by_batch_statistics(twin, batch.x), other.logits)
    assert torch.allclose(other.sample_losses, expected.detach()) and not torch.equal(other.logits, found.logits)


def test_by_default_it_is_as_released_but_for_the_radius():
    method = MAIL()
    assert (method.form, method.margin, method.slope, method.bias) == ("at", "adversarial", 10.0, -0.5)
    assert (method.normalize, method.burn_in, method.beta) == ("x3", 76 / 120, 5.0)
    assert method.attack == PGD(start="gaussian") and method.attack_on == "cross_entropy"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"burn_in": 1.0}, r"share of training in \[0, 1\), got 1"),
        ({"burn_in": -0.1}, "share of training"),
        ({"burn_in": 76.0}, "share of training"),
        ({"slope": -1.0}, "slope from 0 on"),
        ({"slope": float("nan")}, "slope from 0 on"),
        ({"slope": float("inf")}, "slope from 0 on"),
        ({"bias": float("nan")}, "finite bias"),
        ({"beta": -1.0}, "beta"),
        ({"attack_on": "kl"}, "got form at: use cross_entropy, or form trades"),
        ({"attack_on": "kl", "form": "mart"}, "got form mart"),
        ({"attack_on": "kl", "form": "trades", "attack": PGD(start="zero")}, "use start gaussian or uniform"),
        ({"attack_on": "kl", "form": "trades", "attack": PGD(loss=LogitMargin())}, "leave the loss out"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_fix(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        MAIL(**options)

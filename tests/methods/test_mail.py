"""MAIL: the weights by hand, and the objective by its formula in every form."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, LogitMargin, kl_divergence
from doubly.methods import AT, MAIL, MART, TRADES
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import by_batch_statistics, gradients
from method_problems import plain_noise as data

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
        model[2].running_mean.normal_()  # so that logits differ between evaluation and training mode
        model[4].weight.data *= 5
    return model


def plain(form, beta=5.0, attack_on="cross_entropy"):
    return {"at": AT(ATTACK), "trades": TRADES(ATTACK, beta, attack_on), "mart": MART(ATTACK, beta)}[form]


def with_margins(*margins):
    """Return logits of two classes whose probabilities are (1 + PM) / 2 for the label, class 0, and (1 - PM) / 2."""
    rows = [[math.log((1 + m) / 2), math.log((1 - m) / 2)] for m in margins]
    return torch.tensor(rows, dtype=torch.float64), torch.zeros(len(margins), dtype=torch.int64)


def test_the_weights_by_hand():
    margins = (-0.9999, -0.5, 0.0, 0.25)
    logits, y = with_margins(*margins)
    for slope, bias, table in [
        (10.0, -0.5, (2.98, 1.5, 0.0201, 0.00166)),  # as released, for MAIL-AT
        (2.0, 0.0, (2.64, 2.193, 1.5, 1.133)),
    ]:
        weights = MAIL(slope=slope, bias=bias).weights(logits, y, logits).tolist()
        sigmoids = [1 / (1 + math.exp(-slope * (bias - m))) for m in margins]
        assert weights == pytest.approx([3 * value for value in sigmoids], rel=1e-9)
        assert weights == pytest.approx(table, rel=5e-3)
        normalized = MAIL(slope=slope, bias=bias, normalize="batch").weights(logits, y, logits).tolist()
        assert normalized == pytest.approx([4 * value / sum(sigmoids) for value in sigmoids], rel=1e-9)


def test_the_three_margins_by_hand():
    attacked = torch.tensor([[1.0, 0.0, -1.0], [0.0, 2.0, 1.0]], dtype=torch.float64)
    clean = torch.tensor([[3.0, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0, 2])

    def probabilities(row):
        return [math.exp(z) / sum(math.exp(other) for other in row) for z in row]

    def margin(row, label):
        p = probabilities(row)
        return p[label] - max(value for k, value in enumerate(p) if k != label)

    rows = list(zip(attacked.tolist(), clean.tolist(), y.tolist(), strict=True))
    by_hand = {
        "adversarial": [margin(a, label) for a, _, label in rows],
        "natural": [margin(c, label) for _, c, label in rows],
        "difference": [probabilities(c)[label] - probabilities(a)[label] for a, c, label in rows],
    }
    for name, margins in by_hand.items():
        weights = MAIL(margin=name, slope=2.0, bias=0.3).weights(attacked, y, clean).tolist()
        assert weights == pytest.approx([3 / (1 + math.exp(-2 * (0.3 - m))) for m in margins], rel=1e-9), name


def test_a_steep_slope_leaves_no_batch_without_weight():
    logits, y = with_margins(0.2, 0.5, 0.9)
    for bias in (-5.0, 0.0, 5.0):
        weights = MAIL(slope=1e4, bias=bias, normalize="batch").weights(logits.float(), y, logits.float())
        assert weights.isfinite().all() and weights.mean().item() == pytest.approx(1)
        assert (MAIL(slope=1e4, bias=bias).weights(logits.float(), y, logits.float()) >= 0).all()


def formula(form, attacked, clean, y, beta):
    """Return the part that is reweighted and the rest, from probabilities q and p."""
    q, p, rows = attacked.softmax(1), clean.softmax(1), torch.arange(len(y))
    runner_up = q.masked_fill(F.one_hot(y, 4).bool(), 0.0).amax(1)
    divergence = beta * (p * (p / q).log()).sum(1)
    return {
        "at": (-q[rows, y].log(), torch.zeros(len(y))),
        "trades": (divergence, -p[rows, y].log()),
        "mart": (-q[rows, y].log() - (1.0001 - runner_up + 1e-12).log(), divergence * (1.0000001 - p[rows, y])),
    }[form]


def margins_of(attacked, clean, y):
    q, p, rows = attacked.softmax(1), clean.softmax(1), torch.arange(len(y))
    is_label = F.one_hot(y, 4).bool()
    return {
        "adversarial": q[rows, y] - q.masked_fill(is_label, 0.0).amax(1),
        "natural": p[rows, y] - p.masked_fill(is_label, 0.0).amax(1),
        "difference": p[rows, y] - q[rows, y],
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_objective_is_its_formula_with_constant_weights_from_training_mode(form):
    batch = data()
    for margin in MARGINS:
        for normalize in ("x3", "batch"):
            model, twin = network(), network()
            result = MAIL(ATTACK, form, margin, 3.0, 0.1, normalize, beta=2.0).objective(model, batch, {}, LATE)
            attack = ATTACK.maximize_divergence if form == "trades" else ATTACK
            attacked = twin(batch.x + attack(twin, batch.x, batch.y, LATE.generator("attack")))
            clean = by_batch_statistics(twin, batch.x)
            weights = torch.sigmoid(3 * (0.1 - margins_of(attacked, clean, batch.y)[margin])).detach()
            weights = 3 * weights if normalize == "x3" else weights / weights.mean()
            reweighted, rest = formula(form, attacked, clean, batch.y, 2)
            assert torch.allclose(result.weights, weights) and result.weights.std() > 0.01
            assert torch.allclose(result.sample_losses, (reweighted + rest).detach())
            assert torch.equal(result.logits, attacked.detach())
            expected = (weights * reweighted).mean() + rest.mean()
            assert torch.allclose(result.loss, expected)
            for a, b in zip(gradients(result.loss, model), gradients(expected, twin), strict=True):
                assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
            assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_mean, twin[2].running_mean)


def test_slope_zero_with_a_mean_of_one_and_the_burn_in_are_the_plain_method_exactly():
    batch = data()
    flat = {"slope": 0.0, "normalize": "batch"}
    cases = [
        *((form, {"margin": margin, **flat}, LATE) for form in FORMS for margin in MARGINS),
        *(("trades", {"margin": margin, "attack_on": "cross_entropy", **flat}, LATE) for margin in MARGINS),
        *((form, {"margin": "natural"}, EARLY) for form in FORMS),
    ]
    for form, settings, step in cases:
        model, twin = network(), network()
        result = MAIL(ATTACK, form, **settings).objective(model, batch, {}, step)
        expected = plain(form, attack_on=settings.get("attack_on", "kl")).objective(twin, batch, {}, step)
        assert torch.equal(result.weights, torch.ones(8).double()), (form, settings)
        assert torch.equal(result.sample_losses, expected.sample_losses)
        for a, b in zip(gradients(result.loss, model), gradients(expected.loss, twin), strict=True):
            assert torch.equal(a, b)
    model, twin = network(), network()  # as released, slope 0 weighs everything by 1.5
    result, expected = (
        m.objective(n, batch, {}, LATE) for m, n in ((MAIL(ATTACK, slope=0.0), model), (AT(ATTACK), twin))
    )
    for a, b in zip(gradients(result.loss, model), gradients(1.5 * expected.loss, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_the_burn_in_ends_with_epoch_76_of_120():
    for progress, uniform in (((75 + 390 / 391) / 120, True), (76 / 120, False)):
        weights = MAIL(ATTACK).objective(network(), data(), {}, EARLY._replace(progress=progress)).weights
        assert bool((weights == 1).all()) == uniform
    assert (MAIL(ATTACK, burn_in=0.0).objective(network(), data(), {}, TrainStep()).weights != 1).all()


def test_the_clean_images_are_passed_only_where_they_are_needed():
    for form, margin, step, passes in [
        ("at", "adversarial", LATE, 1),
        ("at", "natural", EARLY, 1),
        ("at", "natural", LATE, 2),
        ("at", "difference", LATE, 2),
        ("trades", "adversarial", EARLY, 2),
        ("mart", "natural", LATE, 2),
    ]:
        model, modes = network(), []
        model[1].register_forward_hook(lambda module, *_, modes=modes: modes.append(module.training))
        MAIL(ATTACK, form, margin).objective(model, data(), {}, step)
        assert (modes.count(False), modes.count(True)) == (4 + (form == "trades"), passes)  # the KL's clean images


def test_the_attack_on_the_divergence_is_that_of_trades():
    batch, model = data(), network()
    delta = ATTACK.maximize_divergence(model, batch.x, batch.y, LATE.generator("attack"))
    result = MAIL(ATTACK, "trades").objective(model, batch, {}, LATE)
    assert torch.equal(result.logits, network()(batch.x + delta).detach())
    assert torch.equal(MAIL(ATTACK, "trades", attack_on="kl").objective(network(), batch, {}, LATE).loss, result.loss)
    other = MAIL(ATTACK, "trades", attack_on="cross_entropy").objective(network(), batch, {}, LATE)
    clean = by_batch_statistics(network(), batch.x)
    expected = CrossEntropy()(clean, batch.y) + 5 * kl_divergence(clean, other.logits)
    assert torch.allclose(other.sample_losses, expected.detach()) and not torch.equal(other.logits, result.logits)


def test_the_defaults_are_those_of_the_released_code():
    method = MAIL()
    assert (method.form, method.margin, method.slope, method.bias) == ("at", "adversarial", 10.0, -0.5)
    assert (method.normalize, method.burn_in, method.beta) == ("x3", 76 / 120, 5.0)
    assert method.attack == PGD(start="gaussian") and method.attack_on == "form"
    assert [MAIL(form=form).attacks_kl for form in ("at", "trades", "mart")] == [False, True, False]


def test_refusals():
    for settings, message in [
        ({"burn_in": 1.0}, r"share of training in \[0, 1\), got 1"),
        ({"burn_in": -0.1}, "share of training"),
        ({"burn_in": 76.0}, "share of training"),
        ({"slope": -1.0}, "slope from 0 on"),
        ({"slope": math.nan}, "slope from 0 on"),
        ({"slope": math.inf}, "slope from 0 on"),
        ({"bias": math.nan}, "finite bias"),
        ({"beta": -1.0}, "beta"),
        ({"attack_on": "kl"}, "got form at: use cross_entropy, or form trades"),
        ({"attack_on": "kl", "form": "mart"}, "got form mart"),
        ({"attack_on": "kl", "form": "trades", "attack": PGD(start="zero")}, "use start gaussian or uniform"),
        ({"attack_on": "kl", "form": "trades", "attack": PGD(loss=LogitMargin())}, "leave the loss out"),
    ]:
        with pytest.raises(UsageError, match=message):
            MAIL(**settings)

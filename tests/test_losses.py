import math

import pytest
import torch

from doubly.attacks import FGSM, PGD
from doubly.config.serialize import from_json, replaced, to_json
from doubly.errors import UsageError
from doubly.losses import (
    LOSSES,
    CrossEntropy,
    LogitMargin,
    Loss,
    MartLoss,
    PairedLoss,
    TradesLoss,
    kl_divergence,
    probability_margin,
)
from doubly.methods import AT, DONE, Standard

LOGITS = [[2.0, 0.0, -1.0], [0.5, 0.5, 3.0], [-1.0, 4.0, 4.5]]
LABELS = [0, 2, 1]
CLEAN = [[1.0, -0.5, 0.25], [0.0, 2.0, 1.0], [-2.0, 5.0, 0.5]]  # of the same images, without the attack
PAIRED = [TradesLoss(), MartLoss()]


def test_every_loss_is_listed():
    assert set(LOSSES.values()) == {CrossEntropy, LogitMargin, TradesLoss, MartLoss}
    assert all(isinstance(kind(), Loss) and kind() == kind() for kind in LOSSES.values())


def test_cross_entropy_by_hand():
    found = CrossEntropy()(torch.tensor(LOGITS), torch.tensor(LABELS)).tolist()
    for row, label, value in zip(LOGITS, LABELS, found, strict=True):
        assert value == pytest.approx(math.log(sum(math.exp(z) for z in row)) - row[label], rel=1e-6)


def test_logit_margin_by_hand():
    found = LogitMargin()(torch.tensor(LOGITS), torch.tensor(LABELS)).tolist()
    assert found == pytest.approx([0.0 - 2.0, 0.5 - 3.0, 4.5 - 4.0])


def test_logit_margin_is_positive_exactly_where_the_sample_is_misclassified():
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(500, 10, generator=generator), torch.randint(10, (500,), generator=generator)
    assert torch.equal(LogitMargin()(logits, y) > 0, logits.argmax(1) != y)


def test_logit_margin_has_gradient_one_on_the_rival_and_minus_one_on_the_truth():
    logits = torch.tensor(LOGITS, requires_grad=True)
    LogitMargin()(logits, torch.tensor(LABELS)).sum().backward()
    assert logits.grad[0].tolist() == [-1, 1, 0] and logits.grad[2].tolist() == [0, -1, 1]
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("given", "answer"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_cross_entropy_is_at_least_single_precision(given, answer):
    losses = CrossEntropy()(torch.tensor(LOGITS, dtype=given), torch.tensor(LABELS))
    assert losses.dtype is answer and losses.shape == (3,)


def test_cross_entropy_of_extreme_logits_is_finite():
    found = CrossEntropy()(torch.tensor([[1e6, 0.0], [0.0, 1e6]]), torch.tensor([0, 0]))
    assert found.tolist() == [0.0, 1e6]


def test_probability_margin_by_hand():
    found = probability_margin(torch.tensor(LOGITS), torch.tensor(LABELS)).tolist()
    for row, label, value in zip(LOGITS, LABELS, found, strict=True):
        shares = [math.exp(z) / sum(math.exp(other) for other in row) for z in row]
        rival = max(share for k, share in enumerate(shares) if k != label)
        assert value == pytest.approx(shares[label] - rival, rel=1e-5)


def test_probability_margin_has_the_opposite_sign_of_the_logit_margin_and_stays_within_one():
    generator = torch.Generator().manual_seed(0)
    logits, y = 9 * torch.randn(500, 10, generator=generator), torch.randint(10, (500,), generator=generator)
    found = probability_margin(logits, y)
    assert torch.equal(found < 0, LogitMargin()(logits, y) > 0) and found.abs().max() <= 1


def test_probability_margin_follows_a_difference_quotient():
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: probability_margin(z, torch.tensor(LABELS)), (logits,))


def test_probability_margin_is_single_precision_and_finite_on_extreme_logits():
    logits = torch.tensor([[1e4, 0.0], [0.0, 1e4]], dtype=torch.bfloat16, requires_grad=True)
    found = probability_margin(logits, torch.tensor([0, 0]))
    found.sum().backward()
    assert found.dtype is torch.float32 and found.tolist() == [1, -1] and logits.grad.isfinite().all()


# --- losses that compare attacked with clean logits ---


def shares(row):
    return [math.exp(z) / sum(math.exp(other) for other in row) for z in row]


def divergence(clean, attacked):
    return sum(p * math.log(p / q) for p, q in zip(shares(clean), shares(attacked), strict=True))


def pair(dtype=torch.float64):
    return torch.tensor(LOGITS, dtype=dtype), torch.tensor(LABELS), torch.tensor(CLEAN, dtype=dtype)


def test_trades_by_hand():
    found = TradesLoss(beta=3.0)(*pair()).tolist()
    for attacked, label, clean, value in zip(LOGITS, LABELS, CLEAN, found, strict=True):
        by_hand = -math.log(shares(clean)[label]) + 3 * divergence(clean, attacked)
        assert value == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("detached", [False, True])
def test_mart_by_hand(detached):
    found = MartLoss(beta=3.0, detached=detached)(*pair()).tolist()
    for attacked, label, clean, value in zip(LOGITS, LABELS, CLEAN, found, strict=True):
        p = shares(attacked)
        rival = max(share for k, share in enumerate(p) if k != label)
        boosted = -math.log(p[label]) - math.log(1.0001 - rival + 1e-12)
        by_hand = boosted + 3 * divergence(clean, attacked) * (1.0000001 - shares(clean)[label])
        assert value == pytest.approx(by_hand, rel=1e-12)


def test_the_part_that_is_reweighted_is_the_divergence_of_trades_and_the_boosted_cross_entropy_of_mart():
    attacked, y, clean = pair()
    trades, mart = TradesLoss().parts(attacked, y, clean), MartLoss().parts(attacked, y, clean)
    assert torch.allclose(trades.rest, CrossEntropy()(clean, y))
    assert torch.allclose(trades.reweighted, 6 * kl_divergence(clean, attacked))
    assert torch.allclose(mart.reweighted, MartLoss(beta=0.0)(attacked, y, clean))
    assert torch.equal(MartLoss(beta=0.0).parts(attacked, y, clean).rest, torch.zeros(3).double())
    for loss, (reweighted, rest) in zip(PAIRED, (trades, mart), strict=True):
        assert torch.equal(loss(attacked, y, clean), reweighted + rest)


def test_the_divergence_is_zero_where_the_answers_agree_and_has_a_direction():
    attacked, _, clean = pair()
    assert kl_divergence(clean, clean + 3.0).abs().max() < 1e-12
    assert (kl_divergence(clean, attacked) > 0).all()
    assert not torch.allclose(kl_divergence(clean, attacked), kl_divergence(attacked, clean))


@pytest.mark.parametrize("loss", PAIRED)
def test_the_gradient_of_a_paired_loss_goes_through_both_logits(loss):
    attacked, y, clean = (t.requires_grad_() if t.is_floating_point() else t for t in pair())
    assert torch.autograd.gradcheck(lambda a, c: loss(a, y, c), (attacked, clean))
    for logits in torch.autograd.grad(kl_divergence(clean, attacked).sum(), (attacked, clean)):
        assert (logits.abs().sum(1) > 1e-3).all()


def test_the_factor_of_mart_is_a_constant_only_where_detached():
    found = {}
    for detached in (False, True):
        attacked, y, clean = pair()
        MartLoss(2.0, detached)(attacked, y, clean.requires_grad_()).sum().backward()
        found[detached] = clean.grad
    attacked, y, clean = pair()
    clean.requires_grad_()
    factor = torch.tensor([1.0000001 - shares(row)[label] for row, label in zip(CLEAN, LABELS, strict=True)])
    (2.0 * factor.double() * kl_divergence(clean, attacked)).sum().backward()
    assert torch.allclose(found[True], clean.grad, rtol=1e-6)
    assert (found[False] - found[True]).abs().max() > 0.1


@pytest.mark.parametrize("loss", PAIRED)
def test_paired_losses_of_extreme_logits_and_their_gradients_are_finite(loss):
    attacked = torch.tensor([[1e4, 0.0, 0.0], [0.0, 1e4, 0.0]], requires_grad=True)
    clean = torch.tensor([[0.0, 1e4, 0.0], [1e4, 0.0, 0.0]], requires_grad=True)
    found = loss(attacked, torch.tensor([0, 0]), clean)
    found.sum().backward()
    assert found.isfinite().all() and attacked.grad.isfinite().all() and clean.grad.isfinite().all()


def test_the_boosted_cross_entropy_of_mart_is_bounded_by_its_constants():
    """A rival of probability 1 costs -log 0.0001, and nothing where the truth is certain."""
    logits = torch.tensor([[0.0, 50.0], [50.0, 0.0]], dtype=torch.float64)
    found = MartLoss(beta=0.0)(logits, torch.tensor([0, 0]), logits) - CrossEntropy()(logits, torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([-math.log(1e-4), -math.log(1.0001)], rel=1e-6)


@pytest.mark.parametrize("loss", PAIRED)
@pytest.mark.parametrize(("given", "answer"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_paired_losses_are_at_least_single_precision(loss, given, answer):
    found = loss(*pair(given))
    assert found.dtype is answer and found.shape == (3,)


@pytest.mark.parametrize("kind", [TradesLoss, MartLoss])
@pytest.mark.parametrize("beta", [-1.0, float("inf"), float("nan")])
def test_a_beta_that_is_no_weight_is_refused(kind, beta):
    with pytest.raises(UsageError, match="from 0 on, got"):
        kind(beta)


@pytest.mark.parametrize("kind", [PGD, FGSM, Standard])
@pytest.mark.parametrize("loss", PAIRED)
def test_a_paired_loss_is_refused_where_there_are_no_clean_logits(kind, loss):
    with pytest.raises(UsageError, match=f"{type(loss).__name__} compares .* give it to AT or DONE"):
        kind(loss=loss)


@pytest.mark.parametrize("loss", PAIRED)
def test_a_paired_loss_without_clean_logits_says_so(loss):
    with pytest.raises(UsageError, match="compares those of attacked and clean images"):
        loss(torch.tensor(LOGITS), torch.tensor(LABELS))


def test_paired_losses_are_told_apart_by_their_parts():
    assert [name for name, kind in LOSSES.items() if isinstance(kind(), PairedLoss)] == ["trades", "mart"]


@pytest.mark.parametrize("method", [AT(), DONE()])
def test_a_paired_loss_is_named_in_a_config_and_saved_with_it(method):
    named = replaced(method, "loss", "loss.trades")
    assert named.loss == TradesLoss()
    changed = replaced(named, "loss", {"kind": "loss.mart", "beta": 2, "detached": True})
    assert changed.loss == MartLoss(2.0, True) and from_json(to_json(changed)) == changed
    with pytest.raises(UsageError, match="an attack knows one set of logits"):
        replaced(method, "attack.loss", "loss.trades")

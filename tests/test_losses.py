"""Losses by hand, sample by sample."""

import math

import pytest
import torch

from doubly.attacks import FGSM, PGD
from doubly.config.serialize import from_json, to_json, with_change
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
    needs_clean_logits,
    probability_margin,
)
from doubly.methods import AT, DONE, Standard

LOGITS = [[2.0, 0.0, -1.0], [0.5, 0.5, 3.0], [-1.0, 4.0, 4.5]]
LABELS = [0, 2, 1]
CLEAN = [[1.0, -0.5, 0.25], [0.0, 2.0, 1.0], [-2.0, 5.0, 0.5]]  # of the same images, without the attack
PAIRED = [TradesLoss(), MartLoss()]


def probabilities(row):
    return [math.exp(z) / sum(math.exp(other) for other in row) for z in row]


def runner_up(row, label):
    return max(p for k, p in enumerate(probabilities(row)) if k != label)


def divergence(clean, attacked):
    return sum(p * math.log(p / q) for p, q in zip(probabilities(clean), probabilities(attacked), strict=True))


def logits_and_labels(dtype=torch.float64):
    return torch.tensor(LOGITS, dtype=dtype), torch.tensor(LABELS), torch.tensor(CLEAN, dtype=dtype)


def test_every_loss_is_listed_and_says_whether_it_needs_clean_logits():
    assert set(LOSSES.values()) == {CrossEntropy, LogitMargin, TradesLoss, MartLoss}
    assert all(isinstance(kind(), Loss) and kind() == kind() for kind in LOSSES.values())
    assert [name for name, kind in LOSSES.items() if needs_clean_logits(kind())] == ["trades", "mart"]
    assert [name for name, kind in LOSSES.items() if isinstance(kind(), PairedLoss)] == ["trades", "mart"]
    assert not needs_clean_logits(lambda logits, y: logits.sum(1))


def test_plain_losses_by_hand():
    logits, y, _ = logits_and_labels()
    by_hand = [math.log(sum(math.exp(z) for z in row)) - row[label] for row, label in zip(LOGITS, LABELS, strict=True)]
    assert CrossEntropy()(logits, y).tolist() == pytest.approx(by_hand, rel=1e-6)
    assert LogitMargin()(logits, y).tolist() == pytest.approx([0.0 - 2.0, 0.5 - 3.0, 4.5 - 4.0])
    margins = [probabilities(row)[label] - runner_up(row, label) for row, label in zip(LOGITS, LABELS, strict=True)]
    assert probability_margin(logits, y).tolist() == pytest.approx(margins, rel=1e-5)


def test_margins_tell_misclassified_samples():
    generator = torch.Generator().manual_seed(0)
    logits, y = 9 * torch.randn(500, 10, generator=generator), torch.randint(10, (500,), generator=generator)
    margin = probability_margin(logits, y)
    assert torch.equal(LogitMargin()(logits, y) > 0, logits.argmax(1) != y)
    assert torch.equal(margin < 0, logits.argmax(1) != y) and margin.abs().max() <= 1


def test_gradients_of_the_margins():
    logits, y, _ = logits_and_labels()
    logits.requires_grad_()
    LogitMargin()(logits, y).sum().backward()
    assert logits.grad[0].tolist() == [-1, 1, 0] and logits.grad[2].tolist() == [0, -1, 1]
    assert logits.grad.isfinite().all()
    assert torch.autograd.gradcheck(lambda z: probability_margin(z, y), (logits,))


def test_paired_losses_by_hand():
    trades = TradesLoss(beta=3.0)(*logits_and_labels()).tolist()
    mart = MartLoss(beta=3.0)(*logits_and_labels()).tolist()
    assert MartLoss(beta=3.0, detached=True)(*logits_and_labels()).tolist() == mart
    for k, (attacked, label, clean) in enumerate(zip(LOGITS, LABELS, CLEAN, strict=True)):
        kl, p, q = divergence(clean, attacked), probabilities(clean), probabilities(attacked)
        assert trades[k] == pytest.approx(-math.log(p[label]) + 3 * kl, rel=1e-12)
        boosted = -math.log(q[label]) - math.log(1.0001 - runner_up(attacked, label) + 1e-12)
        assert mart[k] == pytest.approx(boosted + 3 * kl * (1.0000001 - p[label]), rel=1e-12)


def test_the_reweighted_part_is_the_divergence_of_trades_and_the_boosted_cross_entropy_of_mart():
    attacked, y, clean = logits_and_labels()
    trades, mart = TradesLoss().parts(attacked, y, clean), MartLoss().parts(attacked, y, clean)
    assert torch.allclose(trades.unweighted, CrossEntropy()(clean, y))
    assert torch.allclose(trades.reweighted, 6 * kl_divergence(clean, attacked))
    assert torch.allclose(mart.reweighted, MartLoss(beta=0.0)(attacked, y, clean))
    assert torch.equal(MartLoss(beta=0.0).parts(attacked, y, clean).unweighted, torch.zeros(3).double())
    for loss, (reweighted, rest) in zip(PAIRED, (trades, mart), strict=True):
        assert torch.equal(loss(attacked, y, clean), reweighted + rest)


def test_the_divergence_is_zero_between_equal_predictions_and_not_symmetric():
    attacked, _, clean = logits_and_labels()
    assert kl_divergence(clean, clean + 3.0).abs().max() < 1e-12
    assert (kl_divergence(clean, attacked) > 0).all()
    assert not torch.allclose(kl_divergence(clean, attacked), kl_divergence(attacked, clean))


def test_the_gradient_of_a_paired_loss_goes_through_both_logits():
    attacked, y, clean = (t.requires_grad_() if t.is_floating_point() else t for t in logits_and_labels())
    for loss in PAIRED:
        assert torch.autograd.gradcheck(lambda a, c, loss=loss: loss(a, y, c), (attacked, clean))
    for gradient in torch.autograd.grad(kl_divergence(clean, attacked).sum(), (attacked, clean)):
        assert (gradient.abs().sum(1) > 1e-3).all()


def test_the_factor_of_mart_is_a_constant_only_where_detached():
    gradients = {}
    for detached in (False, True):
        attacked, y, clean = logits_and_labels()
        MartLoss(2.0, detached)(attacked, y, clean.requires_grad_()).sum().backward()
        gradients[detached] = clean.grad
    attacked, y, clean = logits_and_labels()
    clean.requires_grad_()
    factor = torch.tensor([1.0000001 - probabilities(row)[label] for row, label in zip(CLEAN, LABELS, strict=True)])
    (2.0 * factor.double() * kl_divergence(clean, attacked)).sum().backward()
    assert torch.allclose(gradients[True], clean.grad, rtol=1e-6)
    assert (gradients[False] - gradients[True]).abs().max() > 0.1


def test_losses_of_extreme_logits_and_their_gradients_are_finite():
    assert CrossEntropy()(torch.tensor([[1e6, 0.0], [0.0, 1e6]]), torch.tensor([0, 0])).tolist() == [0.0, 1e6]
    logits = torch.tensor([[1e4, 0.0], [0.0, 1e4]], dtype=torch.bfloat16, requires_grad=True)
    margin = probability_margin(logits, torch.tensor([0, 0]))
    margin.sum().backward()
    assert margin.dtype is torch.float32 and margin.tolist() == [1, -1] and logits.grad.isfinite().all()
    for loss in PAIRED:
        attacked = torch.tensor([[1e4, 0.0, 0.0], [0.0, 1e4, 0.0]], requires_grad=True)
        clean = torch.tensor([[0.0, 1e4, 0.0], [1e4, 0.0, 0.0]], requires_grad=True)
        losses = loss(attacked, torch.tensor([0, 0]), clean)
        losses.sum().backward()
        assert losses.isfinite().all() and attacked.grad.isfinite().all() and clean.grad.isfinite().all()
    # A runner-up of probability 1 costs -log 0.0001 in MART, and nothing where the label is certain.
    logits = torch.tensor([[0.0, 50.0], [50.0, 0.0]], dtype=torch.float64)
    boost = MartLoss(beta=0.0)(logits, torch.tensor([0, 0]), logits) - CrossEntropy()(logits, torch.tensor([0, 0]))
    assert boost.tolist() == pytest.approx([-math.log(1e-4), -math.log(1.0001)], rel=1e-6)


def test_losses_are_computed_in_single_precision_or_better():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        attacked, y, clean = logits_and_labels(dtype)
        for losses in (CrossEntropy()(attacked, y), *(loss(attacked, y, clean) for loss in PAIRED)):
            assert losses.dtype is expected and losses.shape == (3,)


def test_refusals():
    logits, y, _ = logits_and_labels()
    for kind in (TradesLoss, MartLoss):
        for beta in (-1.0, math.inf, math.nan):
            with pytest.raises(UsageError, match="from 0 on, got"):
                kind(beta)
        for owner in (PGD, FGSM, Standard):
            with pytest.raises(UsageError, match=f"{kind.__name__} compares .* give it to AT or DONE"):
                owner(loss=kind())
        with pytest.raises(UsageError, match="compares those of attacked and clean images"):
            kind()(logits, y)


def test_a_paired_loss_is_named_in_a_config_and_saved_with_it():
    for method in (AT(), DONE()):
        assert with_change(method, "loss", "loss.trades").loss == TradesLoss()
        changed = with_change(method, "loss", {"kind": "loss.mart", "beta": 2, "detached": True})
        assert changed.loss == MartLoss(2.0, True) and from_json(to_json(changed)) == changed
        with pytest.raises(UsageError, match="an attack knows one set of logits"):
            with_change(method, "attack.loss", "loss.trades")

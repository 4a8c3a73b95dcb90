"""FAAL: the worst mixture of classes, compared with a general solver, and the loss that it weighs."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods import AT, FAAL
from doubly.methods.faal import worst_probabilities
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import flat_gradient
from method_problems import small_network as network
from method_problems import three_classes as samples

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
LATE = TrainStep(epoch=2, step=4, progress=0.8, seed=9)


def divergence(p):
    """Return KL(uniform || p)."""
    return float(-(np.log(np.asarray(p) * len(p))).mean())


def test_the_closed_form_is_what_a_general_solver_finds():
    generator = np.random.default_rng(0)
    for classes, rho in ((2, 0.5), (3, 0.1), (5, 0.5), (10, 0.5), (4, 2.0)):
        a = generator.normal(size=classes)
        p = worst_probabilities(torch.tensor(a), rho).numpy()
        constraints = [
            {"type": "eq", "fun": lambda p: p.sum() - 1},
            {"type": "ineq", "fun": lambda p, rho=rho: rho - divergence(p)},
        ]
        start, bounds = np.full(classes, 1 / classes), [(1e-9, 1)] * classes
        options = {"maxiter": 500, "ftol": 1e-12}
        solved = minimize(
            lambda p, a=a: -p @ a, start, method="SLSQP", bounds=bounds, constraints=constraints, options=options
        )
        assert solved.success and np.allclose(p, solved.x, atol=1e-4), (classes, rho)
        assert p @ a >= solved.x @ a - 1e-6 and divergence(p) == pytest.approx(rho, rel=1e-9)


def test_two_classes_by_hand():
    """KL(u || p) = -log(4 p (1 - p)) / 2 = rho gives p = (1 + sqrt(1 - exp(-2 rho))) / 2, whatever the gains are."""
    expected = (1 + (1 - np.exp(-1.0)) ** 0.5) / 2
    for gains in ([0.0, 1.0], [-5.0, -4.999], [-1e8, 1e8]):
        assert worst_probabilities(torch.tensor(gains, dtype=torch.float64), 0.5).tolist() == pytest.approx(
            [1 - expected, expected]
        )


def test_gains_that_are_equal_nearly_tied_or_many():
    assert worst_probabilities(torch.full((4,), -0.3), 0.5).tolist() == [0.25] * 4
    assert worst_probabilities(torch.tensor([1.0, 2.0]), 0.0).tolist() == [0.5, 0.5]
    assert worst_probabilities(torch.tensor([3.0]), 0.5).tolist() == [1]
    for rho in (1e-8, 0.5, 20.0):
        tied = torch.zeros(1000).double()
        tied[17] = -1.0  # 999 classes are tied at the largest gain, and one takes all of the divergence
        p = worst_probabilities(tied, rho)
        assert p.isfinite().all() and p.sum().item() == pytest.approx(1) and (p >= 0).all()
        single = worst_probabilities(-tied, rho)
        assert divergence(single.numpy()) == pytest.approx(rho, rel=1e-5) and single[17] == single.max()
    assert divergence(worst_probabilities(tied, 0.5).clamp_min(1e-300).numpy()) == pytest.approx(0.5, rel=1e-6)


def test_the_loss_by_a_loop_over_samples():
    model, twin, batch = network(), network(), samples(8)
    result = FAAL(ATTACK, rho=0.3).objective(model, batch, {}, LATE)
    logits = twin(batch.x + ATTACK(twin, batch.x, batch.y, LATE.generator("attack")))
    gains, losses = [0.0] * 3, []
    for z, y in zip(logits, batch.y.tolist(), strict=True):
        q = z.softmax(0)
        gains[y] += max(q[k].item() for k in range(3) if k != y) - q[y].item()
        losses.append(-q[y].log())
    p = worst_probabilities(torch.tensor(gains, dtype=torch.float64), 0.3)
    assert p.argmax() == torch.tensor(gains).argmax() and divergence(p.numpy()) == pytest.approx(0.3)
    expected = 3 / 8 * sum(p[y] * loss for y, loss in zip(batch.y, losses, strict=True))
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.allclose(flat_gradient(result.loss, model), flat_gradient(expected, twin), rtol=1e-8, atol=1e-12)
    assert torch.allclose(result.weights, 3 * p[batch.y])


def test_before_start_and_without_rho_it_is_at_with_any_loss():
    for loss in (AT().loss, TradesLoss(2.0)):
        for method, step in ((FAAL(ATTACK, loss, 0.0), LATE), (FAAL(ATTACK, loss), LATE._replace(progress=0.74))):
            model, twin = network(), network()
            result = method.objective(model, samples(), {}, step)
            at = AT(ATTACK, loss).objective(twin, samples(), {}, step)
            assert torch.allclose(result.weights, torch.ones(9).double())
            slope = flat_gradient(at.loss, twin)
            assert torch.allclose(flat_gradient(result.loss, model), slope, rtol=1e-9, atol=1e-13)


def test_a_class_without_images_in_the_batch_takes_no_part():
    margins, y = torch.tensor([-0.9, -0.8, -0.2], dtype=torch.float64), torch.tensor([0, 0, 2])
    weights = FAAL().class_weights(margins, y, 4)
    p = worst_probabilities(torch.tensor([-1.7, -0.2], dtype=torch.float64), 0.5)
    assert weights.tolist() == pytest.approx([2 * p[0].item(), 0, 2 * p[1].item(), 0])


def test_refusals():
    for settings, message in [
        ({"rho": -0.1}, "rho"),
        ({"rho": float("nan")}, "rho"),
        ({"start": 1.0}, r"\[0, 1\)"),
        ({"start": -0.1}, r"\[0, 1\)"),
    ]:
        with pytest.raises(UsageError, match=message):
            FAAL(**settings)

"""RobustLT: another method, attacked within radii that follow the class counts."""

import math

import pytest
import torch

from doubly.attacks import FGSM, PGD
from doubly.bilevel import SignStep
from doubly.config.serialize import from_json, to_json
from doubly.errors import UsageError
from doubly.methods import AT, AWP, CFOL, DAFA, DONE, FRL, TRADES, DONEClass, FastATGA, RobustLT, Standard
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import flat_gradient
from method_problems import small_network as network
from method_problems import three_classes as samples

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
NOISY = PGD(LinfBall(0.1), 3, SignStep(0.05), start="gaussian")
COUNTS = torch.tensor([80, 20, 5])
LATE = TrainStep(epoch=2, step=4, progress=0.8, seed=9)
INSIDE = [AT(ATTACK), TRADES(NOISY), CFOL(ATTACK, eta=0.1), FRL(NOISY), DONE(ATTACK, cap=3.0), AWP(AT(ATTACK))]


def test_radii_by_hand():
    """h = 0, sqrt log 4 and sqrt log 16; tau = alpha / (20/105 h_1 + 5/105 h_2)."""
    h = [0, math.log(4) ** 0.5, math.log(16) ** 0.5]
    tau = 0.3 / (20 / 105 * h[1] + 5 / 105 * h[2])
    factors = RobustLT(limit=10.0).class_factors(COUNTS)
    assert factors.tolist() == pytest.approx([0.7 + tau * value for value in h], rel=1e-12)
    assert (factors * COUNTS).sum().item() == pytest.approx(105)  # the mean radius of an image is epsilon
    assert RobustLT(limit=1.5).class_factors(COUNTS).tolist() == pytest.approx([0.7, 1.5, 1.5])


def test_odd_counts():
    for counts in ([7, 7, 7], [7, 0, 7], [9]):
        assert RobustLT().class_factors(torch.tensor(counts)).tolist() == [1] * len(counts)
    factors = RobustLT().class_factors(torch.tensor([10**6, 0, 1]))
    assert factors.tolist() == pytest.approx([0.7, 1, 3])  # and not 100,000
    assert RobustLT().class_factors(torch.arange(1, 1001)).isfinite().all()


def test_the_objective_is_that_of_the_method_with_class_radii():
    factors = RobustLT().class_factors(COUNTS)
    for inside in INSIDE:
        method, model, twin = RobustLT(inside), network(), network()
        result = method.objective(model, samples(), method.init(COUNTS), LATE)
        plain = inside.with_attack(inside.attack.with_class_factors(factors))
        expected = plain.objective(twin, samples(), plain.init(COUNTS), LATE)
        assert torch.equal(result.sample_losses, expected.sample_losses), inside
        assert torch.equal(flat_gradient(result.loss, model), flat_gradient(expected.loss, twin)), inside
        assert result.state.keys() - expected.state.keys() == {"robust_lt_factors"}
        assert all(torch.equal(result.state[key], expected.state[key]) for key in expected.state)
        result = method.objective(network(), samples(), result.state, LATE)  # and goes on from its state


def test_alpha_grows_during_the_ramp():
    full = RobustLT(AT(ATTACK)).class_factors(COUNTS)
    for progress, ramp, share in ((0.0, 0.8, 0.0), (0.2, 0.8, 0.25), (0.9, 0.8, 1.0), (0.0, 0.0, 1.0)):
        method = RobustLT(AT(ATTACK), ramp=ramp)
        delta = method.perturb(network(), samples(), method.init(COUNTS), LATE._replace(progress=progress)).delta
        attack = ATTACK.with_class_factors(1 + share * (full - 1))
        expected = attack(network(), samples().x, samples().y, LATE.generator("attack"))
        assert torch.allclose(delta, expected, rtol=1e-12), progress


def test_equal_classes_alpha_zero_and_the_first_step_are_the_method_itself():
    for inside in INSIDE:
        for method, counts, progress in (
            (RobustLT(inside), torch.tensor([9, 9, 9]), 0.9),
            (RobustLT(inside, alpha=0.0), COUNTS, 0.9),
            (RobustLT(inside), COUNTS, 0.0),
        ):
            model, twin, step = network(), network(), LATE._replace(progress=progress)
            result = method.objective(model, samples(), method.init(counts), step)
            expected = inside.objective(twin, samples(), inside.init(counts), step)
            slope = flat_gradient(expected.loss, twin)
            assert torch.allclose(flat_gradient(result.loss, model), slope, rtol=1e-7, atol=1e-10), inside


def test_class_radii_of_the_method_inside_are_multiplied():
    inside = DAFA(NOISY)
    state = {
        **inside.init(COUNTS),
        "weights": torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64),
        "fixed": torch.tensor(1),
    }
    method = RobustLT(inside)
    factors = method.class_factors(COUNTS)
    delta = method.perturb(network(), samples(), {**state, "robust_lt_factors": factors}, LATE).delta
    attack = NOISY.with_class_factors(factors * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    expected = attack.maximize_divergence(network(), samples().x, samples().y, LATE.generator("attack"))
    assert torch.allclose(delta, expected, rtol=1e-12)


def test_what_it_declares_is_that_of_the_method_inside():
    cfol = CFOL(ATTACK, eta=0.1)
    method = RobustLT(cfol)
    state = method.objective(network(), samples(), method.init(COUNTS), LATE).state
    assert torch.equal(method.sampling(state), cfol.sampling(state)) and method.wrapped is cfol
    assert method.attack is ATTACK and method.scaled(0.5) == RobustLT(CFOL(ATTACK.scaled(0.5), eta=0.1))
    assert RobustLT(DONE(ATTACK)).needs_second_derivatives and not RobustLT(AT()).needs_second_derivatives
    around = AWP(RobustLT(AT(ATTACK), 0.2, 0.5, 2.0))
    assert from_json(to_json(around)) == around and RobustLT().method == AT()


def test_refusals():
    for settings, message in [
        ({"alpha": 1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"ramp": 1.0}, r"\[0, 1\)"),
        ({"limit": 0.9}, "limit"),
        ({"limit": float("inf")}, "limit"),
        ({"method": Standard()}, "Standard has none"),
        ({"method": AT(FGSM(LinfBall(0.1)))}, "one radius for all classes"),
        ({"method": FastATGA()}, "one radius for all classes"),
        ({"method": RobustLT()}, "twice"),
    ]:
        with pytest.raises(UsageError, match=message):
            RobustLT(**settings)
    with pytest.raises(UsageError, match="counts"):
        RobustLT().init()


def test_the_method_inside_learns_from_held_out_images():
    inside = DONEClass(ATTACK, driver="holdout", interval=3)
    method, model, batch = RobustLT(inside), network().eval(), samples()
    state = method.on_validation(model, batch, method.init(COUNTS), LATE)
    expected = inside.on_validation(model, batch, inside.init(COUNTS), LATE)
    assert method.validation_interval == 3 and state.pop("robust_lt_factors").tolist() != [1, 1, 1]
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)

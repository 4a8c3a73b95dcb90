"""Forward and backward passes of a training step, counted and predicted."""

import pytest
import torch

from doubly.attacks import FGSM, PGD
from doubly.methods import AT, AWP, DONE, FAT, TRADES, WAT, DONEClass, FastBAT, Method, Standard
from doubly.rundir import read_json, read_metrics
from doubly.schedules import Constant
from doubly.training.passes import (
    Passes,
    describe_prediction,
    holdout_batches,
    is_listed,
    predicted_holdout_passes,
    predicted_passes,
    random_images,
    step_passes,
    tiny_network,
)

ATTACK = PGD(steps=4)


def test_the_passes_of_a_step():
    for method, forward, backward in [
        (Standard(), 1, 1),
        (AT(ATTACK), 5, 5),  # four steps, and one pass to train
        (AT(PGD(steps=4, restarts=2, attack_mode="train")), 11, 9),  # a restart compares both losses
        (TRADES(PGD(steps=4, start="gaussian")), 7, 6),  # the clean images once in the attack and once in the loss
        (AWP(AT(ATTACK)), 6, 6),  # one attack, and the gradient that perturbs the weights
        (DONE(ATTACK, implicit="first_order"), 6, 6),  # the difference quotient
        (AT(FGSM()), 2, 2),
        (FastBAT(), 4, 6),  # two steps, z and delta*; the implicit term is a double backward
        (FAT(ATTACK, tau=Constant(0.0)), 5, 5),  # at most
    ]:
        assert predicted_passes(method, 1, 3) == Passes(forward, backward), method


def test_held_out_images_add_their_passes():
    near = PGD(steps=4, start="gaussian")
    for method, forward, backward, batches in [
        (AT(ATTACK), 0, 0, 0),
        (WAT(near), 7, 4, 40 / 16 / 5),  # clean logits in the attack, then both losses; all images once in five steps
        (DONEClass(ATTACK, driver="holdout", interval=10), 5, 4, 1 / 10),
        (AWP(DONEClass(ATTACK, driver="holdout", interval=4)), 5, 4, 1 / 4),
        (DONEClass(ATTACK), 0, 0, 0),
    ]:
        assert predicted_holdout_passes(method, 1, 3) == Passes(forward, backward), method
        assert holdout_batches(method, 40, 16, 5) == pytest.approx(batches)
    assert holdout_batches(DONEClass(driver="holdout", interval=10), 8, 16, 5) == 0.05  # half a batch
    assert Passes(11, 11).plus(Passes(7, 4), 0.5) == Passes(14.5, 13)


def test_samples_that_stop_early_are_a_fraction_of_a_pass():
    passes = step_passes(FAT(ATTACK, tau=Constant(0.0)), tiny_network(1, 3), random_images(20, (1, 8, 8), 3), 20)
    assert 2 <= passes.forward < 5 and passes.forward % 1 > 0


def test_a_run_records_the_prediction_and_counts_the_same(tiny, tmp_path, adversarial):
    before = torch.random.get_rng_state()
    tiny.train(tiny.run(adversarial, epochs=1), tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    predicted = read_json(tmp_path / "environment.json")["predicted"]
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert predicted == {"passes_forward": 3.0, "passes_backward": 3.0} == {key: row[key] for key in predicted}


class Own(Method):
    """A user's method, which must not be called for a prediction."""

    def objective(self, model, batch, state, step):
        raise AssertionError


class OwnAttack(PGD):
    """A user's attack that works on its network alone."""

    def __call__(self, model, x, y, generator):
        raise ValueError("another network")


def test_a_method_of_the_user_is_not_called_and_an_attack_of_the_user_may_fail(splits, adversarial):
    for method in (Own(), AWP(Own())):
        assert not is_listed(method) and describe_prediction(method, splits.train) == {}
    assert describe_prediction(AT(OwnAttack()), splits.train) == {}
    predicted = describe_prediction(AWP(adversarial), splits.train)["predicted"]
    assert predicted == {"passes_forward": 4.0, "passes_backward": 4.0}


def test_counting_removes_its_hook_also_after_an_error():
    model = tiny_network(1, 3)
    with pytest.raises(AssertionError):
        step_passes(Own(), model, random_images(4, (1, 8, 8), 3), 4)
    assert not model._forward_hooks

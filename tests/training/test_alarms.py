"""What goes wrong in training is said in one sentence: for the numbers, and in a run that really does."""

import pytest

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.config import SGD, Data, Run, Validation
from doubly.data import Digits
from doubly.methods import AT, Standard
from doubly.models import SmallCNN
from doubly.schedules import Constant
from doubly.threat import LinfBall
from doubly.training.alarms import alarms
from doubly.training.loop import NullCallback, train_run


def row(**validation):
    usual = {"ra_pgd": 0.5, "ra_margin": 0.48, "commonest": {"name": "3", "share": 0.12, "true_share": 0.1}}
    return {"train_accuracy": 0.6, "validation": {**usual, **validation}}


def test_healthy_training_is_silent():
    assert alarms(row(), peak=0.55) == []


def test_an_accuracy_under_pgd_that_falls_while_the_training_attack_is_beaten_is_catastrophic_overfitting():
    (sentence,) = alarms({**row(ra_pgd=0.05, ra_margin=0.05), "train_accuracy": 0.9}, peak=0.5)
    assert "catastrophic overfitting" in sentence and "from 50% to 5%" in sentence and "90%" in sentence
    # A fall that training feels as well is none.
    assert alarms({**row(ra_pgd=0.05, ra_margin=0.05), "train_accuracy": 0.1}, peak=0.5) == []


def test_nearly_all_answers_in_one_class_is_collapse_unless_the_images_are():
    (sentence,) = alarms(row(commonest={"name": "cat", "share": 0.97, "true_share": 0.1}), peak=0.5)
    assert "collapse" in sentence and "'cat'" in sentence and "97%" in sentence
    assert alarms(row(commonest={"name": "cat", "share": 0.97, "true_share": 0.95}), peak=0.5) == []


def test_a_much_stronger_margin_attack_means_masked_gradients():
    (sentence,) = alarms(row(ra_margin=0.2), peak=0.5)
    assert "masked gradients" in sentence and "50%" in sentence and "20%" in sentence


class Listener(NullCallback):
    def __init__(self):
        self.said, self.rows = [], []

    def say(self, sentence):
        self.said.append(sentence)

    def row(self, row):
        self.rows.append(row)


class Weakening(AT):
    """AT whose attack stops half-way: from then on it trains on what is no attack any more."""

    def objective(self, model, batch, state, moment):
        method = AT(self.attack) if moment.progress < 0.5 else Standard()
        return method.objective(model, batch, state, moment)


@pytest.fixture(scope="module")
def overfitted():
    threat = LinfBall(0.2)
    attack = PGD(threat, 5, SignStep(0.08))
    validation = Validation(5, 360, PGD(threat, 20, SignStep(0.05)))
    run = Run(
        Data(Digits()), SmallCNN(16), Weakening(attack), SGD(Constant(0.1)), validation, epochs=50, channels_last="no"
    )
    listener = Listener()
    train_run(run, None, watch=listener)
    return listener


def test_a_run_that_overfits_its_attack_says_so(overfitted):
    heard = [sentence for sentence in overfitted.said if "catastrophic overfitting" in sentence]
    assert heard and heard[0].startswith("epoch ")
    assert any(row.get("alarms") for row in overfitted.rows)

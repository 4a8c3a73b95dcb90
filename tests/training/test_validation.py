"""Validation during training, and the sentences about training that has gone wrong."""

import pytest

from doubly.callbacks import Callback
from doubly.config import Validation
from doubly.rundir import read_metrics
from doubly.training.validation import training_alarms, validation_score


def row(train_accuracy=0.6, **validation):
    usual = {"ra_pgd": 0.5, "ra_tail_30": 0.3, "ra_margin": 0.48, **commonest(0.12, 0.1)}
    return {"train_accuracy": train_accuracy, "validation": {**usual, **validation}}


def commonest(share, true_share):
    return {"commonest": {"name": "cat", "share": share, "true_share": true_share}}


def test_alarms_name_what_has_gone_wrong():
    for metrics, peak, words in [
        (row(0.9, ra_pgd=0.05, ra_margin=0.05), 0.5, ("catastrophic overfitting", "from 50% to 5%", "90%")),
        (row(**commonest(0.97, 0.1)), 0.5, ("collapse", "'cat'", "97%")),
        (row(ra_margin=0.2), 0.5, ("masked gradients", "50%", "20%")),
    ]:
        (alarm,) = training_alarms(metrics, peak)
        assert all(word in alarm for word in words)


def test_healthy_training_raises_no_alarm():
    for metrics, peak in [
        (row(), 0.55),
        (row(0.1, ra_pgd=0.05, ra_margin=0.05), 0.5),  # a fall that training shows as well
        (row(**commonest(0.97, 0.95)), 0.5),  # nearly all images are of one class
    ]:
        assert training_alarms(metrics, peak) == []


def test_the_best_epoch_is_chosen_by_the_number_that_the_settings_name():
    validation = {"ra_pgd": 0.6, "ra_tail_30": 0.2}
    scores = [validation_score(validation, Validation(choose=name)) for name in ("ra_pgd", "ra_tail_30", "both")]
    assert scores == [0.6, 0.2, pytest.approx(0.4)]


def test_alarms_are_reported_and_kept_and_compare_with_the_highest_accuracy_so_far(tiny, tmp_path, monkeypatch):
    class Listener(Callback):
        messages = ()

        def on_message(self, message):
            self.messages = (*self.messages, message)

    accuracies = iter([0.5, 0.3, 0.02])
    monkeypatch.setattr("doubly.training.validation.validate", lambda state: row(ra_pgd=next(accuracies))["validation"])
    monkeypatch.setattr("doubly.training.validation.OVERFITTING_DROP", 0.3)
    listener = Listener()
    validation = Validation(every=1, size=30, attack=tiny.attack)
    tiny.train(tiny.run(validation=validation), tmp_path, callbacks=[listener])
    message = listener.messages[-1]
    assert len(listener.messages) == 3  # the images, the short steps of the tiny attack, and one alarm
    assert message.startswith("epoch 3: catastrophic overfitting: accuracy under PGD fell from 50% to 2%")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [len(entry["alarms"]) for entry in rows] == [0, 0, 1]
    assert tiny.checkpoint(tmp_path)[1]["peak_ra_pgd"] == 0.5


def test_a_validation_has_the_accuracies_of_all_and_of_each_class(tiny, tmp_path, adversarial):
    tiny.train(tiny.run(adversarial, epochs=10), tmp_path)
    validation = read_metrics(tmp_path / "metrics.jsonl")[-1]["validation"]
    assert (validation["on"], validation["n"]) == ("test", 30)
    assert validation["sa"] > 0.9 and validation["ra_pgd"] > 0.6  # training learns
    assert validation["ra_pgd"] == pytest.approx(sum(validation["per_class"].values()) / 3)  # classes of equal size
    worst = min(validation["per_class"], key=validation["per_class"].get)
    assert validation["worst_class"] == {"name": worst, "ra_pgd": validation["per_class"][worst]}
    assert validation["ra_tail_30"] == validation["per_class"][worst]
    assert set(validation["commonest"]) == {"name", "share", "true_share"}
    assert validation["ra_margin"] <= validation["ra_pgd"] + 0.1

"""Estimates of how long a run takes: formulas with round numbers, and a calibration that only has to work."""

from dataclasses import replace

import pytest
import torch

from doubly.config.serialize import with_changes
from doubly.data import Digits, ImageFolder, StepImbalance
from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.jobs import cost
from doubly.jobs.cost import DataSize, PassTimes, data_sizes, estimate_run, measure_passes, published_size
from doubly.recipes import recipe
from doubly.training.passes import Passes

SIZE = DataSize(train=1000, test=100, shape=(1, 8, 8), classes=10)
TIMES = PassTimes(forward=1.0, attack=3.0, update=5.0, batch_size=128, threads=1)


def test_the_seconds_of_passes():
    assert TIMES.attack_seconds(Passes(10, 7)) == 10 * 1.0 + 7 * 2.0
    assert TIMES.step_seconds(Passes(11, 11)) == 128 * (11 * 1.0 + 10 * 2.0 + 1 * 4.0)  # one backward is the update's


def test_training_is_steps_and_validations_of_the_epochs_that_are_left():
    run = with_changes(recipe("digits.at"), {"epochs": 20, "method.attack.steps": 2, "validation.size": 1})
    whole = estimate_run(run, SIZE, TIMES, 20, None, ())
    assert whole.step_passes == Passes(3, 3) and whole.eval_seconds == 0 and whole.seconds == whole.train_seconds
    step = TIMES.step_seconds(Passes(3, 3))
    validation = whole.train_seconds - 20 * 8 * step  # two of them, after epochs 10 and 20
    assert 2 * 2 * 20 * 3.0 < validation < 2 * (2 * 20 + 10) * 3.0  # 20 steps of two attacks, and a few predictions
    half = estimate_run(run, SIZE, TIMES, 10, None, ())
    assert half.train_seconds == pytest.approx(whole.train_seconds / 2)
    assert estimate_run(run, SIZE, TIMES, 0, None, ()).seconds == 0


def test_each_part_of_an_evaluation_adds_its_time():
    run = recipe("digits.at")

    def seconds(attacks=("pgd",), **settings):
        return estimate_run(run, SIZE, TIMES, 0, EvalConfig(**{"trust": False, **settings}), attacks).eval_seconds

    plain = seconds()
    assert 100 * 20 * 3.0 < plain < 100 * 25 * 3.0
    assert seconds(images=50) == pytest.approx(plain / 2) and seconds(images=10**6) == plain
    assert seconds(curve_images=10) - plain == 10 * 7 * 21 * 3.0  # seven radii beside 0
    assert seconds(trust=True, trust_images=2) - plain == 2 * (11 * 20 + 50) * 3.0
    strong = seconds(("pgd", "strong")) - plain  # 10 steps, and 9 targets in two rounds of 9 and 11 steps
    assert 100 * (10 + 9 * 20) * 3.0 < strong < 100 * (10 + 9 * 20) * 3.0 + 100 * 30
    autoattack = seconds(("pgd", "autoattack"), autoattack_images=4) - plain
    assert autoattack == pytest.approx(4 / 100 * (seconds(("pgd", "autoattack")) - plain)) and autoattack > 1000
    assert 0 < seconds(("pgd", "quick"), autoattack_images=4) - plain < autoattack


def test_sizes_come_from_the_data_or_from_what_was_published(tmp_path):
    digits, missing = recipe("digits.imbalanced.at"), recipe("cifar10.at")
    missing = replace(missing, data=replace(missing.data, root=str(tmp_path)))
    sizes, errors = data_sizes([digits, digits, missing])
    assert sizes == {digits.data: DataSize(859, 360, (1, 8, 8), 10)}
    assert len(errors) == 1 and "doubly data fetch cifar10" in errors[0]
    assert published_size(missing.data) == DataSize(50_000, 10_000, (3, 32, 32), 10)
    small = replace(missing.data, train_images=1000, imbalance=StepImbalance(0.2))
    assert published_size(small).train == 5 * 100 + 5 * 20
    for source in (Digits(), ImageFolder("nowhere")):
        with pytest.raises(UsageError, match="unknown without its files"):
            published_size(replace(missing.data, source=source))


def test_passes_are_timed_on_the_network_of_the_run(monkeypatch):
    monkeypatch.setattr(cost, "MAX_SECONDS", 0.01)
    small, large = {"model": "model.small_cnn"}, {"model": "model.narrow_resnet", "recompute_activations": True}
    for changes in (small, {**small, "channels_last": "auto"}, {**large, "channels_last": "yes"}):
        run = with_changes(recipe("digits.at"), {**changes, "device": "cpu", "batch_size": 4})
        times = measure_passes(run, SIZE, 1)
        assert min(times.forward, times.attack, times.update) > 0 and (times.batch_size, times.threads) == (4, 1)


def test_threads_are_restored(monkeypatch):
    monkeypatch.setattr(cost, "_timed", lambda work, max_repeats=1: float(torch.get_num_threads()))
    assert measure_passes(recipe("digits.at"), SIZE, 3).update * 2 == 3  # timed with three threads, on two images
    assert torch.get_num_threads() == 1


def test_work_that_takes_long_is_timed_once(monkeypatch):
    durations = iter([2.0, 0.5])
    monkeypatch.setattr(cost, "_seconds", lambda work: next(durations))
    assert cost._timed(lambda: None) == 2.0
    repeats = [0.1, 0.4, 0.2, 0.3, 0.9]  # the first warms up; the others reach the limit of 1.5 seconds
    monkeypatch.setattr(cost, "_seconds", lambda work: repeats.pop(0))
    assert cost._timed(lambda: None) == pytest.approx(0.35) and not repeats

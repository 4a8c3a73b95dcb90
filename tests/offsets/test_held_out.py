"""Which images a repair takes."""

from dataclasses import replace

import pytest
import torch

import offset_problems as problems
from doubly.data import Data, Digits, StepImbalance
from doubly.errors import UsageError
from doubly.offsets.config import RepairConfig
from doubly.offsets.held_out import (
    divide,
    held_out_images,
    notes_on_few_images,
    validation_images,
    without_test_images,
)


def test_fit_and_judge_are_disjoint_and_have_every_class():
    images = problems.bright_rows(200)
    parts = divide(images, RepairConfig())
    fit, judge = set(parts.fit.ids.tolist()), set(parts.judge.ids.tolist())
    assert fit | judge == set(range(200)) and not fit & judge and parts.notes == []
    assert parts.fit.counts().tolist() == parts.judge.counts().tolist() == [25] * 4
    few = divide(images, RepairConfig(images=40, judge_images=12, fit_share=0.25))
    assert (len(few.fit), len(few.judge)) == (40, 12) and not set(few.fit.ids.tolist()) & set(few.judge.ids.tolist())
    assert divide(images, RepairConfig(seed=1)).fit.ids.tolist() != parts.fit.ids.tolist()


def test_the_hold_out_of_a_run_or_what_it_leaves_out_is_taken():
    data = Data(Digits(), StepImbalance(0.2), holdout=0.3)
    held_out, splits, notes = held_out_images(data, trained_here=True)
    assert len(held_out) == round(0.3 * len(splits.train)) and notes == []
    data = Data(Digits(), StepImbalance(0.2), train_images=1000)
    unused, splits, notes = held_out_images(data, trained_here=True)
    assert not set(unused.ids.tolist()) & set(splits.train.ids.tolist()) and len(unused) == 1437 - 1000
    assert "437 training images" in notes[0]
    everything, splits, notes = held_out_images(replace(data, train_images=None), trained_here=False)
    assert len(everything) == len(splits.train) and "too small" in notes[0]
    with pytest.raises(UsageError, match=r"holds none out.*--data\.holdout"):
        held_out_images(replace(data, train_images=None), trained_here=True)


def test_of_a_divided_hold_out_the_part_that_selects_is_left_alone():
    data = Data(Digits(), StepImbalance(0.2), holdout=0.3)
    whole = held_out_images(data, trained_here=True)[0]
    for divided, method_learns, share in ((replace(data, driver_share=0.25), False, 0.25), (data, True, 0.5)):
        fitted, _, notes = held_out_images(divided, trained_here=True, method_learns=method_learns)
        selecting = validation_images(divided, method_learns=method_learns)
        ids, others = set(fitted.ids.tolist()), set(selecting.ids.tolist())
        assert not ids & others and ids | others == set(whole.ids.tolist())
        assert len(ids) == len(whole) - round((1 - share) * len(whole)) and "driver's part" in notes[0]
    for refused, message in ((data, "does not divide"), (replace(data, holdout=0.0), "holds no images out")):
        with pytest.raises(UsageError, match=message):
            validation_images(refused, method_learns=False)


def test_test_images_are_refused_and_a_few_duplicates_left_out():
    images, test = problems.bright_rows(200), problems.bright_rows(50, seed=1)
    assert without_test_images(images, None) == (images, []) and without_test_images(images, test) == (images, [])
    with pytest.raises(UsageError, match="200 of the 200 held-out images are test images"):
        without_test_images(images, images)
    x = torch.cat([images.x[:199], test.x[:1]])
    mixed = replace(images, x=x)
    rest, notes = without_test_images(mixed, test)
    assert len(rest) == 199 and "1 held-out images" in notes[0]


def test_classes_without_or_with_few_images_are_mentioned():
    images = problems.bright_rows(400)
    part = images.subset((images.y != 1) & ((images.y != 2) | (torch.arange(400) < 60)))
    parts = divide(part, RepairConfig())
    assert parts.notes == ["no held-out images to fit on of class 1: the offset stays 0"]
    notes = notes_on_few_images(parts.fit, torch.tensor([0.5, torch.nan, 0.5, 0.5]))
    assert len(notes) == 1 and "of class 2" in notes[0] and "(7 images)" in notes[0] and "% to " in notes[0]
    assert notes_on_few_images(divide(problems.bright_rows(800), RepairConfig()).fit, torch.zeros(4)) == []


def test_fewer_than_two_classes_are_refused_also_if_only_one_is_left_to_fit_on():
    images = problems.bright_rows(40)
    for held_out, settings, message in [
        (images.subset(images.y == 0), {}, "the held-out images are of 1 class"),
        (images.subset([0]), {}, r"of 1 class \(1 image\).*train with --data.holdout 0.1, or call repair"),
        (images.subset([0, 1]), {}, "1 image of 1 class would be left to fit on, of 2 held out"),
        (images, {"images": 1}, "1 image of 1 class would be left to fit on, of 40 held out.*raise images"),
    ]:
        with pytest.raises(UsageError, match=message):
            divide(held_out, RepairConfig(**settings))


REFUSED = [
    ({"priority": 1.5}, "priority lies in"),
    ({"priority": -0.1}, "priority lies in"),
    ({"temperature": 0.0}, r"temperature \(R\) must be positive"),
    ({"temperature": float("nan")}, r"temperature \(R\) must be positive"),
    ({"smoothing": -1.0}, "smoothing must be positive"),
    ({"rounds": 0}, "rounds must be at least 1"),
    ({"rounds": 50, "attack_steps": 4}, "at most 100 attack steps, got 220"),
    ({"fit_on": "dlr"}, "fit_on is one of"),
    ({"implicit": True}, "implicit term is 0"),
    ({"fit_share": 1.0}, "fit_share lies inside"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        RepairConfig(**settings)

import json
from pathlib import Path

import pytest
import torch

from doubly.data import Data, Digits, Images, SelectedImages, Splits, StepImbalance, load_splits, train_split
from doubly.data.splits import divide_holdout
from doubly.errors import UsageError


@pytest.fixture(scope="module")
def digits():
    return Digits().load()


def ids(images):
    return set(images.ids.tolist())


def test_the_root_is_passed_to_the_source_and_the_argument_overrides_the_setting(tmp_path, digits):
    class Source:
        def load(self, root):
            roots.append(root)
            return digits

    roots = []
    for setting, argument in ((None, None), (str(tmp_path), None), ("elsewhere", tmp_path), (None, str(tmp_path))):
        load_splits(Data(Source(), root=setting), argument)
    assert roots == [None, Path(tmp_path), Path(tmp_path), Path(tmp_path)]


def test_fewer_training_images_are_in_the_proportions_of_the_classes_and_noted(digits):
    splits = load_splits(Data(Digits(), train_images=200, test_per_class=5))
    assert len(splits.train) == 200 and ids(splits.train) < ids(digits.train)
    share = 200 * digits.train.counts() / len(digits.train)
    assert (splits.train.counts() - share).abs().max() <= 1
    assert "trained on 200 of 1,437 images" in splits.note and "first 5 images of each class, 50 in all" in splits.note
    assert torch.equal(load_splits(Data(Digits(), train_images=200)).train.ids, splits.train.ids)
    assert load_splits(Data(Digits(), train_images=10**6)).note == ""


def test_the_first_images_of_each_class_can_be_the_test_set(digits):
    splits = load_splits(Data(Digits(), test_per_class=30))
    assert torch.equal(splits.train.ids, digits.train.ids)
    first = [digits.test.ids[digits.test.y == label][:30] for label in range(10)]
    assert torch.equal(splits.test.ids, torch.cat(first).sort().values)  # in the order of the full test set


def test_without_a_holdout_all_images_are_trained_on(digits):
    split = train_split(Data(Digits()), digits)
    assert split.train is digits.train and split.held_out is None


def test_held_out_images_are_not_trained_on_and_not_thinned_out(digits):
    balanced = train_split(Data(Digits(), holdout=0.25), digits)
    assert not ids(balanced.train) & ids(balanced.held_out)
    assert ids(balanced.train) | ids(balanced.held_out) == ids(digits.train)
    assert len(balanced.held_out) == round(0.25 * len(digits.train))
    step = train_split(Data(Digits(), StepImbalance(0.2), 0.25), digits)
    assert torch.equal(step.held_out.ids, balanced.held_out.ids)
    counts, all_counts = step.train.counts(), balanced.train.counts()
    assert (counts[:5] - 0.2 * all_counts[:5]).abs().max() <= 1 and torch.equal(counts[5:], all_counts[5:])
    other = train_split(Data(Digits(), holdout=0.25, split=1), digits)
    assert ids(other.held_out) != ids(balanced.held_out)


def test_groups_are_held_out_as_a_whole():
    y, groups = (torch.arange(40) % 2).repeat_interleave(5), torch.arange(40).repeat_interleave(5)
    images = Images(torch.zeros(200, 1, 1, 1, dtype=torch.uint8), y, ("a", "b"), groups=groups)
    split = train_split(Data(Digits(), holdout=0.3), Splits(images, images))
    assert not set(split.train.groups.tolist()) & set(split.held_out.groups.tolist())


def test_a_file_of_selected_images_is_checked_against_all_images_and_not_limited(tmp_path, digits):
    """If it were checked after the hold-out, a file for a larger set would lose images in silence."""
    listed = {name: digits.train.ids[digits.train.y == k][:9].tolist() for k, name in enumerate(digits.train.classes)}
    (tmp_path / "ids.json").write_text(json.dumps({"kept": listed}))
    data = Data(Digits(), SelectedImages(str(tmp_path / "ids.json")), train_images=50, holdout=0.2)
    splits = load_splits(data)
    assert len(splits.train) == len(digits.train) and splits.note == ""
    split = train_split(data, splits)
    assert ids(split.train) == {k for part in listed.values() for k in part} - ids(split.held_out)
    fewer = Splits(digits.train.subset(digits.train.ids != listed["3"][0]), digits.test)
    with pytest.raises(UsageError, match="was made for other data"):
        train_split(data, fewer)


def test_settings_that_are_refused():
    for options, message in (
        ({"holdout": -0.1}, "holdout is a share"),
        ({"holdout": 1.0}, "holdout is a share"),
        ({"holdout": float("nan")}, "holdout is a share"),
        ({"train_images": 0}, "train_images is at least 1"),
        ({"test_per_class": 0}, "test_per_class is at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            Data(Digits(), **options)


def test_the_holdout_is_divided_by_share_and_groups_and_without_a_common_image():
    y = torch.arange(40) % 4
    held_out = Images(torch.zeros(40, 1, 2, 2), y, tuple("abcd"), groups=torch.arange(40) % 20)
    driver, validation = divide_holdout(Data(Digits(), holdout=0.2, driver_share=0.3), held_out, False)
    assert len(driver) == 12 and len(validation) == 28 and driver.counts().tolist() == [4, 4, 2, 2]
    assert not set(driver.groups.tolist()) & set(validation.groups.tolist())
    assert divide_holdout(Data(Digits(), holdout=0.2), held_out, False) == (None, held_out)
    assert len(divide_holdout(Data(Digits(), holdout=0.2), held_out, True).driver) == 20
    assert divide_holdout(Data(Digits()), None, False) == (None, None)
    for share in (-0.1, 1.0):
        with pytest.raises(UsageError, match="driver_share is a share of the hold-out"):
            Data(Digits(), holdout=0.2, driver_share=share)
    with pytest.raises(UsageError, match="driver_share divides the hold-out, and nothing is held out"):
        divide_holdout(Data(Digits(), driver_share=0.5), None, False)
    twice = Images(torch.zeros(40, 1, 2, 2), y, tuple("abcd"), ids=torch.arange(40) // 8)
    with pytest.raises(UsageError, match=r"images, such as number \d, would drive the method and validate it"):
        divide_holdout(Data(Digits(), holdout=0.2), twice, True)

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubly.data import ExponentialImbalance, Images, KeptImages, StepImbalance
from doubly.data.holdout import holdout
from doubly.data.kept import kept_images as contents
from doubly.errors import UsageError

CLASSES = ("ant", "bee", "cow", "dog")
Y = torch.arange(4).repeat(25)[torch.randperm(100, generator=torch.Generator().manual_seed(3))]


def stated(y=Y, kept=None):
    """What the command writes: of each class, in order, the ids that stay."""
    kept = StepImbalance(0.2).keep(y, 4) if kept is None else kept
    return {"kept": {name: kept[y[kept] == label].tolist() for label, name in enumerate(CLASSES)}}


@pytest.fixture
def kept_images(tmp_path):
    """A file with this content, or this text, as an imbalance."""

    def write(value):
        path = tmp_path / "kept.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return KeptImages(str(path))

    return write


def refused(imbalance, text, y=Y, classes=4, ids=None):
    with pytest.raises(UsageError, match=text) as caught:
        imbalance.keep(y, classes, ids)
    assert imbalance.file in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("imbalance", [StepImbalance(0.2), StepImbalance(0.5, seed=4), ExponentialImbalance(0.3)])
def test_a_file_gives_back_what_another_imbalance_keeps(kept_images, imbalance):
    expected = imbalance.keep(Y, 4)
    found = kept_images(stated(kept=expected)).keep(Y, 4)
    assert torch.equal(found, expected) and found.dtype is torch.int64
    assert torch.equal(kept_images(stated(kept=expected)).keep(Y, 4, torch.arange(100)), expected)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.randoms(use_true_random=False))
def test_any_selection_with_all_classes_comes_back_sorted(tmp_path_factory, labels, random):
    y = torch.tensor([0, 1, 2, 3, *labels])
    chosen = [0, 1, 2, 3, *(row for row in range(4, len(y)) if random.random() < 0.5)]
    value = stated(y, torch.tensor(chosen))
    for ids in value["kept"].values():
        random.shuffle(ids)
    path = tmp_path_factory.mktemp("kept") / "kept.json"
    path.write_text(json.dumps(value))
    assert KeptImages(str(path)).keep(y, 4).tolist() == chosen


def test_names_of_the_classes_are_for_the_reader_and_their_order_counts(kept_images):
    value = stated()
    renamed = {"kept": {f"class {k}": ids for k, ids in enumerate(value["kept"].values())}}
    assert torch.equal(kept_images(renamed).keep(Y, 4), StepImbalance(0.2).keep(Y, 4))
    refused(kept_images({"kept": dict(reversed(value["kept"].items()))}), "other data")


def test_after_a_hold_out_the_ids_count_and_not_the_rows(kept_images):
    images = Images.of(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), Y, CLASSES)
    rest = images.subset(holdout(Y, 0.3, seed=1)[0])
    imbalance = kept_images(stated())
    rows = imbalance.keep(rest.y, 4, rest.ids)
    assert torch.equal(rows, rows.unique())
    named = set(StepImbalance(0.2).keep(Y, 4).tolist())
    assert set(rest.subset(rows).ids.tolist()) == named & set(rest.ids.tolist())
    backwards = rest.subset(list(range(len(rest)))[::-1])
    again = backwards.subset(imbalance.keep(backwards.y, 4, backwards.ids))
    assert set(again.ids.tolist()) == named & set(rest.ids.tolist())


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (Y, 3),
        (Y, 5),
        (Y.roll(1), 4),
        (3 - Y, 4),
    ],
    ids=["fewer classes", "more classes", "shifted", "other order"],
)
def test_other_data_are_refused(kept_images, y, classes):
    refused(kept_images(stated()), "other data", y, classes)


def test_one_image_of_another_class_is_enough(kept_images):
    value = stated()
    y = Y.clone()
    y[value["kept"]["dog"][-1]] = 0
    refused(kept_images(value), "other data", y)


def test_an_id_beyond_the_set_is_refused(kept_images):
    refused(kept_images(stated()), "other data", ids=torch.arange(100) + 1)


def test_one_image_in_two_classes_is_refused(kept_images):
    value = stated()
    value["kept"]["ant"].append(value["kept"]["bee"][0])
    refused(kept_images(value), "other data")


def test_a_class_that_the_file_empties_is_refused(kept_images):
    value = stated()
    value["kept"]["cow"] = []
    refused(kept_images(value), "no image of class 2")


def test_a_class_that_the_hold_out_empties_is_refused(kept_images):
    value = stated()
    rows = torch.tensor([row for row in range(100) if row not in value["kept"]["bee"]])
    refused(kept_images(value), "no image of class 1.*hold out less", Y[rows], ids=rows)


def test_a_missing_file_is_refused_with_the_command_that_writes_it(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        assert "doubly data imbalance" in refused(KeptImages(str(path)), "no file")


@pytest.mark.parametrize("text", ["", "{", '{"kept": {"ant": [0, 1', "\x00\x00", '{"n": 100} more'])
def test_broken_json_is_refused(kept_images, text):
    refused(kept_images(text), "JSON")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "kept.json").write_bytes(b"\xff\xfe\xfa{}")
    refused(KeptImages(str(tmp_path / "kept.json")), "JSON")


@pytest.mark.parametrize(
    "value",
    [
        [],
        [[0, 1], [2, 3]],
        {},
        {"n": 100},
        {"kept": [[0], [1], [2], [3]]},
        {"kept": "ant"},
        {"kept": None},
        "3",
        "null",
        '"kept"',
    ],
    ids=str,
)
def test_json_of_another_shape_is_refused(kept_images, value):
    assert "doubly data imbalance" in refused(kept_images(value), "names no kept images")


def swap(change):
    """A whole file in which the ids of one class are changed."""
    value = stated()
    value["kept"]["bee"] = change(value["kept"]["bee"])
    return value


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: [str(k) for k in ids],
        lambda ids: "0123",
        lambda ids: None,
        lambda ids: {"0": 1},
        lambda ids: [None, *ids[1:]],
        lambda ids: [[ids[0]], ids[1:]],
        lambda ids: [2**70, *ids],
        lambda ids: [k + 0.7 for k in ids],
        lambda ids: [float(ids[0]), *ids[1:]],
        lambda ids: [ids[:2], ids[2:4]],
        lambda ids: ids[0],
        lambda ids: [-1, *ids],
    ],
    ids=[
        "strings", "string", "null", "object", "null inside", "ragged", "huge",
        "fractions", "float", "nested", "number", "negative",
    ],
)  # fmt: skip
def test_ids_are_lists_of_whole_numbers(kept_images, change):
    refused(kept_images(swap(change)), "names no kept images|other data")


def test_truth_values_are_no_ids(kept_images):
    y = torch.tensor([0, 1, 0, 1])
    refused(kept_images({"kept": {"a": [False], "b": [True]}}), "names no kept images", y, 2)


def test_the_whole_set_is_checked_before_anything_is_held_out(kept_images):
    """A file that was made of more images than there are would else lose some in silence."""
    images = Images.of(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), Y, CLASSES)
    imbalance = kept_images(stated())
    imbalance.check(images)
    more = Images.of(torch.zeros(200, 1, 1, 1, dtype=torch.uint8), torch.cat([Y, Y]), CLASSES)
    imbalance.check(more)  # the images that it names are there
    named = stated()["kept"]["dog"][0]
    lacking = images.subset([row for row in range(100) if row != named])
    imbalance.keep(lacking.y, 4, lacking.ids)  # as after a hold-out
    renamed = Images.of(images.x, Y, ("ant", "bee", "cow", "donkey"))
    for other in (lacking, renamed, images.subset(range(50))):
        with pytest.raises(UsageError, match="made for other data"):
            imbalance.check(other)


def test_what_is_written_is_what_is_read(kept_images):
    images = Images.of(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), Y, CLASSES)
    expected = StepImbalance(0.2).keep(Y, 4)
    value = contents(images.subset(expected), {"dataset": "animals"})
    assert value["dataset"] == "animals" and list(value["kept"]) == list(CLASSES)
    assert torch.equal(kept_images(value).keep(Y, 4), expected)
    twins = Images.of(images.x, Y, ("ant", "bee", "bee", "dog"))
    with pytest.raises(UsageError, match="share a name"):
        contents(twins, {})

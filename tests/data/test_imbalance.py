import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubly.data import ExponentialImbalance, Images, SelectedImages, StepImbalance
from doubly.data.holdout import holdout
from doubly.data.imbalance import selection_file
from doubly.errors import UsageError

CIFAR10 = torch.arange(10).repeat(5000)
CLASSES = ("ant", "bee", "cow", "dog")
Y = torch.arange(4).repeat(25)[torch.randperm(100, generator=torch.Generator().manual_seed(3))]
IMAGES = Images.of(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), Y, CLASSES)
STEP = StepImbalance(0.2).keep(Y, 4)


def counts(imbalance, y, classes=10):
    return torch.bincount(y[imbalance.keep(y, classes)], minlength=classes).tolist()


def test_step_on_cifar10():
    assert counts(StepImbalance(), CIFAR10) == [1000] * 5 + [5000] * 5


def test_step_takes_a_share_of_each_class_of_svhn():
    sizes = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    y = torch.arange(10).repeat_interleave(torch.tensor(sizes))
    assert counts(StepImbalance(), y) == [989, 2772, 2117, 1699, 1491, *sizes[5:]]


def test_step_takes_at_most_a_share_of_the_largest_class_of_svhn():
    y = torch.arange(10).repeat_interleave(torch.tensor([494, 1386, 1058, 849, 745, 688, 572, 559, 504, 100]))
    expected = [494, 554, 554, 554, 554, 688, 572, 559, 504, 100]  # 0.4 * 1386 = 554.4
    assert counts(StepImbalance(0.4, of="largest"), y) == expected


def test_exponential_on_cifar10():
    expected = [1000, 1195, 1429, 1709, 2044, 2445, 2924, 3496, 4181, 5000]
    assert counts(ExponentialImbalance(), CIFAR10) == expected


def test_odd_numbers_of_classes_rounding_and_tiny_classes():
    assert counts(StepImbalance(0.5), torch.arange(3).repeat(10), 3) == [5, 10, 10]
    assert counts(StepImbalance(0.29), torch.arange(2).repeat(100), 2) == [29, 100]  # 0.29 * 100 = 28.999…
    assert counts(StepImbalance(0.01), torch.arange(4).repeat(3), 4) == [1, 1, 3, 3]


def test_a_smaller_ratio_keeps_a_part_of_the_larger():
    y = torch.arange(4).repeat(50)
    smaller, larger = (set(StepImbalance(ratio).keep(y, 4).tolist()) for ratio in (0.2, 0.6))
    assert smaller < larger


@given(sizes=st.lists(st.integers(20, 60), min_size=2, max_size=8), ratio=st.floats(0.05, 1.0), seed=st.integers(0, 3))
@settings(max_examples=50)
def test_counts_lie_between_ratio_and_all(sizes, ratio, seed):
    shuffled = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[shuffled]
    for kind in (StepImbalance, ExponentialImbalance):
        indices = kind(ratio, seed).keep(y, len(sizes))
        assert torch.equal(indices, indices.unique())
        for count, size in zip(torch.bincount(y[indices]).tolist(), sizes, strict=True):
            assert max(1, ratio * size - 1) <= count <= size
        assert (y[indices] == len(sizes) - 1).sum() == sizes[-1]


def test_ratios_and_sets_that_are_refused():
    for kind in (StepImbalance, ExponentialImbalance):
        for ratio in (0.0, -0.1, 1.1, float("nan")):
            with pytest.raises(UsageError, match="ratio"):
                kind(ratio)
        with pytest.raises(UsageError, match="class 1 has no images"):
            kind().keep(torch.tensor([0, 0, 2, 2]), 3)
    with pytest.raises(UsageError, match="no image of class 0"):
        ExponentialImbalance(0.01).keep(torch.arange(4).repeat(3), 4)


# --- images listed in a file ---


@pytest.fixture
def selected(tmp_path):
    """Make a SelectedImages of a file with this content: JSON, text or bytes."""

    def write(content):
        path = tmp_path / "ids.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return SelectedImages(str(path))

    return write


def listed(indices=STEP, **changes):
    """The content of a file: the ids of each class, some of them changed."""
    ids = {name: indices[Y[indices] == label].tolist() for label, name in enumerate(CLASSES)}
    return {"kept": ids | {name: change(ids[name]) for name, change in changes.items()}}


def test_a_file_gives_back_what_another_imbalance_keeps(selected):
    for imbalance in (StepImbalance(0.2), StepImbalance(0.5, seed=4), ExponentialImbalance(0.3)):
        expected = imbalance.keep(Y, 4)
        content = selection_file(IMAGES.subset(expected), {"dataset": "animals"})
        assert content["dataset"] == "animals" and list(content["kept"]) == list(CLASSES)
        for ids in (None, torch.arange(100)):
            indices = selected(content).keep(Y, 4, ids)
            assert torch.equal(indices, expected) and indices.dtype is torch.int64


def test_the_order_of_ids_does_not_count_and_that_of_classes_does(selected):
    ids = listed(ant=lambda ids: ids[::-1])["kept"]
    renamed = {f"class {k}": part for k, part in enumerate(ids.values())}
    assert torch.equal(selected({"kept": renamed}).keep(Y, 4), STEP)
    with pytest.raises(UsageError, match="other data"):
        selected({"kept": dict(reversed(ids.items()))}).keep(Y, 4)


def test_after_a_hold_out_ids_are_looked_up_and_not_positions(selected):
    rest = IMAGES.subset(holdout(Y, 0.3, seed=1)[0])
    expected = set(STEP.tolist()) & set(rest.ids.tolist())
    for images in (rest, rest.subset(list(range(len(rest)))[::-1])):
        indices = selected(listed()).keep(images.y, 4, images.ids)
        assert torch.equal(indices, indices.unique())
        assert set(images.subset(indices).ids.tolist()) == expected


def test_the_images_must_be_all_there_and_have_the_same_classes(selected):
    imbalance = selected(listed())
    imbalance.check(IMAGES)
    imbalance.check(Images.of(torch.zeros(200, 1, 1, 1, dtype=torch.uint8), torch.cat([Y, Y]), CLASSES))
    lacking = IMAGES.subset([row for row in range(100) if row != listed()["kept"]["dog"][0]])
    imbalance.keep(lacking.y, 4, lacking.ids)  # as after a hold-out
    for other in (lacking, Images.of(IMAGES.x, Y, ("ant", "bee", "cow", "donkey")), IMAGES.subset(range(50))):
        with pytest.raises(UsageError, match="made for other data"):
            imbalance.check(other)


def test_files_for_other_data_are_refused(selected):
    dog = Y.clone()
    dog[listed()["kept"]["dog"][-1]] = 0
    bee = torch.tensor([row for row in range(100) if row not in listed()["kept"]["bee"]])
    doubled = listed(ant=lambda ids: [*ids, listed()["kept"]["bee"][0]])
    for content, y, classes, ids, message in (
        (listed(), Y, 3, None, "other data"),
        (listed(), Y, 5, None, "other data"),
        (listed(), Y.roll(1), 4, None, "other data"),
        (listed(), 3 - Y, 4, None, "other data"),
        (listed(), dog, 4, None, "other data"),
        (listed(), Y, 4, torch.arange(100) + 1, "other data"),
        (doubled, Y, 4, None, "other data"),
        (listed(cow=lambda ids: []), Y, 4, None, "no image of class 2"),
        (listed(), Y[bee], 4, bee, "no image of class 1.*hold out less"),
    ):
        imbalance = selected(content)
        with pytest.raises(UsageError, match=f"{re.escape(imbalance.file)} .*{message}"):
            imbalance.keep(y, classes, ids)


def test_files_that_list_no_ids_are_refused(selected, tmp_path):
    for content in ("", "{", '{"kept": {"ant": [0, 1', "\x00\x00", '{"n": 100} more', b"\xff\xfe\xfa{}"):
        with pytest.raises(UsageError, match="JSON"):
            selected(content).keep(Y, 4)
    for content in (
        [],
        [[0, 1], [2, 3]],
        {},
        {"kept": [[0], [1], [2], [3]]},
        {"kept": "ant"},
        {"kept": None},
        "3",
        "null",
    ):
        with pytest.raises(UsageError, match=r"lists no selected images.*doubly data imbalance"):
            selected(content).keep(Y, 4)
    for change in (
        lambda ids: [str(k) for k in ids],
        lambda ids: "0123",
        lambda ids: None,
        lambda ids: {"0": 1},
        lambda ids: ids[0],
        lambda ids: [None, *ids[1:]],
        lambda ids: [[ids[0]], ids[1:]],
        lambda ids: [2**70, *ids],
        lambda ids: [float(ids[0]), *ids[1:]],
        lambda ids: [True, *ids],
        lambda ids: [-1, *ids],
    ):
        with pytest.raises(UsageError, match=r"lists no selected images|an integer of 22 digits"):
            selected(listed(bee=change)).keep(Y, 4)
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match=r"there is no file .*doubly data imbalance"):
            SelectedImages(str(path)).keep(Y, 4)
    with pytest.raises(UsageError, match="share a name"):
        selection_file(Images.of(IMAGES.x, Y, ("ant", "bee", "bee", "dog")), {})

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubly.data.holdout import first_of_each_class, holdout, rank_within_class, stratified_folds, stratified_subset
from doubly.errors import UsageError

labels = st.lists(st.integers(0, 5), min_size=2, max_size=60).map(torch.tensor)
seeds = st.integers(0, 3)


def per_class(y):
    return torch.bincount(y, minlength=6)


@given(labels, seeds)
@settings(max_examples=30)
def test_rank_numbers_each_class(y, seed):
    rank = rank_within_class(y, torch.Generator().manual_seed(seed))
    for label in y.unique():
        assert rank[y == label].sort().values.tolist() == list(range(int((y == label).sum())))


def test_the_first_images_of_each_class_are_sorted():
    assert first_of_each_class(torch.tensor([2, 0, 2, 0, 2, 0, 1]), 2).tolist() == [0, 1, 2, 3, 6]


@given(labels, st.integers(2, 7), seeds)
@settings(max_examples=50)
def test_folds_partition_and_keep_proportions(y, folds, seed):
    if folds > len(y):
        with pytest.raises(UsageError, match="folds"):
            stratified_folds(y, folds, seed)
        return
    parts = stratified_folds(y, folds, seed)
    assert len(parts) == folds
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(y)))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    counts = torch.stack([per_class(y[part]) for part in parts])
    assert (counts.amax(0) - counts.amin(0)).max() <= 1
    assert counts.sum(1).max() - counts.sum(1).min() <= 1


@given(labels, st.floats(0.05, 0.95), seeds)
@settings(max_examples=50)
def test_holdout_partitions_and_keeps_every_class(y, share, seed):
    size = round(share * len(y))
    if size in (0, len(y)):
        with pytest.raises(UsageError, match="both sides"):
            holdout(y, share, seed)
        return
    train, held_out = holdout(y, share, seed)
    assert torch.equal(torch.cat([train, held_out]).sort().values, torch.arange(len(y)))
    assert torch.equal(train, train.sort().values) and torch.equal(held_out, held_out.sort().values)
    assert len(held_out) == size
    if len(train) >= len(y.unique()):
        assert set(y[train].tolist()) == set(y.tolist())


def test_holdout_keeps_proportions():
    y = torch.arange(4).repeat_interleave(torch.tensor([1000, 300, 50, 1]))
    train, held_out = holdout(y, 0.1, seed=0)
    assert (torch.bincount(y[held_out], minlength=4) - torch.tensor([100, 30, 5, 0])).abs().max() <= 1
    assert torch.bincount(y[train])[3] == 1


@given(labels, st.integers(1, 80), seeds)
@settings(max_examples=50)
def test_a_subset_has_its_size_and_every_class(y, size, seed):
    indices = stratified_subset(y, size, seed)
    assert torch.equal(indices, indices.unique())
    assert len(indices) == min(size, len(y))
    assert len(y[indices].unique()) == min(size, len(y.unique()))


def test_a_subset_keeps_proportions_and_is_always_the_same():
    y = torch.arange(4).repeat_interleave(torch.tensor([1000, 300, 50, 1]))
    counts = torch.bincount(y[stratified_subset(y, 135, seed=0)], minlength=4)
    assert (counts - torch.tensor([100, 30, 5, 1])).abs().max() <= 1
    # Published numbers were measured on these images; another random stream would select others.
    assert stratified_subset(torch.arange(40) % 4, 8, seed=0).tolist() == [4, 10, 11, 25, 31, 32, 33, 38]


def test_the_seed_decides():
    y, groups = torch.arange(100) % 3, torch.arange(100)
    for part in (
        lambda seed: torch.cat(stratified_folds(y, 4, seed)),
        lambda seed: torch.cat(holdout(y, 0.5, seed)),
        lambda seed: torch.cat(holdout(y, 0.5, seed, groups)),
        lambda seed: stratified_subset(y, 20, seed),
    ):
        assert torch.equal(part(0), part(0))
        assert not torch.equal(part(0), part(1))


def test_sizes_that_are_refused():
    y = torch.zeros(10, dtype=torch.int64)
    for call, message in (
        *((lambda share=share: holdout(y, share, 0), "share") for share in (0.0, 1.0, -0.5, 2.0)),
        (lambda: holdout(y, 0.01, 0), "got 0.01 of 10: give a share of at least 0.1 and at most 0.9, or more images"),
        (lambda: holdout(y[:1], 0.5, 0), "got 0.5 of 1: one image cannot be divided, so give more images"),
        (lambda: holdout(y, 0.5, 0, torch.full((10,), 7)), "both sides"),  # one group cannot be cut
        (lambda: stratified_subset(y, 0, 0), "at least one"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


@st.composite
def grouped(draw):
    """(labels, groups): groups of 1 to 6 images of one class, numbered and ordered at random."""
    classes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=20))
    sizes = draw(st.lists(st.integers(1, 6), min_size=len(classes), max_size=len(classes)))
    numbers = draw(st.lists(st.integers(-(10**12), 10**12), min_size=len(classes), max_size=len(classes), unique=True))
    rows = torch.tensor(draw(st.permutations(range(sum(sizes)))))
    y, groups = (torch.tensor(part).repeat_interleave(torch.tensor(sizes))[rows] for part in (classes, numbers))
    return y, groups


@given(grouped(), st.floats(0.05, 0.95), seeds, st.integers(0, 100))
@settings(max_examples=50)
def test_groups_stay_together_whatever_the_order_of_the_images(labeled, share, seed, shift):
    y, groups = labeled
    count = len(groups.unique())
    size = round(share * count)
    if size in (0, count):
        with pytest.raises(UsageError, match="both sides"):
            holdout(y, share, seed, groups)
        return
    train, held_out = holdout(y, share, seed, groups)
    assert torch.equal(torch.cat([train, held_out]).sort().values, torch.arange(len(y)))
    assert torch.equal(train, train.sort().values) and torch.equal(held_out, held_out.sort().values)
    assert not set(groups[train].tolist()) & set(groups[held_out].tolist())
    assert len(groups[held_out].unique()) == size
    if count - size >= len(y.unique()):
        assert set(y[train].tolist()) == set(y.tolist())
    other = holdout(y.roll(shift), share, seed, groups.roll(shift))[1]
    assert set(groups[held_out].tolist()) == set(groups.roll(shift)[other].tolist())


def test_groups_keep_the_share_of_each_class():
    """As for traffic signs: 7 to 75 tracks of 30 frames of each of 43 signs."""
    tracks = torch.linspace(7, 75, 43).long()
    track_label = torch.arange(43).repeat_interleave(tracks)
    y, groups = track_label.repeat_interleave(30), torch.arange(len(track_label)).repeat_interleave(30)
    for share in (0.1, 0.2, 0.5):
        train, held_out = holdout(y, share, 0, groups)
        assert len(held_out) == 30 * round(share * len(track_label))
        assert (torch.bincount(y[held_out], minlength=43) - share * torch.bincount(y)).abs().max() <= 30
        assert torch.bincount(y[train]).min() >= 30


def test_groups_of_different_sizes_come_near_the_share():
    sizes = torch.randint(1, 40, (600,), generator=torch.Generator().manual_seed(0))
    y, groups = (part.repeat_interleave(sizes) for part in (torch.arange(600) % 3, torch.arange(600)))
    for seed in range(5):
        _, held_out = holdout(y, 0.25, seed, groups)
        shares = torch.bincount(y[held_out]) / torch.bincount(y)
        assert (shares - 0.25).abs().max() < 0.05


def test_the_only_group_of_a_class_is_trained_on():
    y = torch.arange(3).repeat_interleave(torch.tensor([40, 40, 9]))
    groups = torch.cat([torch.arange(16).repeat_interleave(5), torch.full((9,), 99)])
    for seed in range(20):
        assert (y[holdout(y, 0.5, seed, groups)[0]] == 2).sum() == 9


@given(labels, st.floats(0.05, 0.95), seeds)
@settings(max_examples=30)
def test_groups_of_one_image_are_no_groups(y, share, seed):
    if round(share * len(y)) not in (0, len(y)):
        plain, by_group = holdout(y, share, seed), holdout(y, share, seed, torch.arange(len(y)) * 10 - 7)
        assert all(torch.equal(one, other) for one, other in zip(by_group, plain, strict=True))

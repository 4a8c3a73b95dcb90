import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubly.data import Images
from doubly.data.holdout import holdout, rank_within_class, stratified_folds, stratified_subset
from doubly.errors import UsageError

labels = st.lists(st.integers(0, 5), min_size=2, max_size=60).map(torch.tensor)
seeds = st.integers(0, 3)


def per_class(y):
    return torch.bincount(y, minlength=6)


@given(labels, seeds)
def test_rank_numbers_each_class(y, seed):
    rank = rank_within_class(y, torch.Generator().manual_seed(seed))
    for label in y.unique():
        assert rank[y == label].sort().values.tolist() == list(range(int((y == label).sum())))


@given(labels, st.integers(2, 7), seeds)
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
def test_holdout_partitions_and_keeps_every_class(y, share, seed):
    size = round(share * len(y))
    if size in (0, len(y)):
        with pytest.raises(UsageError, match="both sides"):
            holdout(y, share, seed)
        return
    kept, held = holdout(y, share, seed)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(len(y)))
    assert torch.equal(kept, kept.sort().values) and torch.equal(held, held.sort().values)
    assert len(held) == size
    if len(kept) >= len(y.unique()):
        assert set(y[kept].tolist()) == set(y.tolist())


def test_holdout_keeps_proportions():
    y = torch.arange(4).repeat_interleave(torch.tensor([1000, 300, 50, 1]))
    kept, held = holdout(y, 0.1, seed=0)
    assert (torch.bincount(y[held], minlength=4) - torch.tensor([100, 30, 5, 0])).abs().max() <= 1
    assert torch.bincount(y[kept])[3] == 1


@given(labels, st.integers(1, 80), seeds)
def test_probe_has_its_size_and_every_class(y, size, seed):
    chosen = stratified_subset(y, size, seed)
    assert torch.equal(chosen, chosen.unique())
    assert len(chosen) == min(size, len(y))
    present = len(y[chosen].unique())
    assert present == min(size, len(y.unique()))


def test_probe_keeps_proportions():
    y = torch.arange(4).repeat_interleave(torch.tensor([1000, 300, 50, 1]))
    counts = torch.bincount(y[stratified_subset(y, 135, seed=0)], minlength=4)
    assert (counts - torch.tensor([100, 30, 5, 1])).abs().max() <= 1


@pytest.mark.parametrize(
    "part",
    [
        lambda y, seed: torch.cat(stratified_folds(y, 4, seed)),
        lambda y, seed: torch.cat(holdout(y, 0.5, seed)),
        lambda y, seed: stratified_subset(y, 20, seed),
    ],
)
def test_the_seed_decides(part):
    y = torch.arange(100) % 3
    assert torch.equal(part(y, 0), part(y, 0))
    assert not torch.equal(part(y, 0), part(y, 1))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0])
def test_holdout_refuses_shares(share):
    with pytest.raises(UsageError, match="share"):
        holdout(torch.zeros(10, dtype=torch.int64), share, 0)


def test_probe_refuses_nothing():
    with pytest.raises(UsageError, match="at least one"):
        stratified_subset(torch.zeros(10, dtype=torch.int64), 0, 0)


@st.composite
def grouped(draw):
    """(labels, groups): groups of 1 to 6 images of one class, numbered and ordered at random."""
    classes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=20))
    sizes = draw(st.lists(st.integers(1, 6), min_size=len(classes), max_size=len(classes)))
    numbers = draw(st.lists(st.integers(-(10**12), 10**12), min_size=len(classes), max_size=len(classes), unique=True))
    rows = torch.tensor(draw(st.permutations(range(sum(sizes)))))
    y, groups = (torch.tensor(part).repeat_interleave(torch.tensor(sizes))[rows] for part in (classes, numbers))
    return y, groups


@given(grouped(), st.floats(0.05, 0.95), seeds)
@settings(max_examples=50)
def test_no_group_straddles_the_cut(labeled, share, seed):
    y, groups = labeled
    count = len(groups.unique())
    size = round(share * count)
    if size in (0, count):
        with pytest.raises(UsageError, match="both sides"):
            holdout(y, share, seed, groups)
        return
    kept, held = holdout(y, share, seed, groups)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(len(y)))
    assert torch.equal(kept, kept.sort().values) and torch.equal(held, held.sort().values)
    assert not set(groups[kept].tolist()) & set(groups[held].tolist())
    assert len(groups[held].unique()) == size
    if count - size >= len(y.unique()):
        assert set(y[kept].tolist()) == set(y.tolist())
    again = holdout(y, share, seed, groups)
    assert torch.equal(again[0], kept) and torch.equal(again[1], held)


@given(grouped(), st.integers(0, 100), seeds)
@settings(max_examples=50)
def test_the_order_of_the_images_does_not_decide_which_groups_are_held_out(labeled, turn, seed):
    y, groups = labeled
    if len(groups.unique()) < 4:
        return
    one = holdout(y, 0.4, seed, groups)[1]
    other = holdout(y.roll(turn), 0.4, seed, groups.roll(turn))[1]
    assert set(groups[one].tolist()) == set(groups.roll(turn)[other].tolist())


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_groups_keep_the_share_of_each_class(share):
    """As for traffic signs: 7 to 75 tracks of 30 frames of each of 43 signs."""
    tracks = torch.linspace(7, 75, 43).long()
    track_label = torch.arange(43).repeat_interleave(tracks)
    y, groups = track_label.repeat_interleave(30), torch.arange(len(track_label)).repeat_interleave(30)
    kept, held = holdout(y, share, 0, groups)
    assert len(held) == 30 * round(share * len(track_label))
    assert (torch.bincount(y[held], minlength=43) - share * torch.bincount(y)).abs().max() <= 30
    assert torch.bincount(y[kept]).min() >= 30


def test_groups_of_different_sizes_come_near_the_share():
    sizes = torch.randint(1, 40, (600,), generator=torch.Generator().manual_seed(0))
    y, groups = (part.repeat_interleave(sizes) for part in (torch.arange(600) % 3, torch.arange(600)))
    for seed in range(5):
        _, held = holdout(y, 0.25, seed, groups)
        shares = torch.bincount(y[held]) / torch.bincount(y)
        assert (shares - 0.25).abs().max() < 0.05


def test_the_only_group_of_a_class_is_kept():
    y = torch.arange(3).repeat_interleave(torch.tensor([40, 40, 9]))
    groups = torch.cat([torch.arange(16).repeat_interleave(5), torch.full((9,), 99)])
    for seed in range(20):
        assert (y[holdout(y, 0.5, seed, groups)[0]] == 2).sum() == 9


@given(labels, st.floats(0.05, 0.95), seeds, st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_groups_of_one_image_are_no_groups(y, share, seed, random):
    if round(share * len(y)) in (0, len(y)):
        return
    plain = holdout(y, share, seed)
    for one, other in zip(holdout(y, share, seed, torch.arange(len(y)) * 10 - 7), plain, strict=True):
        assert torch.equal(one, other)
    # Numbered otherwise, other images are drawn; of each class as many, but for ties.
    numbers = list(range(len(y)))
    random.shuffle(numbers)
    _, held = holdout(y, share, seed, torch.tensor(numbers))
    assert len(held) == len(plain[1])
    assert (per_class(y[held]) - per_class(y[plain[1]])).abs().max() <= 1


def test_the_seed_decides_which_groups_are_held_out():
    y, groups = (torch.arange(40) % 2).repeat_interleave(5), torch.arange(40).repeat_interleave(5)
    assert not torch.equal(holdout(y, 0.5, 0, groups)[1], holdout(y, 0.5, 1, groups)[1])


def test_one_group_cannot_be_cut():
    y = torch.zeros(10, dtype=torch.int64)
    with pytest.raises(UsageError, match="both sides"):
        holdout(y, 0.5, 0, torch.full((10,), 7))


def test_images_take_their_groups_along():
    y, groups = torch.arange(12) % 2, torch.arange(12) // 4 * 2 + torch.arange(12) % 2
    images = Images(torch.zeros(12, 1, 1, 1, dtype=torch.uint8), y, ("a", "b"), groups=groups)
    kept, held = holdout(y, 0.4, 0, images.groups)
    for rows in (kept, held):
        assert torch.equal(images.subset(rows).to("cpu").groups, groups[rows])
    assert torch.equal(images.subset(y == 1).subset([2, 0]).groups, groups[[5, 1]])
    assert Images.of(images.x, y).subset([0]).groups is None

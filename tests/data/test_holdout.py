import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doubly.data.holdout import holdout, probe, rank_within_class, stratified_folds
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
    chosen = probe(y, size, seed)
    assert torch.equal(chosen, chosen.unique())
    assert len(chosen) == min(size, len(y))
    present = len(y[chosen].unique())
    assert present == min(size, len(y.unique()))


def test_probe_keeps_proportions():
    y = torch.arange(4).repeat_interleave(torch.tensor([1000, 300, 50, 1]))
    counts = torch.bincount(y[probe(y, 135, seed=0)], minlength=4)
    assert (counts - torch.tensor([100, 30, 5, 1])).abs().max() <= 1


@pytest.mark.parametrize(
    "part",
    [
        lambda y, seed: torch.cat(stratified_folds(y, 4, seed)),
        lambda y, seed: torch.cat(holdout(y, 0.5, seed)),
        lambda y, seed: probe(y, 20, seed),
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
        probe(torch.zeros(10, dtype=torch.int64), 0, 0)

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from doubly.bilevel.batches import iterate_batches, row_tensors, select_rows


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.arange(24.0).view(12, 2), torch.arange(12)


def first(count, data=X, rows=12, batch_size=4, seed=0, rank=0, size=1):
    stream = iterate_batches(data, rows, batch_size, seed, rank, size)
    return [next(stream) for _ in range(count)]


def ids_of(taken):
    return torch.stack([ids for ids, _ in taken])


@pytest.mark.parametrize("data", [X, (X, Y), {"x": X, "y": Y}, Pair(X, Y)], ids=lambda data: type(data).__name__)
def test_a_batch_has_the_structure_of_the_data_and_its_rows(data):
    for ids, batch in first(5, data):
        assert type(batch) is type(data)
        for part, whole in zip(row_tensors(batch), row_tensors(data), strict=True):
            assert torch.equal(part, whole[ids])
    if isinstance(data, dict):
        assert batch.keys() == data.keys()


def test_an_epoch_sees_each_sample_once_and_the_next_in_another_order():
    taken = ids_of(first(6))
    one, other = taken[:3].flatten(), taken[3:].flatten()
    assert torch.equal(one.sort().values, torch.arange(12)) and torch.equal(other.sort().values, torch.arange(12))
    assert not torch.equal(one, other)


def test_what_does_not_fill_a_batch_waits_for_the_next_epoch():
    taken = ids_of(first(4, batch_size=5))
    for epoch in (taken[:2], taken[2:]):
        assert len(epoch.flatten().unique()) == 10
    assert len(taken.unique()) == 12  # and is not always the same


@pytest.mark.parametrize("batch_size", [None, 12])
def test_a_full_batch_keeps_its_order(batch_size):
    for ids, batch in first(3, batch_size=batch_size):
        assert torch.equal(ids, torch.arange(12)) and torch.equal(batch, X)


def test_the_seed_decides_the_order_and_the_global_generator_does_not():
    before = torch.get_rng_state()
    assert torch.equal(ids_of(first(6, seed=3)), ids_of(first(6, seed=3)))
    assert not torch.equal(ids_of(first(6, seed=3)), ids_of(first(6, seed=4)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_parts_of_all_ranks_are_the_batch_of_one_process():
    alone = first(6)
    ranks = [first(6, rank=rank, size=2) for rank in range(2)]
    for (ids, batch), *parts in zip(alone, *ranks, strict=True):
        assert all(torch.equal(ids, part_ids) for part_ids, _ in parts)
        assert torch.equal(batch, torch.cat([part for _, part in parts]))


def test_without_data_there_are_ids_alone():
    taken = first(3, None)
    assert all(batch is None for _, batch in taken)
    assert torch.equal(ids_of(taken).flatten().sort().values, torch.arange(12))


def test_a_shared_delta_has_no_rows_to_count():
    assert len(first(2, rows=None)[0][1]) == 4


@pytest.mark.parametrize(
    ("data", "rows", "found"),
    [(X, 11, r"\[11, 12\]"), ((X, Y[:5]), 12, r"\[5, 12\]"), ({"x": X, "y": Y[:1]}, None, r"\[1, 12\]")],
)
def test_unequal_numbers_of_rows_are_refused(data, rows, found):
    with pytest.raises(ValueError, match=rf"data and delta must have equally many rows.*{found}"):
        first(1, data, rows)


@pytest.mark.parametrize(
    ("batch_size", "size", "said"), [(0, 1, 0), (-1, 1, -1), (13, 1, 13), (3, 2, 3), (None, 5, 12)]
)
def test_a_batch_size_that_cannot_be_is_refused(batch_size, size, said):
    with pytest.raises(ValueError, match=rf"batch_size={said} is not allowed: 1 to 12.*a multiple of {size}"):
        first(1, batch_size=batch_size, size=size)


def test_a_loader_begins_again_and_an_iterator_ends():
    loader = DataLoader(TensorDataset(X), 4, generator=torch.Generator().manual_seed(0))
    taken = first(7, loader, rows=None, batch_size=None)
    assert all(ids is None for ids, _ in taken)
    assert all(torch.equal(taken[i][1][0], X[4 * (i % 3) : 4 * (i % 3) + 4]) for i in range(7))
    stream = iterate_batches((X[i : i + 4] for i in (0, 4)), None, None, 0, 0, 1)
    assert [batch[0, 0].item() for _, batch in stream] == [0, 8]


def test_batches_made_elsewhere_are_handed_on_as_they_are():
    made = [{"any": "thing"}, 5]
    assert [batch for _, batch in first(4, made, rows=None, batch_size=None)] == made * 2


def test_rows_of_a_namedtuple_is_one_again():
    part = select_rows(Pair(X, Y), torch.tensor([3, 1]))
    assert isinstance(part, Pair) and part.y.tolist() == [3, 1]


@pytest.mark.parametrize("data", [None, 5, "text", [], {}, (X, 3), iter([X])], ids=lambda data: type(data).__name__)
def test_what_is_not_tensors_has_none(data):
    assert row_tensors(data) is None


def test_a_list_is_a_list_of_batches():
    found = [batch for _, batch in first(3, [X[:2], X[2:5]], batch_size=None)]
    assert [len(batch) for batch in found] == [2, 3, 2]

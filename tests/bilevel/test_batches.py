from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from doubly.bilevel.batches import iterate_batches, row_tensors


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.arange(24.0).view(12, 2), torch.arange(12)


def take(count, data=X, row_count=12, batch_size=4, seed=0, rank=0, world_size=1):
    """The first `count` batches."""
    batches = iterate_batches(data, row_count, batch_size, seed, rank, world_size)
    return [next(batches) for _ in range(count)]


def ids_of(batches):
    return torch.stack([ids for ids, _ in batches])


def test_a_batch_has_the_structure_of_the_data_and_its_rows():
    for data in (X, (X, Y), {"x": X, "y": Y}, Pair(X, Y)):
        for ids, batch in take(5, data):
            assert type(batch) is type(data)
            for part, tensor in zip(row_tensors(batch), row_tensors(data), strict=True):
                assert torch.equal(part, tensor[ids])
        if isinstance(data, dict):
            assert batch.keys() == data.keys()


def test_an_epoch_sees_each_sample_once_and_the_next_in_another_order():
    ids = ids_of(take(6))
    first_epoch, second_epoch = ids[:3].flatten(), ids[3:].flatten()
    assert torch.equal(first_epoch.sort().values, torch.arange(12))
    assert torch.equal(second_epoch.sort().values, torch.arange(12))
    assert not torch.equal(first_epoch, second_epoch)


def test_rows_that_do_not_fill_a_batch_are_left_out_of_an_epoch():
    ids = ids_of(take(4, batch_size=5))
    for epoch in (ids[:2], ids[2:]):
        assert len(epoch.flatten().unique()) == 10
    assert len(ids.unique()) == 12  # and are not always the same


def test_a_full_batch_keeps_its_order():
    for batch_size in (None, 12):
        for ids, batch in take(3, batch_size=batch_size):
            assert torch.equal(ids, torch.arange(12)) and torch.equal(batch, X)


def test_the_seed_decides_the_order_and_the_global_generator_does_not():
    before = torch.get_rng_state()
    assert torch.equal(ids_of(take(6, seed=3)), ids_of(take(6, seed=3)))
    assert not torch.equal(ids_of(take(6, seed=3)), ids_of(take(6, seed=4)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_parts_of_all_ranks_are_the_batch_of_one_process():
    ranks = [take(6, rank=rank, world_size=2) for rank in range(2)]
    for (ids, batch), *parts in zip(take(6), *ranks, strict=True):
        assert all(torch.equal(ids, part_ids) for part_ids, _ in parts)
        assert torch.equal(batch, torch.cat([part for _, part in parts]))


def test_without_data_a_batch_is_its_ids_and_with_a_shared_delta_rows_of_data_alone():
    batches = take(3, None)
    assert all(batch is None for _, batch in batches)
    assert torch.equal(ids_of(batches).flatten().sort().values, torch.arange(12))
    assert len(take(1, row_count=None)[0][1]) == 4
    assert take(2, None, None) == [(None, None)] * 2


def test_batches_of_an_iterable_are_yielded_as_they_are_and_begin_again():
    loader = DataLoader(TensorDataset(X), 4, generator=torch.Generator().manual_seed(0))
    batches = take(7, loader, row_count=None, batch_size=None)
    assert all(ids is None for ids, _ in batches)
    assert all(torch.equal(batches[i][1][0], X[4 * (i % 3) : 4 * (i % 3) + 4]) for i in range(7))
    for listed in ([{"any": "thing"}, 5], [X[:2], X[2:5]]):  # a list of tensors is a list of batches too
        repeated = [batch for _, batch in take(4, listed, row_count=None, batch_size=None)]
        assert all(one is other for one, other in zip(repeated, [*listed, *listed], strict=True))
    iterator = iterate_batches((X[i : i + 4] for i in (0, 4)), None, None, 0, 0, 1)
    assert [batch[0, 0].item() for _, batch in iterator] == [0, 8]


def test_only_tensors_and_tuples_and_dicts_of_them_hold_rows():
    for data in (None, 5, "text", [], {}, (X, 3), iter([X]), [X]):
        assert row_tensors(data) is None


def test_sizes_that_do_not_fit_are_refused():
    rows, size = "data and delta must have equally many rows", "is not allowed: 1 to 12.*a multiple of"
    table = [
        ({"row_count": 11}, rf"{rows}.*\[11, 12\]"),
        ({"data": (X, Y[:5])}, rf"{rows}.*\[5, 12\]"),
        ({"data": {"x": X, "y": Y[:1]}, "row_count": None}, rf"{rows}.*\[1, 12\]"),
        ({"batch_size": 0}, f"batch_size=0 {size} 1"),
        ({"batch_size": -1}, f"batch_size=-1 {size} 1"),
        ({"batch_size": 13}, f"batch_size=13 {size} 1"),
        ({"batch_size": 3, "world_size": 2}, f"batch_size=3 {size} 2"),
        ({"batch_size": None, "world_size": 5}, f"batch_size=12 {size} 5"),
    ]
    for arguments, message in table:
        with pytest.raises(ValueError, match=message):
            take(1, **arguments)

"""Which samples a step sees: rows of tensors in memory, reshuffled each epoch, or batches that somebody else makes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_of(data: Any) -> list[Tensor] | None:
    """The tensors of `data` if it is rows in memory: one, a tuple or a dict. A list is a list of batches."""
    parts = [data] if isinstance(data, Tensor) else list(data.values()) if isinstance(data, dict) else data
    rows = isinstance(data, Tensor | dict | tuple) and all(isinstance(part, Tensor) for part in parts)
    return list(parts) if rows and parts else None


def rows_of(data: Any, ids: Tensor) -> Any:
    """The same structure with the rows `ids` of each tensor."""
    if isinstance(data, Tensor):
        return data[ids.to(data.device)]
    if isinstance(data, dict):
        return {name: rows_of(part, ids) for name, part in data.items()}
    parts = [rows_of(part, ids) for part in data]
    return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)


def batches(
    data: Any, count: int | None, batch_size: int | None, seed: int, rank: int, size: int
) -> Iterator[tuple[Tensor | None, Any]]:
    """(ids of the global batch, this rank's part of it), without end; ids are None for batches made elsewhere.

    `count` is the number of rows that delta has, if it has one per sample.
    """
    tensors = tensors_of(data)
    if data is not None and tensors is None:
        if hasattr(data, "__array__") or batch_size is not None:
            raise TypeError(
                "data must be a tensor, a tuple or a dict of tensors to be cut to batches (torch.as_tensor makes one); "
                "an iterable of batches has no batch_size"
            )
        yield from _made_elsewhere(data)
        return
    if data is None and count is None:  # one problem for a shared delta
        while True:
            yield None, None
    counts = {len(part) for part in tensors or []} | ({count} if count is not None else set())
    if len(counts) != 1:
        raise ValueError(f"data and delta must have equally many rows, one per sample; got {sorted(counts)}")
    total = counts.pop()
    batch_size = total if batch_size is None else batch_size
    if not 0 < batch_size <= total or batch_size % size:
        raise ValueError(
            f"batch_size={batch_size} is not allowed: 1 to {total}, the number of samples, and a multiple of {size}, "
            "the number of processes"
        )
    part = batch_size // size
    mine = slice(rank * part, (rank + 1) * part)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.arange(total) if batch_size == total else torch.randperm(total, generator=generator)
        for ids in order[: total - total % batch_size].view(-1, batch_size):
            yield ids, None if data is None else rows_of(data, ids[mine])


def _made_elsewhere(data: Any) -> Iterator[tuple[None, Any]]:
    while True:
        empty = True
        for batch in data:
            empty = False
            yield None, batch
        if empty:  # an iterator that has ended; a loader begins again
            return

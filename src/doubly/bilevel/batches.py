"""The batches that `minimize` steps through: rows of tensors in memory, or batches from an iterable."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def row_tensors(data: Any) -> list[Tensor] | None:
    """List the tensors of data that is held in memory as rows.

    Args:
        data: Anything that `minimize` accepts as data.

    Returns:
        The tensors of a tensor, a tuple or a dict of tensors; None for anything else, such as a list of batches.
    """
    tensors = [data] if isinstance(data, Tensor) else list(data.values()) if isinstance(data, dict) else data
    has_rows = isinstance(data, Tensor | dict | tuple) and all(isinstance(tensor, Tensor) for tensor in tensors)
    return list(tensors) if has_rows and tensors else None


def select_rows(data: Any, ids: Tensor) -> Any:
    """Select rows of each tensor.

    Args:
        data: A tensor, a tuple, a named tuple or a dict of tensors.
        ids: Positions of the rows, (B,).

    Returns:
        The same structure with the selected rows.
    """
    if isinstance(data, Tensor):
        return data[ids.to(data.device)]
    if isinstance(data, dict):
        return {name: select_rows(tensor, ids) for name, tensor in data.items()}
    tensors = [select_rows(tensor, ids) for tensor in data]
    return type(data)(*tensors) if hasattr(data, "_fields") else tuple(tensors)


def iterate_batches(
    data: Any, row_count: int | None, batch_size: int | None, seed: int, rank: int, world_size: int
) -> Iterator[tuple[Tensor | None, Any]]:
    """Yield batches without end, or until an iterator of batches is exhausted.

    Args:
        data: Tensors of equally many rows, an iterable of batches, or None.
        row_count: Number of rows of delta; None if all samples share one delta.
        batch_size: Rows in a batch, over all processes; None takes all rows.
        seed: Decides the order of the rows, which is new in each epoch.
        rank: Number of this process.
        world_size: Number of processes.

    Yields:
        The positions of the rows of the global batch, None for batches from an iterable; and this process's part.

    Raises:
        TypeError: If `data` is an array, or an iterable of batches that `batch_size` cannot apply to.
        ValueError: If numbers of rows differ, or `batch_size` is out of range or not divisible by `world_size`.
    """
    tensors = row_tensors(data)
    if data is not None and tensors is None:
        if hasattr(data, "__array__") or batch_size is not None:
            raise TypeError(
                "data must be a tensor, a tuple or a dict of tensors to be cut to batches (torch.as_tensor makes one); "
                "an iterable of batches has no batch_size"
            )
        yield from _repeat(data)
        return
    if data is None and row_count is None:  # one problem for a shared delta
        while True:
            yield None, None
    total, batch_size = _check_sizes(tensors or [], row_count, batch_size, world_size)
    part_size = batch_size // world_size
    part_rows = slice(rank * part_size, (rank + 1) * part_size)
    generator = torch.Generator().manual_seed(int(seed))
    while True:
        order = torch.arange(total) if batch_size == total else torch.randperm(total, generator=generator)
        for ids in order[: total - total % batch_size].view(-1, batch_size):
            yield ids, None if data is None else select_rows(data, ids[part_rows])


def _check_sizes(
    tensors: list[Tensor], row_count: int | None, batch_size: int | None, world_size: int
) -> tuple[int, int]:
    """Return the number of rows and the size of a batch, once they are known to fit together."""
    if any(tensor.dim() == 0 or tensor.layout is not torch.strided for tensor in tensors):
        raise ValueError("data must be dense, with one row per sample, got another tensor: pass tensors (rows, …)")
    row_counts = {len(tensor) for tensor in tensors} | ({row_count} if row_count is not None else set())
    if len(row_counts) != 1:
        raise ValueError(f"data and delta must have equally many rows, one per sample; got {sorted(row_counts)}")
    total = row_counts.pop()
    batch_size = total if batch_size is None else batch_size
    if not 0 < batch_size <= total or batch_size % world_size:
        raise ValueError(
            f"batch_size={batch_size} is not allowed: 1 to {total}, the number of samples, and a multiple of "
            f"{world_size}, the number of processes"
        )
    return total, batch_size


def _repeat(batches: Any) -> Iterator[tuple[None, Any]]:
    """Yield the batches of an iterable again and again; an iterator that is exhausted ends it."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield None, batch
        if empty:
            return

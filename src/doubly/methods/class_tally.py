"""Sums per class over an epoch, for methods that follow how the classes fared in the epoch before.

A tally is (rows, classes) in float64; its last row counts images. The state of a method has three entries of it:
`tally` of this epoch, `previous` of the last one that was complete, and `epoch`.
"""

import torch
from torch import Tensor

from doubly.types import State


def empty_tally(rows: int, counts: Tensor) -> State:
    """Return the entries before the first batch.

    Args:
        rows: Number of sums per class, the images included.
        counts: Number of training images per class.
    """
    zeros = torch.zeros(rows, len(counts), dtype=torch.float64, device=counts.device)
    return {"tally": zeros, "previous": zeros.clone(), "epoch": torch.zeros_like(counts[0])}


def tally_at(state: State, epoch: int) -> State:
    """Return the state at a batch of this epoch.

    When an epoch begins, its tally is empty and that of the epoch before becomes `previous`; a class that had no images
    in it keeps its column of an earlier one.
    """
    tally, previous = state["tally"], state["previous"]
    now = torch.full_like(state["epoch"], epoch)
    same_epoch = now == state["epoch"]
    finished = torch.where(tally[-1] > 0, tally, previous)
    return {
        **state,
        "tally": torch.where(same_epoch, tally, 0.0),
        "previous": torch.where(same_epoch, previous, finished),
        "epoch": now,
    }


def add_to_tally(state: State, values: Tensor, y: Tensor) -> State:
    """Return the state with the values of samples, (B, rows - 1), added to the columns of their classes."""
    values = torch.cat([values.double(), torch.ones_like(values[:, :1], dtype=torch.float64)], 1)
    return {**state, "tally": state["tally"].index_add(1, y, values.T)}


def class_means(tally: Tensor) -> Tensor:
    """Return the mean of each row but the last for each class, (rows - 1, classes); 0 for classes without images."""
    return tally[:-1] / tally[-1].clamp_min(1)

"""Parts of a batch that are processed one after another where the whole batch does not fit into memory."""

import torch
from torch import Tensor

from doubly.distributed.collectives import Communicator
from doubly.seeding import Rows


class WholeBatch(Communicator):
    """The communicator of one microbatch whose whole batch is known: gathering returns the values of that batch."""

    def __init__(self, all_values: Tensor) -> None:
        self.all_values = all_values

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values of the whole batch, over all microbatches and processes."""
        return self.all_values


def microbatch_sizes(count: int, max_size: int | None) -> list[int]:
    """Return the sizes of as few, nearly equal microbatches as will do.

    Batch norm cannot normalize a single image, so there is no microbatch of one unless `max_size` is 1.

    Args:
        count: Images in the batch of this process.
        max_size: Most images at a time; None takes all at once.
    """
    parts = -(-count // (max_size or count))
    parts = parts if max_size == 1 else max(1, min(parts, count // 2))
    return [len(part) for part in torch.tensor_split(torch.arange(count), parts)]


def microbatch_rows(rows: Rows, sizes: list[int]) -> list[Rows]:
    """Return where the rows of each microbatch lie in the global batch, given those of this process."""
    starts = [rows.start + sum(sizes[:part]) for part in range(len(sizes))]
    return [Rows(start, rows.total) for start in starts]

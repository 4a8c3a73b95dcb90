"""Collective operations of the processes that work on one run.

A `Communicator` is passed to whatever needs one. The base class is that of a single process: every operation returns
what it was given. `ProcessGroup` is the same over torch.distributed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from doubly.errors import ProcessLost, UsageError
from doubly.seeding import Rows

T = TypeVar("T")


class Communicator:
    """A single process.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def rows(self, count: int) -> Rows:
        """Return where the `count` rows of this process lie in the global batch; every process has equally many."""
        return Rows(self.rank * count, self.world_size * count)

    def share(self, count: int) -> tuple[int, int]:
        """Return (first, end) of this process's share of `count` rows that may not divide evenly."""
        return count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values of all processes, concatenated in the order of the ranks.

        Every process must bring equally many rows. The result has no gradient.
        """
        return values

    def assemble(self, part: Tensor, start: int, total: int) -> Tensor:
        """Return `total` rows, of which this process passes those from `start` on, and the other processes the rest."""
        return part

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over the processes, with one exchange for all tensors."""
        return list(tensors)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the processes; it can be differentiated, also twice."""
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of every process with those of the first."""

    def all_gather_text(self, text: str) -> list[str]:
        """Return a text of each process."""
        return [text]

    def broadcast_value(self, value: T) -> T:
        """Return the first process's value on every process; anything that JSON can hold."""
        return value

    def barrier(self) -> None:
        """Wait until every process has called this."""
        self.broadcast_value(None)

    def require_equal(self, name: str, value: str, remedy: str) -> None:
        """Check that every process has the same value.

        Args:
            name: What the value is, for the message.
            value: This process's value.
            remedy: What to do about a difference, for the message.

        Raises:
            UsageError: If a process has another value than the first; all processes raise it.
        """
        values = self.all_gather_text(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                start = max(0, _first_difference(other, values[0]) - 20)
                raise UsageError(
                    f"process {rank} has other {name} than process 0 (…{other[start:]:.60}… and "
                    f"…{values[0][start:]:.60}…): {remedy}"
                )

    def average_gradients(
        self, parameters: Iterable[Tensor], buffers: Sequence[Tensor] = (), flags: Sequence[bool] = ()
    ) -> list[bool]:
        """Average gradients over the processes in one exchange, and with them the buffers and flags of a step.

        Args:
            parameters: Tensors whose `.grad` is replaced by its mean over the processes.
            buffers: Floating point tensors that are averaged in place as well.
            flags: Flags of this process, such as a request to stop.

        Returns:
            For each flag whether any process set it.
        """
        return list(flags)


SINGLE_PROCESS = Communicator()


class ProcessGroup(Communicator):
    """The processes of torch.distributed's default group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        _exchange(dist.all_gather, parts, values.detach().contiguous())
        return torch.cat(parts)

    def assemble(self, part: Tensor, start: int, total: int) -> Tensor:
        rows = part.new_zeros(total, *part.shape[1:])
        rows[start : start + len(part)] = part
        _exchange(dist.all_reduce, rows)
        return rows

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        _exchange(dist.all_reduce, flat)
        flat /= self.world_size
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def sum(self, values: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
        return total

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            contiguous = tensor.detach().contiguous()
            _exchange(dist.broadcast, contiguous, 0)
            tensor.detach().copy_(contiguous)

    def all_gather_text(self, text: str) -> list[str]:
        encoded = text.encode()
        lengths = self.all_gather(torch.tensor([len(encoded)])).tolist()
        padded = torch.zeros(1, max(1, *lengths), dtype=torch.uint8)
        padded[0, : len(encoded)] = torch.frombuffer(bytearray(encoded) or bytearray(1), dtype=torch.uint8)[
            : len(encoded)
        ]
        texts = self.all_gather(padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(texts, lengths, strict=True)]

    def broadcast_value(self, value: T) -> T:
        first: T = json.loads(self.all_gather_text(json.dumps(value) if self.rank == 0 else "")[0])
        return first

    def average_gradients(
        self, parameters: Iterable[Tensor], buffers: Sequence[Tensor] = (), flags: Sequence[bool] = ()
    ) -> list[bool]:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return list(flags)
        dtype = gradients[0].dtype
        flag_values = gradients[0].new_tensor([float(flag) for flag in flags])
        *averages, flag_shares = self.mean([*gradients, *(buffer.to(dtype) for buffer in buffers), flag_values])
        for tensor, average in zip((*gradients, *buffers), averages, strict=True):
            tensor.copy_(average)
        return [share > 0 for share in flag_shares.tolist()]


class _Sum(torch.autograd.Function):
    """The sum over all processes, whose backward pass sums up the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.detach().clone(memory_format=torch.contiguous_format)
        _exchange(dist.all_reduce, total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The value of one process enters the sums of all, so its gradient is the sum of theirs.
        return _Sum.apply(gradients[0])  # type: ignore[no-untyped-call]


def _exchange(collective: Callable[..., Any], *arguments: Any) -> None:
    try:
        collective(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # whatever the backend raises when a process does not answer
        raise ProcessLost(str(error).splitlines()[0]) from None


def _first_difference(a: str, b: str) -> int:
    return next((k for k, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), 0)

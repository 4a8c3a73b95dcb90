"""The protocol by which `minimize` talks to the other processes that work on the same problem."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Communicator(Protocol):
    """Collective operations of several processes; an object with these members can be passed to `minimize`.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
    """

    rank: int
    world_size: int

    def all_gather(self, values: Tensor) -> Tensor:
        """Concatenate the rows of all processes.

        Args:
            values: Rows of this process; every process passes equally many.

        Returns:
            The rows of all processes in the order of their ranks, without a gradient.
        """
        ...

    def average_gradients(self, parameters: Iterable[Tensor]) -> object:
        """Replace the `.grad` of each tensor by its mean over the processes.

        Args:
            parameters: The same tensors, in the same order, on every process.

        Returns:
            Anything; `minimize` ignores it.
        """
        ...


class SingleProcess:
    """The communicator of a process that works alone: every operation leaves its argument as it is.

    Attributes:
        rank: 0.
        world_size: 1.
    """

    rank: int = 0
    world_size: int = 1

    def all_gather(self, values: Tensor) -> Tensor:
        """Return `values` as they are."""
        return values

    def average_gradients(self, parameters: Iterable[Tensor]) -> object:
        """Leave the gradients of `parameters` as they are, and return None."""
        return None

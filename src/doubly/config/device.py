"""The device of a run or an evaluation."""

import torch

from doubly.distributed import Communicator
from doubly.distributed.launch import local_rank
from doubly.errors import UsageError


def select_device(name: str, communicator: Communicator) -> torch.device:
    """Return the device of this process.

    Args:
        name: auto (CUDA if there is one), cpu, cuda, cuda:1, …
        communicator: The processes; each takes a GPU of its own.

    Raises:
        UsageError: If there is no such device, or no GPU for this process.
    """
    if name == "auto":
        return _gpu_of_process(communicator) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device '{name}' is not available here ({str(error).splitlines()[0]}): use auto or cpu"
        ) from None
    return device


def _gpu_of_process(communicator: Communicator) -> torch.device:
    if communicator.world_size == 1:
        return torch.device("cuda")
    if local_rank() >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank()} of this machine has no GPU of its own, there are {torch.cuda.device_count()}: "
            "start at most so many processes per machine, or take --device cpu"
        )
    return torch.device("cuda", local_rank())

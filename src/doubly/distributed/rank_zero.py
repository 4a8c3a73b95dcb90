"""Work of the first process only, and errors that all processes share."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from doubly.distributed.collectives import Communicator
from doubly.errors import NonFiniteError, ProcessLost, UsageError

T = TypeVar("T")
_SHARED_ERRORS = {kind.__name__: kind for kind in (UsageError, NonFiniteError)}
_VERY_LONG = timedelta(days=365)


def run_together(communicator: Communicator, work: Callable[[], T], *, patient: bool = False) -> T:
    """Let each process do its own work; if it is refused on one, all processes raise that error.

    Args:
        communicator: The processes.
        work: Called once on every process. It must not use the communicator.
        patient: Whether some processes may need hours longer than others, more than the usual timeout.

    Returns:
        What `work` returned on this process.

    Raises:
        UsageError, NonFiniteError: As raised by `work` on this process, or else on the first that raised.
        ProcessLost: If a process ended meanwhile.
    """
    error: UsageError | NonFiniteError | None = None
    several = communicator.world_size > 1
    group = dist.new_group(backend="gloo", timeout=_VERY_LONG) if patient and several else None
    try:
        result = work()
    except (UsageError, NonFiniteError) as refusal:
        error = refusal
    if group is not None:
        try:
            dist.barrier(group)
            dist.destroy_process_group(group)
        except RuntimeError as lost:
            raise ProcessLost(str(lost).splitlines()[0]) from None
    messages = communicator.all_gather_text("" if error is None else f"{type(error).__name__}:{error}")
    if error is not None:
        raise error
    for kind, _, message in (text.partition(":") for text in messages if text):
        raise _SHARED_ERRORS[kind](message)
    return result


def on_rank_zero(communicator: Communicator, work: Callable[[], object], *, patient: bool = False) -> None:
    """Do `work` on the first process only; if it is refused there, all processes raise that error."""
    run_together(communicator, lambda: work() if communicator.is_first else None, patient=patient)

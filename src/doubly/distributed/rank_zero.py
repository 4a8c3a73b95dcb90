"""An evaluation's work, shared out among the processes of a run; each function is what it is without on one process."""

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from doubly.distributed import collectives as parallel
from doubly.errors import NonFiniteError, ProcessLost, UsageError

T = TypeVar("T")
_SAID = {kind.__name__: kind for kind in (UsageError, NonFiniteError)}
_LONG = timedelta(days=365)


def share(count: int) -> tuple[int, int]:
    """Which of `count` rows are this process's: (first, end)."""
    rank, processes = parallel.world()
    return count * rank // processes, count * (rank + 1) // processes


def together(work: Callable[[], T], patiently: bool = False) -> T:
    """Each process does its own work; where one has a sentence to say to the user, all end with it.

    `patiently`: the others may need hours more, longer than processes usually wait for each other.
    """
    problem: UsageError | NonFiniteError | None = None
    several = patiently and parallel.world()[1] > 1
    waiting = dist.new_group(backend="gloo", timeout=_LONG) if several else None
    try:
        done = work()
    except (UsageError, NonFiniteError) as found:
        problem = found
    if waiting is not None:
        _wait(waiting)
    said = parallel.everybodys("" if problem is None else f"{type(problem).__name__}:{problem}")
    if problem is not None:
        raise problem
    for kind, _, sentence in (each.partition(":") for each in said if each):
        raise _SAID[kind](sentence)
    return done


def first(work: Callable[[], None]) -> None:
    """Do it on the first process only; where that fails, all fail, with its sentence."""
    together(lambda: work() if parallel.world()[0] == 0 else None)


def _wait(group: Any) -> None:
    try:
        dist.barrier(group)
        dist.destroy_process_group(group)
    except RuntimeError as problem:
        raise ProcessLost(str(problem).splitlines()[0]) from None


def known_to_all(
    known: Mapping[int, dict[str, Any]], examples: Mapping[int, Tensor], size: int, like: Tensor
) -> tuple[dict[int, dict[str, Any]], dict[int, Tensor]]:
    """The states of all chunks, of `size` images each, and all examples, in the order of the chunks.

    `like`: images, of which there may be none, of the shape and type that the examples have.
    """
    if parallel.world()[1] == 1:
        return dict(known), dict(examples)
    states = [json.loads(text) for text in parallel.everybodys(json.dumps(dict(known)))]
    rows = [json.loads(text) for text in parallel.everybodys(json.dumps(list(examples)))]
    first = sum(map(len, rows[: parallel.world()[0]]))
    own = torch.stack(list(examples.values())) if examples else like[:0]
    images = parallel.assembled(own, first, sum(map(len, rows)))
    listed = sorted(zip(chain(*rows), images, strict=True), key=lambda pair: pair[0] // size)  # stable within a chunk
    return {int(index): state for each in states for index, state in each.items()}, dict(listed)

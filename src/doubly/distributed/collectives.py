"""What several processes have to agree on. Each function is the identity on one process.

`world` is what the code around should take itself to be. It is usually this process's place among those that `torchrun`
started; but inside `alone` a process works by itself, inside `rows` on some rows of a batch whose draws are made for
the whole, and inside a turn of `Turns` on a part of its own batch, as if each part had a process of its own.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from doubly.errors import ProcessLost, UsageError

T = TypeVar("T")


class Turns:
    """Parts of one batch that take turns as the processes of a larger world would work side by side.

    What a part gathers is known once all parts have come to that point. So a part that asks for what is not known yet
    is abandoned there (`Waiting`), and all parts are begun anew with the answer; see training/accumulation.py.
    """

    class Waiting(Exception):  # noqa: N818  # not an error
        """Abandons a part until the others have come as far."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.known = sizes, list[Tensor]()
        self.brought: list[Tensor] = []
        self.total: Tensor | None = None
        self.part = self.asked = 0

    @contextmanager
    def turn(self, part: int) -> Iterator[None]:
        self.part, self.asked = part, 0
        with _as(self):
            yield

    def gather(self, values: Tensor) -> Tensor:
        return self._known(lambda: self.brought.append(values.detach()))

    def mean(self, values: Tensor) -> Tensor:
        """Summed up as they come: gradients of all parts side by side would not fit."""
        own = values.detach() * (self.sizes[self.part] / sum(self.sizes))
        return self._known(lambda: setattr(self, "total", own if self.total is None else self.total + own))

    def _known(self, bring: Callable[[], None]) -> Tensor:
        self.asked += 1
        if self.asked > len(self.known):
            bring()
            raise Turns.Waiting
        return self.known[self.asked - 1]

    def answer(self) -> None:
        """All parts have brought their values: now they are known, with those of the other processes."""
        self.known.append(_gather(torch.cat(self.brought)) if self.total is None else _mean(self.total))
        self.brought, self.total = [], None


@dataclass(frozen=True)
class _Alone:
    """One process, that draws for so many rows and takes those from `start` on."""

    start: int = 0
    rows: int | None = None


_view: ContextVar[Turns | _Alone | None] = ContextVar("view", default=None)


@contextmanager
def _as(view: Turns | _Alone) -> Iterator[None]:
    token = _view.set(view)
    try:
        yield
    finally:
        _view.reset(token)


def alone() -> Any:
    """Inside, this process is the only one: for what all of them do alike."""
    return _as(_Alone())


def rows(start: int, of: int) -> Any:
    """Inside, this process works by itself on rows of a batch of `of`, whose draws are made for all of it."""
    return _as(_Alone(start, of))


def processes() -> tuple[int, int]:
    """(rank, number) of the processes themselves, whatever view is taken of them."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def world() -> tuple[int, int]:
    """(rank, number of processes)"""
    view, (rank, size) = _view.get(), processes()
    if isinstance(view, Turns):
        return rank * len(view.sizes) + view.part, size * len(view.sizes)
    return (0, 1) if view is not None else (rank, size)


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [0,1), drawn for the global batch on the CPU and sliced by rank: alike at any number of processes."""
    view, (rank, size), count = _view.get(), processes(), like.shape[0]
    start, total = rank * count, size * count
    if isinstance(view, Turns):
        own = sum(view.sizes)
        start, total = rank * own + sum(view.sizes[: view.part]), size * own
    elif view is not None:
        start, total = view.start, count if view.rows is None else view.rows
    drawn = torch.rand(total, *like.shape[1:], generator=generator)
    return drawn[start : start + count].to(like.device, like.dtype)


def gather(values: Tensor) -> Tensor:
    """The values of all ranks, rank by rank; every rank must bring equally many."""
    view = _view.get()
    if isinstance(view, Turns):
        return view.gather(values)
    return values if view is not None else _gather(values)


def _gather(values: Tensor) -> Tensor:
    size = processes()[1]
    if size == 1:
        return values
    parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(size)]
    _reached(dist.all_gather, parts, values.contiguous())
    return torch.cat(parts)


def assembled(part: Tensor, start: int, of: int) -> Tensor:
    """The rows of all ranks, of which this one has those from `start` on, or none; each row is one rank's."""
    if world()[1] == 1:
        return part
    whole = part.new_zeros(of, *part.shape[1:])
    whole[start : start + len(part)] = part
    _reached(dist.all_reduce, whole)
    return whole


def mean(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of each tensor, over the samples of all ranks, each of which brings the mean of its own; one exchange for all."""
    if world()[1] == 1:
        return list(tensors)
    flat, view = torch.cat([tensor.flatten() for tensor in tensors]), _view.get()
    flat = view.mean(flat) if isinstance(view, Turns) else _mean(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _mean(own: Tensor) -> Tensor:
    """Over the processes, in place."""
    if processes()[1] > 1:
        _reached(dist.all_reduce, own)
        own /= processes()[1]
    return own


def of_mean_one(log_weights: Tensor) -> Tensor:
    """exp(log_weights), scaled to a mean of 1 over the samples of all ranks; also where all of them would underflow."""
    everyone = gather(log_weights)
    largest = everyone.max()
    return (log_weights - largest).exp() / (everyone - largest).exp().mean()


def average_gradients(
    parameters: Iterable[nn.Parameter], statistics: Sequence[Tensor] = (), wishes: Sequence[bool] = ()
) -> list[bool]:
    """One exchange of all gradients, flattened, and with them of what else a step has to agree on.

    `statistics` are averaged in place like the gradients; of each wish it returns whether anybody has it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world()[1] == 1 or not gradients:
        return list(wishes)
    asked = gradients[0].new_tensor([float(wish) for wish in wishes])
    *averages, asked = mean([*gradients, *(part.to(gradients[0].dtype) for part in statistics), asked])
    for tensor, average in zip((*gradients, *statistics), averages, strict=True):
        tensor.copy_(average)
    return [share > 0 for share in asked.tolist()]


def total(values: Tensor) -> Tensor:
    """The sum over the ranks, which may be differentiated, and twice; for networks whose layers speak to each other."""
    return values if processes()[1] == 1 else _Total.apply(values)  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        found = values.detach().clone(memory_format=torch.contiguous_format)
        _reached(dist.all_reduce, found)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        # What one rank put in reaches the sums of all, so the gradients of all come back to it.
        return _Total.apply(upstream[0])  # type: ignore[no-untyped-call]


def from_first(tensors: Iterable[Tensor]) -> None:
    """Give every rank the tensors of the first, in place."""
    if world()[1] > 1:
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            _reached(dist.broadcast, whole, 0)
            tensor.detach().copy_(whole)


def everybodys(text: str) -> list[str]:
    """A text of each rank."""
    if world()[1] == 1:
        return [text]
    own = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    lengths = gather(torch.tensor([len(text.encode())]))
    padded = torch.zeros(1, max(1, int(lengths.max())), dtype=torch.uint8)
    padded[0, : len(own)] = own
    found = gather(padded)
    return [bytes(found[k, :n].tolist()).decode() for k, n in enumerate(lengths.tolist())]


def same(value: T) -> T:
    """The first rank's value, on every rank; anything that JSON can say."""
    found: T = json.loads(everybodys(json.dumps(value))[0]) if world()[1] > 1 else value
    return found


def agree(what: str, value: str, remedy: str) -> None:
    """Refuse to go on where a rank has another value than the first."""
    values = everybodys(value)
    others = [k for k, theirs in enumerate(values) if theirs != values[0]]
    if others:
        theirs, ours = values[others[0]], values[0]
        alike = next((k for k, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
        start = max(0, alike - 20)  # long texts differ somewhere inside
        raise UsageError(
            f"process {others[0]} has other {what} than process 0 (…{theirs[start:]:.60}… and …{ours[start:]:.60}…): "
            f"{remedy}"
        )


def _reached(exchange: Callable[..., Any], *given: Any) -> None:
    try:
        exchange(*given)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:  # whatever the backend raises when nobody answers
        raise ProcessLost(str(problem).splitlines()[0]) from None

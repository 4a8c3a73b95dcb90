"""A network as attacks call it: any number of images in, logits out, and a count of what passed.

`Plain` is bit for bit what they would have called themselves. `FewShapes` is the same function faster: images with
channels last, in pieces that fit the cache, the last one filled up to a multiple of 16, so that whatever number of
samples still stands, the network is compiled once. `WholeBatch` is for training mode, where samples see each other.

Compiled networks have first derivatives only. So nobody is handed one but attacks, through `attacked`, and only of the
very network that `fast` names.
"""

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

ROWS = {"cpu": 64, "cuda": 512}  # images in a piece: on a CPU the activations of more leave the cache
MULTIPLE = 16  # of the rows in a piece: torch convolves fewer in another way, so a network would be compiled once more
AGREES = 1e-3  # relative, of logits and input gradients: a compiled network that is further off is not used
JUMPS = 50.0  # times further off may be all samples together
ROUGHLY = 5e-2  # the same where the network answers in half precision

Mode = Literal["eval", "train"]
Backend = str | Callable[..., Any]  # of torch.compile


class Forward(Protocol):
    def __call__(self, x: Tensor, /) -> Tensor: ...


class Plain:
    """The network itself, counting."""

    compiled = False

    def __init__(self, model: nn.Module, passed: Callable[[int, bool], None] = lambda rows, graph: None) -> None:
        self.model, self.passed = model, passed

    def __call__(self, x: Tensor) -> Tensor:
        self.passed(len(x), torch.is_grad_enabled() and x.requires_grad)
        return connected(self.model(x), x).clone()  # Square writes into the logits, which may be a network's own buffer


class FewShapes:
    """At most `rows` images at a time through a compiled network, the last piece filled up with copies."""

    compiled = True

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        passed: Callable[[int, bool], None] = lambda rows, graph: None,
        backend: Backend = "inductor",
    ) -> None:
        self.model, self.rows, self.passed = model, rows, passed
        self.run = _compiling(model, backend)

    def __call__(self, x: Tensor) -> Tensor:
        self.passed(len(x), torch.is_grad_enabled() and x.requires_grad)
        if len(x) == 0:
            return connected(self.model(x), x)
        return connected(torch.cat([self.run(_filled(piece))[: len(piece)] for piece in torch.split(x, self.rows)]), x)


class WholeBatch:
    """All images at once through a compiled network: for one that uses the statistics of the batch."""

    def __init__(self, model: nn.Module, backend: Backend = "inductor") -> None:
        self.model, self.run = model, _compiling(model, backend)

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = (self.run if len(x) >= MULTIPLE else self.model)(x)
        return connected(logits, x)


def _compiling(model: nn.Module, backend: Backend) -> Callable[[Tensor], Tensor]:
    """For any number of images. Of `forward`, so that a hook that comes and goes does not compile it anew.

    torch counts how often it compiled a piece of code, of whatever network, and gives up: so each gets code of its own.
    """

    def forward(x: Tensor) -> Any:
        return model.forward(x)

    own = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    run: Any = torch.compile(own, backend=backend)

    def marked(x: Tensor) -> Any:
        x = x[:]  # the mark stays on this view
        torch._dynamo.mark_dynamic(x, 0)
        return run(x)

    return marked


_FAST: ContextVar[tuple[nn.Module, Mapping[Mode, Forward]] | None] = ContextVar("fast", default=None)


@contextmanager
def fast(model: nn.Module, twins: Mapping[Mode, Forward]) -> Iterator[None]:
    """Inside, attacks on this very network, and on no other, call its twin of their mode where there is one."""
    token = _FAST.set((model, twins))
    try:
        yield
    finally:
        _FAST.reset(token)


def forward_of(model: nn.Module, mode: Mode) -> Forward:
    """What an attack calls: the twin, or the network. Twins pass by the network's hooks, so where it has some, it."""
    found, hooks = _FAST.get(), model._forward_hooks or model._forward_pre_hooks
    if found is None or found[0] is not model or hooks or model.training != (mode == "train"):
        return model
    return found[1].get(mode, model)


def connected(logits: Tensor, x: Tensor) -> Tensor:
    """Logits that do not depend on the image still have a gradient: zero."""
    if torch.is_grad_enabled() and x.requires_grad and not logits.requires_grad:
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)
    return logits


def _filled(piece: Tensor) -> Tensor:
    missing = -len(piece) % MULTIPLE
    if missing:
        piece = torch.cat([piece, piece[-1:].detach().expand(missing, *piece.shape[1:])])
    return piece.contiguous(memory_format=torch.channels_last)


def can_compile(device: torch.device) -> bool:
    return device.type != "cpu" or any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl"))


def compiled(model: nn.Module, x: Tensor, rows: int | None = None) -> tuple[FewShapes | None, str]:
    """A compiled network for images like `x`, and a line about it; None where it cannot be had or does not agree.

    The model must be as it will be called: in evaluation mode, with frozen parameters.
    """
    return _checked(lambda: FewShapes(model, rows or _rows(x)), model, x, (_slope, _logits))


def twin(model: nn.Module, x: Tensor, mode: Mode, backend: Backend = "inductor") -> tuple[Forward | None, str]:
    """The same for attacks that are made of input gradients, in either mode; compiled once.

    The model must be as it will be called: inside `attacked` with that mode, and under the same autocast.
    """
    if mode == "train":
        return _checked(lambda: WholeBatch(model, backend), model, x, (_slope,))
    rows = _rows(x)
    return _checked(lambda: FewShapes(model, rows, backend=backend), model, x[: rows + MULTIPLE // 2], (_slope,))


def _rows(x: Tensor) -> int:
    return ROWS.get(x.device.type, 256)


Way = Callable[[Forward, Tensor], list[Tensor]]
Twin = TypeVar("Twin", bound=Forward)


def _checked(make: Callable[[], Twin], model: nn.Module, x: Tensor, ways: tuple[Way, ...]) -> tuple[Twin | None, str]:
    begun, plain = time.perf_counter(), Plain(model)
    try:
        with warnings.catch_warnings(action="ignore"):  # the compiler's remarks on its own libraries
            made = make()
            pairs = [pair for way in ways for pair in zip(way(made, x), way(plain, x), strict=True)]
        difference = max(_difference(ours, theirs) for ours, theirs in pairs)
        half = any(theirs.dtype.itemsize < 4 for _, theirs in pairs)
    except Exception as problem:  # whatever the compiler raises about somebody's network
        return None, f"not compiled: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0]:.120}"
    if not difference <= (ROUGHLY if half else AGREES):
        return None, f"not compiled: the compiled network differs by {difference:.2g} from the network itself"
    return made, f"compiled in {time.perf_counter() - begun:.0f} s"


def _logits(forward: Forward, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [forward(x)]


def _slope(forward: Forward, x: Tensor) -> list[Tensor]:
    """Logits and input gradient, of one pass.

    Each logit counts in its own measure: a sum alone is hardly moved where batch norm takes the batch's mean away.
    """
    with torch.enable_grad():
        point = x.detach().clone().requires_grad_()
        logits = forward(point)
        measure = torch.arange(logits.numel(), device=x.device).cos().view_as(logits)
        return [logits.detach(), torch.autograd.grad((measure * logits).sum(), point)[0]]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative, of the middle sample; of all together where that is much.

    A unit at its kink may turn with the last bit, and then the gradient of that sample jumps: no reason to refuse.
    """
    error, size = (part.float().flatten(1).norm(dim=1) for part in (ours - theirs, theirs))
    whole = error.norm() / size.norm().clamp_min(1e-12)
    return float(torch.maximum((error / size.clamp_min(1e-12)).median(), whole / JUMPS))

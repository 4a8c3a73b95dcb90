"""A network as the reference attacks call it: any number of images in, logits out, and a count of what passed.

`Plain` is bit for bit what they would have called themselves. `FewShapes` is the same function faster: images with
channels last, in pieces that fit the cache, the last one filled up to a multiple of 8, so that whatever number of
samples still stands, the network is compiled once.
"""

import shutil
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

ROWS = {"cpu": 64, "cuda": 512}  # images in a piece: on a CPU the activations of more leave the cache
MULTIPLE = 8  # of the rows in a piece: a compiled network treats a single row as a case of its own
AGREES = 1e-3  # relative, of logits and input gradients: a compiled network that is further off is not used


class Forward(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


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
        self, model: nn.Module, rows: int, passed: Callable[[int, bool], None] = lambda rows, graph: None
    ) -> None:
        self.rows, self.passed = rows, passed
        self.run: Any = torch.compile(model, dynamic=True)

    def __call__(self, x: Tensor) -> Tensor:
        self.passed(len(x), torch.is_grad_enabled() and x.requires_grad)
        return connected(torch.cat([self.run(_filled(piece))[: len(piece)] for piece in torch.split(x, self.rows)]), x)


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
    begun = time.perf_counter()
    plain = Plain(model)
    try:
        with warnings.catch_warnings(action="ignore"):  # the compiler's remarks on its own libraries
            fast = FewShapes(model, rows or ROWS.get(x.device.type, 256))
            pairs = ((_logits(fast, x), _logits(plain, x)), (_slope(fast, x), _slope(plain, x)))
        difference = max(_difference(ours, theirs) for ours, theirs in pairs)
    except Exception as problem:  # whatever the compiler raises about somebody's network
        return None, f"not compiled: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0]:.120}"
    if not difference <= AGREES:
        return None, f"not compiled: the compiled network differs by {difference:.2g} from the network itself"
    return fast, f"compiled in {time.perf_counter() - begun:.0f} s"


def _logits(forward: Forward, x: Tensor) -> Tensor:
    with torch.no_grad():
        return forward(x)


def _slope(forward: Forward, x: Tensor) -> Tensor:
    with torch.enable_grad():
        point = x.detach().clone().requires_grad_()
        spread = forward(point).float()
        return torch.autograd.grad(spread.logsumexp(1).sum(), point)[0]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))

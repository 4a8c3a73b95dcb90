"""A network as AutoAttack calls it: as it is, or compiled.

`PlainForward` returns bit for bit what the network returns. `CompiledForward` is the same function, faster: images with
channels last, at most `rows` at a time, the last rows padded to a multiple of 16, so that one compilation serves any
number of remaining samples.

A compiled network has first derivatives only, so nothing that is differentiated twice may call one.
"""

import shutil
import time
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from doubly.attacks.mode import Forward, connected

ROWS = {"cpu": 64, "cuda": 512}  # images at a time: on a CPU the activations of more do not fit the cache
MULTIPLE = 16  # torch convolves fewer rows in another way, which would mean another compilation
TOLERANCE = 1e-3  # relative difference of logits and input gradients above which a compiled network is not used
OUTLIER_FACTOR = 50.0  # by which the difference over all samples together may be larger than that of the median sample
HALF_TOLERANCE = 5e-2  # TOLERANCE for networks that return half precision

CountPass = Callable[[int, bool], None]  # number of rows, whether a gradient is recorded


def _count_nothing(rows: int, graph: bool) -> None: ...


class PlainForward:
    """Calls the network itself and counts the rows that pass."""

    compiled = False

    def __init__(self, model: nn.Module, count: CountPass = _count_nothing) -> None:
        self.model, self.count = model, count

    def __call__(self, x: Tensor) -> Tensor:
        self.count(len(x), torch.is_grad_enabled() and x.requires_grad)
        return connected(self.model(x), x).clone()  # Square writes into the logits, which may be a network's own buffer


class CompiledForward:
    """Calls a compiled copy of the network on at most `rows` images at a time and counts the rows that pass."""

    compiled = True

    def __init__(self, model: nn.Module, rows: int, count: CountPass = _count_nothing) -> None:
        self.model, self.rows, self.count = model, rows, count
        self.run = _compile(model)

    def __call__(self, x: Tensor) -> Tensor:
        self.count(len(x), torch.is_grad_enabled() and x.requires_grad)
        if len(x) == 0:
            return connected(self.model(x), x)
        return connected(torch.cat([self.run(_padded(part))[: len(part)] for part in torch.split(x, self.rows)]), x)


def _compile(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Compile `model.forward` for any number of rows.

    torch limits how often it compiles one code object, whatever the network, so each network gets a copy of the code.
    """

    def forward(x: Tensor) -> Any:
        return model.forward(x)

    copied = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    run: Any = torch.compile(copied)

    def with_dynamic_rows(x: Tensor) -> Any:
        x = x[:]  # the mark stays on this view
        torch._dynamo.mark_dynamic(x, 0)
        return run(x)

    return with_dynamic_rows


def _padded(part: Tensor) -> Tensor:
    missing = -len(part) % MULTIPLE
    if missing:
        part = torch.cat([part, part[-1:].detach().expand(missing, *part.shape[1:])])
    return part.contiguous(memory_format=torch.channels_last)


def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile has the C++ compiler that it needs on a CPU."""
    return device.type != "cpu" or any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl"))


def compile_forward(model: nn.Module, x: Tensor, rows: int | None = None) -> tuple[CompiledForward | None, str]:
    """Compile the network for images like `x` and compare it with the network itself.

    Args:
        model: The network as it will be called: in evaluation mode, with frozen parameters.
        x: Some images, on the network's device.
        rows: Images at a time; chosen by the device if not given.

    Returns:
        The compiled network, or None if it cannot be compiled or disagrees; and a sentence that says which.
    """
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(action="ignore"):  # the compiler's remarks on its own libraries
            compiled, plain = CompiledForward(model, rows or ROWS.get(x.device.type, 256)), PlainForward(model)
            pairs = list(zip(_outputs(compiled, x), _outputs(plain, x), strict=True))
        difference = max(_difference(ours, theirs) for ours, theirs in pairs)
        half = any(theirs.dtype.itemsize < 4 for _, theirs in pairs)
    except Exception as error:  # whatever the compiler raises about a network of the user
        return None, f"not compiled: {type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"
    if not difference <= (HALF_TOLERANCE if half else TOLERANCE):
        return None, f"not compiled: the compiled network differs by {difference:.2g} from the network itself"
    return compiled, f"compiled in {time.perf_counter() - start:.0f} s"


def _outputs(forward: Forward, x: Tensor) -> list[Tensor]:
    """Return logits and input gradient of one pass, and the logits of a pass without gradient."""
    with torch.enable_grad():
        point = x.detach().clone().requires_grad_()
        logits = forward(point)
        # Every logit gets another factor: the gradient of a plain sum hardly depends on a normalized layer.
        factors = torch.arange(logits.numel(), device=x.device).cos().view_as(logits)
        gradient = torch.autograd.grad((factors * logits).sum(), point)[0]
    with torch.no_grad():
        return [logits.detach(), gradient, forward(x)]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative difference of the median sample, or of all together where that is much larger.

    A ReLU at its kink may switch with the last bit, and then the gradient of that one sample jumps.
    """
    error, size = (part.float().flatten(1).norm(dim=1) for part in (ours - theirs, theirs))
    total = error.norm() / size.norm().clamp_min(1e-12)
    return float(torch.maximum((error / size.clamp_min(1e-12)).median(), total / OUTLIER_FACTOR))

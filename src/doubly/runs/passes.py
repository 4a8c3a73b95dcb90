"""How much network a step of a method takes: forward and backward passes of one batch, counted where they happen."""

from typing import NamedTuple

from torch import Tensor, nn

from doubly.data import Images
from doubly.data.loader import batches
from doubly.types import Method, Moment


class Passes(NamedTuple):
    """In units of one batch."""

    forward: float
    backward: float  # a double backward counts as two


def passes(method: Method, model: nn.Module, images: Images, size: int) -> Passes:
    """Of one step in the last tenth of training, when burn-ins are over."""
    batch = next(batches(images, size, 0, 0))
    forward, backward = 0.0, 0.0

    def arrived(gradient: Tensor) -> None:
        nonlocal backward
        backward += len(gradient) / len(batch.y)

    def passed(module: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> None:
        nonlocal forward
        forward += len(logits) / len(batch.y)
        if logits.requires_grad:
            logits.register_hook(arrived)  # type: ignore[no-untyped-call]

    handle = model.register_forward_hook(passed)
    try:
        found = method.objective(model.train(), batch, method.init(images.counts()), Moment(progress=0.95))
        found.scalar.backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    return Passes(forward, backward)

"""How much network a step of a method takes: forward and backward passes of one batch, counted where they happen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from doubly.data import Images
from doubly.data.loader import batches
from doubly.types import Method, Moment


@dataclass
class Passes:
    """In units of one batch; a double backward counts as two."""

    forward: float = 0.0
    backward: float = 0.0


@contextmanager
def counted(model: nn.Module, size: int) -> Iterator[Passes]:
    """What the network is asked while this is open, in batches of that size."""
    found = Passes()

    def arrived(gradient: Tensor) -> None:
        found.backward += len(gradient) / size

    def passed(module: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> None:
        found.forward += len(logits) / size
        if logits.requires_grad:
            logits.register_hook(arrived)  # type: ignore[no-untyped-call]

    handle = model.register_forward_hook(passed)
    try:
        yield found
    finally:
        handle.remove()


def passes(method: Method, model: nn.Module, images: Images, size: int) -> Passes:
    """Of one step in the last tenth of training, when burn-ins are over."""
    batch = next(batches(images, size, 0, 0))
    with counted(model, len(batch.y)) as found:
        step = method.objective(model.train(), batch, method.init(images.counts()), Moment(progress=0.95))
        step.scalar.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return found

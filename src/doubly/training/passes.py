"""How much network a step of a method takes: forward and backward passes of one batch, counted where they happen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from doubly.data import Images
from doubly.data.loader import batches
from doubly.distributed import collectives as parallel
from doubly.methods import FAT, METHODS
from doubly.models import SmallCNN
from doubly.schedules import Constant
from doubly.seeding import global_generators
from doubly.types import Method, TrainStep


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
        step = method.objective(model.train(), batch, method.init(images.counts()), TrainStep(progress=0.95))
        step.loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return found


@cache
def predicted(method: Method, channels: int, classes: int) -> Passes:
    """Of a step: counted on a tiny network, since they do not depend on it."""
    if isinstance(method, FAT):  # whose attacks end early: at most so many
        method = replace(method, tau=Constant(float(method.attack.steps)))
    images = random_images(16, (channels, 8, 8), classes)
    with global_generators(0):
        return passes(method, tiny_network(channels, classes), images, len(images))


def is_ours(method: Method) -> bool:
    """Not somebody's own, which may not expect to be asked about other images than its batches."""
    parts = (method, getattr(method, "method", method))  # AWP is around another
    return all(type(part) in METHODS.values() for part in parts)


def prediction(method: Method, images: Images) -> dict[str, dict[str, float]]:
    """For the record of a run; nothing of somebody's own method, which is asked about its batches and no others."""
    if not is_ours(method):
        return {}
    try:
        with parallel.alone():
            found = predicted(method, images.x.shape[1], len(images.classes))  # type: ignore[arg-type]  # if hashable
    except Exception:  # of somebody's own attack, and no reason not to train
        return {}
    return {"predicted": {"passes_forward": found.forward, "passes_backward": found.backward}}


def tiny_network(channels: int, classes: int) -> nn.Module:
    with global_generators(0):
        return SmallCNN(2).build(channels, classes, [0.5] * channels, [0.25] * channels)


def random_images(n: int, shape: tuple[int, ...], classes: int) -> Images:
    with global_generators(0):
        names = tuple(str(k) for k in range(classes))
        return Images.of(torch.randint(0, 256, (n, *shape), dtype=torch.uint8), torch.arange(n) % classes, names)

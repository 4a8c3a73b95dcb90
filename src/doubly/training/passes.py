"""The cost of a training step: forward and backward passes of one batch, counted where they happen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from doubly.attacks import eval_mode
from doubly.data import Images
from doubly.data.loader import batches
from doubly.methods import METHODS, Method
from doubly.models import SmallCNN
from doubly.seeding import global_generators
from doubly.types import TrainStep

LATE = TrainStep(progress=0.95)  # when burn-ins are over


@dataclass
class Passes:
    """Numbers of passes, in units of one batch; a double backward counts as two."""

    forward: float = 0.0
    backward: float = 0.0

    def plus(self, other: "Passes", times: float = 1.0) -> "Passes":
        """Return the sum of these passes and a multiple of others."""
        return Passes(self.forward + times * other.forward, self.backward + times * other.backward)


@contextmanager
def counted_passes(model: nn.Module, batch_size: int) -> Iterator[Passes]:
    """Count the network's passes inside, in batches of that size."""
    passes = Passes()

    def count_backward(gradient: Tensor) -> None:
        passes.backward += len(gradient) / batch_size

    def count_forward(module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        passes.forward += len(logits) / batch_size
        if logits.requires_grad:
            logits.register_hook(count_backward)  # type: ignore[no-untyped-call]

    handle = model.register_forward_hook(count_forward)
    try:
        yield passes
    finally:
        handle.remove()


def step_passes(method: Method, model: nn.Module, images: Images, batch_size: int) -> Passes:
    """Count the passes of one step in the last tenth of training."""
    batch = next(batches(images, batch_size, 0, 0))
    with counted_passes(model, len(batch.y)) as passes:
        objective = method.objective(model.train(), batch, method.init(images.counts()), LATE)
        objective.loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return passes


def holdout_passes(method: Method, model: nn.Module, images: Images, batch_size: int) -> Passes:
    """Count the passes with which a method learns from one batch of held-out images; none if it does not."""
    if method.validation_interval is None:
        return Passes()
    batch = next(batches(images, batch_size, 0, 0))
    with eval_mode(model), counted_passes(model, len(batch.y)) as passes:
        method.on_validation(model, batch, method.init(images.counts()), LATE)
    return passes


def holdout_batches(method: Method, count: int, batch_size: int, steps: int) -> float:
    """Return the held-out batches per training step that a method learns from, on average.

    Args:
        method: The method.
        count: Number of held-out images that it learns from.
        batch_size: Images of a batch.
        steps: Steps of an epoch.
    """
    interval, size = method.validation_interval, count / batch_size
    if interval is None:
        return 0.0
    return size / steps if interval == "epoch" else min(1.0, size) / interval


@cache
def predicted_passes(method: Method, channels: int, classes: int) -> Passes:
    """Count the passes of a step on a tiny network, since they do not depend on the network; for FAT an upper bound."""
    images = random_images(16, (channels, 8, 8), classes)
    with global_generators(0):
        return step_passes(method.costliest(), tiny_network(channels, classes), images, len(images))


@cache
def predicted_holdout_passes(method: Method, channels: int, classes: int) -> Passes:
    """Count the passes for one batch of held-out images on a tiny network; none if the method takes none."""
    images = random_images(16, (channels, 8, 8), classes)
    with global_generators(0):
        return holdout_passes(method.costliest(), tiny_network(channels, classes), images, len(images))


def average_passes(method: Method, shape: tuple[int, ...], classes: int, share: float) -> Passes:
    """Return the predicted passes per step, with `share` (of `holdout_batches`) of those on a held-out batch."""
    step, held_out = (predict(method, shape[0], classes) for predict in (predicted_passes, predicted_holdout_passes))
    return step.plus(held_out, share)


def is_listed(method: Method) -> bool:
    """Return whether a method, and those that it wraps, are listed in METHODS."""
    if type(method) not in METHODS.values():
        return False
    return method.wrapped is None or is_listed(method.wrapped)


def describe_prediction(method: Method, images: Images) -> dict[str, dict[str, float]]:
    """Return the predicted passes for environment.json; nothing for a method of the user, which is not called here."""
    if not is_listed(method):
        return {}
    try:
        passes = predicted_passes(method, images.x.shape[1], len(images.classes))
    except Exception:  # from an attack of the user, and no reason not to train
        return {}
    return {"predicted": {"passes_forward": passes.forward, "passes_backward": passes.backward}}


def tiny_network(channels: int, classes: int) -> nn.Module:
    """Return a small network for counting."""
    with global_generators(0):
        return SmallCNN(2).build(channels, classes, [0.5] * channels, [0.25] * channels)


def random_images(n: int, shape: tuple[int, ...], classes: int) -> Images:
    """Return images of noise for counting and timing."""
    with global_generators(0):
        names = tuple(str(k) for k in range(classes))
        return Images.of(torch.randint(0, 256, (n, *shape), dtype=torch.uint8), torch.arange(n) % classes, names)

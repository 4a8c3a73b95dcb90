"""The state a model is in while it is attacked, and the promise that it comes back as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from doubly.attacks.forward import Mode
from doubly.attacks.half import gradients_kept
from doubly.seeding import forked


def device_of(model: nn.Module) -> torch.device:
    """Where the network's first tensor is; the CPU for one without any."""
    return next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; the mode of each submodule is restored after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def statistics_frozen(model: nn.Module) -> Iterator[None]:
    """Normalization layers in training mode use the batch's statistics inside, but do not remember them."""
    tracking = [m for m in model.modules() if getattr(m, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]


def clean_pass(model: nn.Module, x: Tensor) -> Tensor:
    """Logits of the clean images beside those of the attacked ones, which alone batch norm remembers."""
    with statistics_frozen(model):
        logits: Tensor = model(x)
    return logits


def draws() -> tuple[Tensor, Tensor | None]:
    """Where the global generators stand, for `repeating`."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


@contextmanager
def repeating(stand: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Dropout draws inside what it drew from `stand` on; after, the global generators go on as if nothing had been."""
    with forked():
        torch.set_rng_state(stand[0])
        if stand[1] is not None:
            torch.cuda.set_rng_state(stand[1])
        yield


@contextmanager
def parameters_frozen(model: nn.Module) -> Iterator[None]:
    """No gradient for parameters inside: a backward pass then costs and stores only what leads to the input."""
    free = [p for p in model.parameters() if p.requires_grad]
    for parameter in free:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in free:
            parameter.requires_grad_()


@contextmanager
def attacked(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Parameters and running statistics frozen; in evaluation mode, or ("train") as the model was found.

    Dropout, which only "train" has, draws from a copy of the global generators.
    """
    with ExitStack() as stack:
        stack.enter_context(parameters_frozen(model))
        stack.enter_context(gradients_kept(model, device_of(model), alone=mode == "eval"))
        if mode == "eval":
            stack.enter_context(evaluating(model))
        else:
            stack.enter_context(statistics_frozen(model))
            stack.enter_context(forked())
        yield

"""The state a network is in while it is attacked; each context manager leaves it as it was found."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from doubly.attacks.folding import FoldedForward
from doubly.attacks.half import scaled_gradients
from doubly.seeding import forked

Mode = Literal["eval", "train"]  # of the network while it is attacked


class Forward(Protocol):
    """Anything that maps images to logits: a network, or a faster form of it."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


def connected(logits: Tensor, x: Tensor) -> Tensor:
    """Return logits that have a gradient with respect to x, a zero one where the network ignores its input."""
    if torch.is_grad_enabled() and x.requires_grad and not logits.requires_grad:
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)
    return logits


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the network's first tensor; the CPU for a network without tensors."""
    return next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the network into evaluation mode inside; the mode of each submodule is restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Keep running statistics unchanged inside; normalization layers in training mode still use the batch's."""
    tracking = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Compute no parameter gradients inside, so that a backward pass costs and stores only what leads to the input."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_()


def _autocasts_to_fp16(device_type: str) -> bool:
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is torch.float16


@contextmanager
def attack_context(model: nn.Module, mode: Mode, x: Tensor | None = None) -> Iterator[Forward]:
    """Freeze parameters and running statistics inside, in evaluation mode or ("train") in the mode it is in.

    In "train", dropout draws from a copy of the global generators, so the caller's are left alone.

    Args:
        model: The network; it is left as it was found.
        mode: Its mode inside.
        x: Images that will be attacked; an attack that gives them gets a faster form of the network in evaluation mode
            (`attacks/folding.py`).

    Yields:
        What the attack should call: the network, or its faster form.
    """
    with ExitStack() as stack:
        stack.enter_context(frozen_parameters(model))
        if _autocasts_to_fp16(model_device(model).type):
            stack.enter_context(scaled_gradients(model, per_sample=mode == "eval"))
        if mode == "eval":
            stack.enter_context(eval_mode(model))
        else:
            stack.enter_context(frozen_statistics(model))
            stack.enter_context(forked())
        yield model if x is None or mode == "train" else FoldedForward(model, x)


def clean_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of the clean images in a pass that leaves batch norm's running statistics alone.

    Every method updates the running statistics by one pass only, that of the attacked images.
    """
    with frozen_statistics(model):
        logits: Tensor = model(x)
    return logits


class RngState(NamedTuple):
    """State of torch's global generators."""

    cpu: Tensor
    cuda: Tensor | None


def rng_state() -> RngState:
    """Return the state of torch's global generators, for `replay_rng`."""
    return RngState(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)  # type: ignore[no-untyped-call]


@contextmanager
def replay_rng(state: RngState) -> Iterator[None]:
    """Let dropout draw the same numbers as from `state` on; the global generators are restored afterwards."""
    with forked():
        torch.set_rng_state(state.cpu)
        if state.cuda is not None:
            torch.cuda.set_rng_state(state.cuda)
        yield

"""Activation checkpointing: the backward pass recomputes what is inside a block, so only block inputs stay in memory.

A block is what lies inside the network's containers (nn.Sequential, nn.ModuleList) and has parts of its own: the
residual blocks of our networks and of torchvision's, or a Sequential of plain layers. Attacks recompute too: their
passes hold as much memory as those that train. It applies inside a `with` only, so that it never
affects state dicts, copies and evaluations.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from doubly.errors import UsageError


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are recomputed one at a time.

    Raises:
        UsageError: If the network has only single layers.
    """
    blocks = list(dict.fromkeys(_blocks_inside(model)))
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no blocks to recompute, only single layers: group them into nn.Sequential, or "
            "train without recompute_activations"
        )
    return blocks


def _blocks_inside(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if any(_holds_blocks(module) for module in child.modules()):
            yield from _blocks_inside(child)
        elif list(child.children()):
            yield child


def _holds_blocks(module: nn.Module) -> bool:
    container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return container and any(list(child.children()) for child in module.children())


@contextmanager
def recomputed_activations(model: nn.Module) -> Iterator[None]:
    """Recompute the activations of the network's blocks in backward passes of what is computed inside."""
    blocks = [(block, vars(block).get("forward")) for block in find_blocks(model)]
    for block, _ in blocks:
        block.forward = _recomputing(block, block.forward)
    try:
        yield
    finally:
        for block, replaced_forward in blocks:
            del block.forward
            if replaced_forward is not None:  # the user had replaced it
                block.forward = replaced_forward


def _recomputing(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward function of the block that keeps no activations."""
    original = _Original(block, forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        passes = 0
        first_pass = _Snapshot(original)

        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            return forward(*args, **kwargs) if passes == 1 else first_pass.repeat(args, kwargs)

        return checkpoint(compute, *args, use_reentrant=False, **kwargs)

    return run


class _Original(nn.Module):
    """A block whose forward is the original one, as a module that functional_call can take."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.original_forward = block, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_forward(*args, **kwargs)


class _Snapshot:
    """State that the first pass of a block depends on, and that may change before the recomputation.

    Parameters: AWP substitutes others for the time of a pass. Buffers: after the pass, running statistics already
    contain this batch, so a recomputation gets copies. Modes: an attack or a clean pass may have changed them.
    """

    def __init__(self, original: _Original) -> None:
        self.original = original
        self.parameters: dict[str, Tensor] = dict(original.named_parameters())
        self.buffers: dict[str, Tensor] = dict(original.named_buffers())
        self.modes = _modes(original)

    def repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the pass again; it may be repeated several times, where it is differentiated twice."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        current = _modes(self.original)
        _set_modes(self.original, self.modes)
        try:
            return functional_call(self.original, {**self.parameters, **buffers}, args, kwargs)
        finally:
            _set_modes(self.original, current)


def _modes(module: nn.Module) -> list[tuple[bool, bool]]:
    """Return training mode and whether statistics are tracked, of each submodule."""
    return [(part.training, bool(getattr(part, "track_running_stats", False))) for part in module.modules()]


def _set_modes(module: nn.Module, modes: list[tuple[bool, bool]]) -> None:
    for part, (training, tracking) in zip(module.modules(), modes, strict=True):
        part.training = training
        if hasattr(part, "track_running_stats"):
            part.track_running_stats = tracking  # type: ignore[assignment]

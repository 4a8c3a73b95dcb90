"""Activation checkpointing: the backward pass recomputes what is inside a block, so only blocks' inputs stay in memory.

A block is what lies inside the network's containers (nn.Sequential, nn.ModuleList) and has parts of its own: the
residual blocks of our networks and of torchvision's, or a Sequential of plain layers. Attacks forget too: their passes
hold as much as those that train. It is in force inside a `with` only, so that state dicts, copies, and whoever
evaluates or compiles the network never meet it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from doubly.errors import UsageError


def blocks(model: nn.Module) -> list[nn.Module]:
    """What is recomputed at a time."""
    found = list(dict.fromkeys(_inside(model)))
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no blocks to recompute, only single layers: group them into nn.Sequential, or "
            "train without recompute_activations"
        )
    return found


def _inside(model: nn.Module) -> Iterator[nn.Module]:
    for part in model.children():
        if any(_holds_blocks(inner) for inner in part.modules()):
            yield from _inside(part)
        elif list(part.children()):
            yield part


def _holds_blocks(part: nn.Module) -> bool:
    listed = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return listed and any(list(inner.children()) for inner in part.children())


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Blocks of the model forget their activations in passes that begin inside, wherever those are differentiated."""
    found = [(block, vars(block).get("forward")) for block in blocks(model)]
    for block, _ in found:
        block.forward = _forgetful(block, block.forward)
    try:
        yield
    finally:
        for block, own in found:
            del block.forward
            if own is not None:  # somebody had replaced it
                block.forward = own


def _forgetful(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        again = _AsItStood(block)
        return checkpoint(forward, *given, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **named)

    return run


class _Standing(NamedTuple):
    """What a module's pass depends on and somebody may change before the recomputation."""

    parameters: dict[str, Any]  # AWP lends a network others
    buffers: dict[str, Any]
    training: bool
    tracking: bool  # batch norm remembers its statistics


def _standing(block: nn.Module) -> list[_Standing]:
    return [
        _Standing(dict(m._parameters), dict(m._buffers), m.training, getattr(m, "track_running_stats", False))
        for m in block.modules()
    ]


class _AsItStood:
    """The block as in its first pass, but with copies of its buffers: their statistics hold this batch already.

    It can be entered again: a pass that is differentiated twice may be recomputed twice.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self.then = block, _standing(block)
        self.now = self.then

    def __enter__(self) -> None:
        self.now = _standing(self.block)
        copies = [{name: None if b is None else b.clone() for name, b in then.buffers.items()} for then in self.then]
        _put(self.block, [then._replace(buffers=own) for then, own in zip(self.then, copies, strict=True)])

    def __exit__(self, *problem: object) -> None:
        _put(self.block, self.now)


def _put(block: nn.Module, standing: list[_Standing]) -> None:
    for module, own in zip(block.modules(), standing, strict=True):
        module._parameters.update(own.parameters)
        module._buffers.update(own.buffers)
        module.training = own.training
        if hasattr(module, "track_running_stats"):
            module.track_running_stats = own.tracking  # type: ignore[assignment]

"""Attacks in fp16: gradients of the input that do not vanish.

A sample that the network is sure of has gradients below 6e-8, which fp16 rounds to 0: the attack would leave it where
it is (docs/scale.md has the experiment). So each sample's gradient is made about 1 at the logits, by a power of two,
which is taken off again at the input, in float32. In training mode, where batch norm lets samples touch each other, one
factor serves all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SHARED = 256.0  # losses have gradients of at most about 1 at the logits, and fp16 reaches to 65504


@contextmanager
def gradients_kept(model: nn.Module, device: torch.device, *, alone: bool) -> Iterator[None]:
    """Under fp16 autocast, input gradients inside keep their size; parameters must be frozen. `alone`: by sample."""
    half = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) is torch.float16
    if not half:
        yield
        return
    hook = model.register_forward_hook(_scaled_alone if alone else _scaled)
    try:
        yield
    finally:
        hook.remove()


def _scaled_alone(model: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> Tensor:
    return _between(inputs[0], logits, _factors)


def _scaled(model: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> Tensor:
    return _between(inputs[0], logits, lambda gradient: gradient.new_tensor(SHARED))


def _between(x: Tensor, logits: Tensor, factors: Any) -> Tensor:
    """The logits in float32, their gradient multiplied on its way into the network and divided where it leaves it."""
    if not (logits.requires_grad and x.requires_grad):
        return logits
    found: list[Tensor] = []

    def grow(gradient: Tensor) -> Tensor:
        found[:] = [factors(gradient)]
        return gradient * found[0]

    def shrink(gradient: Tensor) -> Tensor:
        return gradient / found[0].view(-1, *[1] * (gradient.dim() - 1))

    wide = logits.float()
    wide.register_hook(grow)  # type: ignore[no-untyped-call]
    x.register_hook(shrink)  # type: ignore[no-untyped-call]
    return wide


def _factors(gradient: Tensor) -> Tensor:
    """The power of two, one per row, that brings its largest entry into [1/2, 1)."""
    exponent = torch.frexp(gradient.abs().amax(1, keepdim=True)).exponent
    return torch.ldexp(torch.ones_like(gradient[:, :1]), -exponent.clamp_min(-120))

"""Attacks in fp16: scale the gradient of the input so that it does not vanish.

A sample that the network is sure of has gradients below 6e-8, which fp16 rounds to 0: the attack would not move it
(docs/scale.md has the experiment). So each sample's gradient is scaled to about 1 at the logits by a power of two, and
scaled back at the input, in float32. In training mode, where batch norm couples the samples, one factor serves all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BATCH_FACTOR = 256.0  # losses have gradients of at most about 1 at the logits, and fp16 reaches to 65504


@contextmanager
def scaled_gradients(model: nn.Module, *, per_sample: bool) -> Iterator[None]:
    """Scale the gradients of a network that computes in fp16 inside; parameters must be frozen.

    Args:
        model: The network.
        per_sample: Whether each sample has a factor of its own, or one serves all.
    """
    hook = model.register_forward_hook(_scale_per_sample if per_sample else _scale_batch)
    try:
        yield
    finally:
        hook.remove()


def _scale_per_sample(model: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> Tensor:
    return _scale(inputs[0], logits, _power_of_two)


def _scale_batch(model: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> Tensor:
    return _scale(inputs[0], logits, lambda gradient: gradient.new_tensor(BATCH_FACTOR))


def _scale(x: Tensor, logits: Tensor, factors_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return float32 logits whose gradient is multiplied on its way into the network and divided at the input."""
    if not (logits.requires_grad and x.requires_grad):
        return logits
    factors: list[Tensor] = []

    def multiply(gradient: Tensor) -> Tensor:
        factors[:] = [factors_of(gradient)]
        return gradient * factors[0]

    def divide(gradient: Tensor) -> Tensor:
        return gradient / factors[0].view(-1, *[1] * (gradient.dim() - 1))

    float_logits = logits.float()
    float_logits.register_hook(multiply)  # type: ignore[no-untyped-call]
    x.register_hook(divide)  # type: ignore[no-untyped-call]
    return float_logits


def _power_of_two(gradient: Tensor) -> Tensor:
    """Return the power of two per row that brings its largest entry into [1/2, 1)."""
    exponent = torch.frexp(gradient.abs().amax(1, keepdim=True)).exponent
    return torch.ldexp(torch.ones_like(gradient[:, :1]), -exponent.clamp_min(-120))

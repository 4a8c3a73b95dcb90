"""How attacks call a network."""

from typing import Literal, Protocol

import torch
from torch import Tensor

Mode = Literal["eval", "train"]  # of the network while it is attacked


class Forward(Protocol):
    """Anything that maps images to logits: a network, or a faster form of it."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


def connected(logits: Tensor, x: Tensor) -> Tensor:
    """Return logits that have a gradient with respect to x, a zero one where the network ignores its input."""
    if torch.is_grad_enabled() and x.requires_grad and not logits.requires_grad:
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)
    return logits

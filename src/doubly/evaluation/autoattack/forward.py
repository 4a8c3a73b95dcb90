"""The function from images to logits that AutoAttack's attacks call."""

from collections.abc import Callable

import torch
from torch import Tensor

from doubly.attacks.mode import Forward, connected

CountPass = Callable[[int, bool], None]  # number of rows, whether a gradient is recorded


def _count_nothing(rows: int, graph: bool) -> None: ...


class CountedForward:
    """Calls a network and counts the rows that pass; its logits may be written into."""

    def __init__(self, forward: Forward, count: CountPass = _count_nothing) -> None:
        self.forward, self.count = forward, count

    def __call__(self, x: Tensor) -> Tensor:
        self.count(len(x), torch.is_grad_enabled() and x.requires_grad)
        return connected(self.forward(x), x).clone()  # Square writes into the logits, which may be a network's buffer

"""What balls of any norm share: points from uniform draws, and bisection for the size of a step inwards."""

from collections.abc import Callable

import torch
from torch import Tensor

from doubly.bilevel.rows import flat, per_row


def point_in_ball(fraction: Tensor, radius: float | Tensor, lengths: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a point of a ball around 0 from uniform draws in [0, 1], (B, ...).

    The draws give the direction from the center; the first of them gives the distance as a share of the radius.

    Args:
        fraction: The draws.
        radius: Radius of the ball.
        lengths: The norm of each row, (B, ...) -> (B,).
    """
    direction = 2 * fraction - 1
    scale = radius * flat(fraction)[:, 0] / lengths(direction).clamp_min(torch.finfo(fraction.dtype).tiny)
    return direction * per_row(scale, direction)


def smallest_fitting(low: Tensor, high: Tensor, is_too_long: Callable[[Tensor], Tensor], bisections: int) -> Tensor:
    """Return, for each row, the smallest number whose step inwards ends inside the ball.

    Args:
        low: Numbers for which the result is too long, (B,).
        high: Numbers for which it is not, (B,).
        is_too_long: Whether the result is too long, (B,) -> (B,).
        bisections: How often the interval is halved.
    """
    for _ in range(bisections):
        middle = (low + high) / 2
        too_long = is_too_long(middle)
        low, high = torch.where(too_long, middle, low), torch.where(too_long, high, middle)
    return high

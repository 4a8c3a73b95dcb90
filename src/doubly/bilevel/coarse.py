"""Weights of losses that are so large beside the temperature r that loss / r has no digits left for them.

There the weights are nearly those of the limit r -> 0: the largest losses are at the cap, and one sample, the pivot,
takes what is left. Differences of losses to the pivot are exact, so that the weights follow from these.
"""

from math import ceil, inf

import torch
from torch import Tensor

COARSE = 1e11  # loss / r beyond which its rounding changes a weight by more than 1e-5


def is_coarse(losses: Tensor, r: float) -> bool:
    """Return whether losses are so large beside r that rounding of loss / r is seen in a weight."""
    return bool(losses.abs().amax() / r > COARSE)


def around_pivot(losses: Tensor, r: float, cap: float | None, reach: float) -> tuple[Tensor, Tensor]:
    """Return losses / r relative to the pivot, and the loss of the pivot.

    Args:
        losses: Losses, (B,), in float64.
        r: Temperature.
        cap: Upper bound of the weights, or None.
        reach: Distance from which on a sample above the pivot is at the cap and one below it has no weight. Samples
            that are further away are moved there.
    """
    pivot = losses.sort(descending=True).values[0 if cap is None else ceil(len(losses) / cap) - 1]
    return ((losses - pivot) / r).clamp(-reach, reach), pivot


def refuse_running(name: str, losses: Tensor, r: float) -> None:
    """Raise the ArithmeticError for coarse losses that would have to be averaged with those of earlier batches."""
    raise ArithmeticError(
        f"{name} got a loss of {losses.abs().amax().item():.1e} with r = {r:g}: their ratio has no digits left to be "
        "averaged with earlier batches; take a larger r, smaller steps, or eta = 1"
    )


def check_overflow(values: Tensor, name: str) -> Tensor:
    """Return weights or a value that were computed; raise an ArithmeticError if one is NaN or infinite."""
    if not torch.isfinite(values).all():
        raise ArithmeticError(f"{name} got losses for which {values.dtype} overflows: take a larger r, or float64")
    return values


def is_positive(value: float) -> bool:
    """Return whether a number is above 0 and finite."""
    return 0 < value < inf

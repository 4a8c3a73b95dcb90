"""Comparison of networks by their frontiers, with intervals from resampling the images that they share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from doubly.errors import UsageError
from doubly.evaluation.intervals import Interval, resampled_positions
from doubly.evaluation.metrics import Bools, Floats, Ints, per_class, tail
from doubly.offsets.frontier import Frontier
from doubly.report.frontier import MAX_LOSS, SHARED, compare_frontiers, tail_at


def compare_runs(
    frontiers: Sequence[Frontier], max_loss: float = MAX_LOSS, resamples: int = 500, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare networks with the first one: tail at an average little below its own, and area above its path.

    Args:
        frontiers: The frontiers, on the same images.
        max_loss: How far the average may lie below that of the first network as trained.
        resamples: Number of resamples of the bootstrap, which takes the same images for all networks.
        seed: Seed of the bootstrap.

    Returns:
        One row per network, with the difference of its tail to that of the first and a 95 % interval.

    Raises:
        UsageError: If they were measured on different images.
    """
    first = frontiers[0]
    for other in frontiers[1:]:
        if different := [k for k in SHARED if first.summary["protocol"].get(k) != other.summary["protocol"].get(k)]:
            raise UsageError(
                f"{first.label} and {other.label} were measured with different {different[0]}: give runs of the same "
                "data and threat"
            )
    rows = compare_frontiers([frontier.summary for frontier in frontiers], max_loss)
    return [
        {"label": frontier.label, **row, "difference": _tail_difference(first, frontier, max_loss, resamples, seed)}
        for frontier, row in zip(frontiers, rows, strict=True)
    ]


def _tail_difference(
    first: Frontier, other: Frontier, max_loss: float, resamples: int, seed: int
) -> list[float] | None:
    """Return the difference of the tails at the bounded average with its interval; None if one is undefined."""

    def difference(rows: Ints | slice) -> float:
        y = first.y[rows]
        paths = [_path(frontier.correct[:, rows], y) for frontier in (first, other)]
        zero = [point["scale"] for point in first.summary["points"]].index(0)
        lowest = paths[0][0][zero] - max_loss
        return tail_at(*paths[1], lowest) - tail_at(*paths[0], lowest)

    value = difference(slice(None))
    values = [difference(rows) for rows in resampled_positions(first.y, resamples, seed)]
    if np.isnan(value) or np.isnan(values).any():
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return list(Interval(value, float(low), float(high)))


def _path(correct: Bools, y: Ints) -> tuple[Floats, Floats]:
    classes = int(y.max()) + 1
    tails = [tail(per_class(row, y, classes))[0] for row in correct]
    return correct.mean(1), np.array(tails)

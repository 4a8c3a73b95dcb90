"""Average against tail along the class offsets of networks, from frontier.json, and how two such paths compare.

Between two points of a path the offsets in between are networks too, so a path is taken to be piecewise linear.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doubly.errors import UsageError
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir, read_tree

Floats = npt.NDArray[np.float64]
SCHEMA = 1
MAX_LOSS = 0.005  # of the average, relative to the first network as trained, that may be given for the tail
SHARED = (
    "name",
    "split",
    "skip_images",
    "n",
    "seed",
    "data_sha256",
    "attack",
    "attacks",
)  # of the protocols of frontiers that compare
GRID = 201  # averages at which the heights of two paths are compared


def read_frontier(file: Path) -> dict[str, Any] | None:
    """Return the contents of a frontier.json; None if there is no such file.

    Raises:
        UsageError: If the file is damaged, or of another version.
    """
    if not file.is_file():
        return None
    frontier = read_tree(file)
    points = frontier.get("points")
    keys = {"scale", "average", "tail", "worst"}
    is_valid = isinstance(points, list) and points and all(isinstance(p, dict) and keys <= p.keys() for p in points)
    is_valid = is_valid and all(_are_intervals(point) for point in points or ())
    is_valid = is_valid and any(point["scale"] == 0 for point in points or ())
    if frontier.get("schema") != SCHEMA or not is_valid or not isinstance(frontier.get("protocol"), dict):
        raise UsageError(f"{file} is damaged or of another version: delete it and run `doubly frontier` again")
    return frontier


def path_of(frontier: Mapping[str, Any]) -> tuple[Floats, Floats]:
    """Return average and tail of the points of a frontier, in the order of the scale."""
    points = sorted(frontier["points"], key=lambda point: float(point["scale"]))
    averages, tails = (np.array([point[key][0] for point in points], dtype=np.float64) for key in ("average", "tail"))
    return averages, tails


def as_trained(frontier: Mapping[str, Any]) -> float:
    """Return the average of the network without offsets."""
    return float(next(point["average"][0] for point in frontier["points"] if point["scale"] == 0))


def tail_at(averages: Floats, tails: Floats, lowest_average: float) -> float:
    """Return the largest tail on a path where the average is at least `lowest_average`; NaN if it never is.

    Args:
        averages: Averages along the path.
        tails: Tails at the same points.
        lowest_average: The bound.
    """
    candidates = [tail for average, tail in zip(averages, tails, strict=True) if average >= lowest_average]
    for start in range(len(averages) - 1):
        (a, b), (p, q) = averages[start : start + 2], tails[start : start + 2]
        if min(a, b) < lowest_average <= max(a, b):
            share = (lowest_average - a) / (b - a)
            candidates.append(p + share * (q - p))
    return float(max(candidates)) if candidates else math.nan


def area_above(path: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> float:
    """Return the area between the heights of two paths over the averages that both reach; NaN if there are none.

    The height of a path at an average is its largest tail at that average or a higher one. The area is positive where
    the first path lies above; of shares it is a share squared, 10,000 times that are points squared.

    Args:
        path: Averages and tails of the first path.
        other: Those of the second path.
    """
    low, high = max(float(p[0].min()) for p in (path, other)), min(float(p[0].max()) for p in (path, other))
    if not low < high:
        return math.nan
    grid = np.linspace(low, high, GRID)
    heights = [np.array([tail_at(*p, average) for average in grid]) for p in (path, other)]
    return float(np.trapezoid(heights[0] - heights[1], grid))


def compare_frontiers(frontiers: Sequence[Mapping[str, Any]], max_loss: float = MAX_LOSS) -> list[dict[str, Any]]:
    """Compare networks with the first one by their frontiers.

    Args:
        frontiers: Contents of frontier.json of each network.
        max_loss: How far the average may lie below that of the first network as trained.

    Returns:
        For each network tail_at_average and area_above_first, None where it is undefined.
    """
    lowest = as_trained(frontiers[0]) - max_loss
    paths = [path_of(frontier) for frontier in frontiers]
    return [
        {
            "lowest_average": lowest,
            "tail_at_average": _nan_to_none(tail_at(*path, lowest)),
            "area_above_first": _nan_to_none(area_above(path, paths[0])),
        }
        for path in paths
    ]


def frontiers_of(methods: Mapping[str, Sequence[RunResult]]) -> dict[str, list[dict[str, Any]]]:
    """Return the frontiers of the runs that have one, by method; of those measured in another way than the first none.

    Raises:
        UsageError: If a frontier.json is damaged.
    """
    frontiers: dict[str, list[dict[str, Any]]] = {}
    first: dict[str, Any] | None = None
    for label, runs in methods.items():
        for run in runs:
            one = read_frontier(RunDir(run.path).frontier)
            if one is None:
                continue
            first = first or one
            if all(one["protocol"].get(key) == first["protocol"].get(key) for key in SHARED):
                frontiers.setdefault(label, []).append(one)
    return frontiers


def _are_intervals(point: Mapping[str, Any]) -> bool:
    values = [point["average"], point["tail"], point["worst"], [point["scale"]]]
    numbers = all(isinstance(part, list) and all(type(v) in (int, float) for v in part) for part in values)
    return numbers and all(len(part) == 3 for part in values[:3])


def _nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else value

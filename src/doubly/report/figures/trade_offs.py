"""One mark per method: accuracy of the weakest classes against all classes, and accuracy against cost."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from doubly.report.collect import mean_sd
from doubly.report.figures.style import COLORS, INK, finish, log_if_wide, look, style
from doubly.report.figures.values import ByMethod, Floats, attack_of, over_seeds, with_legend_labels
from doubly.report.run_result import RunResult

Point = tuple[float, float]
DISTANCES = (7, 11, 18, 27, 38, 52, 70, 92, 120)  # points between a mark and its name that are tried
FONT_SIZE = 9
LEADER = {"arrowstyle": "-", "color": INK, "alpha": 0.5, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
FRONT = "Pareto front"
# Seconds from which on a unit is used, its length in seconds, its name.
UNITS = ((3 * 3600, 3600, "h"), (3 * 60, 60, "min"), (0, 1, "s"))


def pareto(results_by_method: ByMethod, path: Path) -> bool:
    """Draw RA-Tail-30 against RA-PGD, mean over seeds with a cross of one sd, and a line along the Pareto front."""
    methods = with_legend_labels(results_by_method)
    if not methods:
        return False
    scores = {
        label: [mean_sd(100 * run.evaluation[key] for run in runs) for key in ("ra_pgd", "ra_tail_30")]
        for label, runs in methods.items()
    }
    points = {label: (x, y) for label, ((x, _), (y, _)) in scores.items()}
    crosses = [((x, y), (x_sd or 0.0, y_sd or 0.0)) for (x, x_sd), (y, y_sd) in scores.values()]
    with style(path):
        figure = Figure(figsize=(7.2, 4.2 + 0.06 * max(0, len(methods) - 8)), layout="constrained")
        axes = figure.subplots()
        front = _front(list(points.values()))
        axes.plot(*zip(*front, strict=True), color=COLORS[6], linewidth=1, zorder=1, label=FRONT)
        for index, ((x, x_sd), (y, y_sd)) in enumerate(scores.values()):
            axes.errorbar(x, y, y_sd, x_sd, fmt="none", ecolor=INK, elinewidth=0.8, alpha=0.6, zorder=2)
            axes.plot(x, y, linestyle="", markersize=7.5, zorder=3, **look(index))
        axes.margins(0.12)
        axes.set_xlabel(f"RA-PGD: accuracy under {attack_of(_runs(methods))}, all classes (%)")
        axes.set_ylabel("RA-Tail-30: weakest 30 % of classes (%)")
        _label_points(figure, axes, points, crosses)
        return finish(figure, [axes], path, grid="both")


def cost(results_by_method: ByMethod, path: Path) -> bool:
    """Draw RA-PGD and RA-Tail-30 against training time and, where recorded, passes through the network per step."""
    methods = with_legend_labels(results_by_method)
    seconds = {label: float(over_seeds([[run.seconds] for run in runs])[0][0]) for label, runs in methods.items()}
    passes = {label: float(over_seeds([[sum(run.passes)] for run in runs])[0][0]) for label, runs in methods.items()}
    longest = max((value for value in seconds.values() if value > 0), default=0.0)
    _, unit, name = next(row for row in UNITS if longest >= row[0])
    panels = {"passes per step, forward and backward": passes}  # the first panel: it depends on no machine
    panels[f"training time ({name})"] = {label: value / unit for label, value in seconds.items()}
    recorded = {title: xs for title, xs in panels.items() if any(x > 0 for x in xs.values())}
    if not recorded:
        return False
    with style(path):
        figure = Figure(figsize=(7.2 if len(recorded) > 1 else 5.4, 3.2), layout="constrained")
        grid = list(figure.subplots(1, len(recorded), sharey=True, squeeze=False)[0])
        for axes, (title, xs) in zip(grid, recorded.items(), strict=True):
            for index, (label, runs) in enumerate(methods.items()):
                _stem(axes, index, label, xs[label], runs)
            axes.margins(0.1)
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            log_if_wide(axes, "x", list(xs.values()))
            axes.set_xlabel(title)
        for label, filled in (("filled: RA-PGD", True), ("hollow: RA-Tail-30", False)):
            fill = COLORS[6] if filled else "none"
            grid[0].plot([], [], "o", color=COLORS[6], markerfacecolor=fill, markersize=6, label=label)
        grid[0].set_ylabel(f"accuracy under {attack_of(_runs(methods))} (%)")
        return finish(figure, grid, path, grid="both")


def _stem(axes: Axes, index: int, label: str, x: float, runs: Sequence[RunResult]) -> None:
    """Draw both accuracies of a method at x, joined by a line."""
    if not x > 0:
        return
    top, low = (mean_sd(100 * run.evaluation[key] for run in runs)[0] for key in ("ra_pgd", "ra_tail_30"))
    axes.plot([x, x], [low, top], color=look(index)["color"], linewidth=1)
    axes.plot(x, top, linestyle="", markersize=6.5, label=label, **look(index))
    axes.plot(x, low, linestyle="", markersize=6.5, markerfacecolor="none", **look(index))


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both coordinates, from right to left."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


def _label_points(
    figure: Figure, axes: Axes, points: Mapping[str, Point], crosses: Sequence[tuple[Point, Point]]
) -> None:
    """Write each name beside its mark, at the nearest position that no mark, cross or other name occupies."""
    figure.draw_without_rendering()  # computes the layout
    scale = figure.dpi / 72  # pixels in a point
    positions = {label: axes.transData.transform(point) for label, point in points.items()}
    occupied = [_box(position, 9 * scale, 9 * scale) for position in positions.values()]
    for (x, y), (x_sd, y_sd) in crosses:
        for ends in ([(x - x_sd, y), (x + x_sd, y)], [(x, y - y_sd), (x, y + y_sd)]):
            occupied.append(Bbox(axes.transData.transform(ends)).padded(scale))
    frame = axes.get_window_extent()
    for label, position in sorted(positions.items(), key=lambda item: -item[1][1]):
        width, height = _size(figure, label)
        candidates = [
            (distance, offset, _box(position + offset, width, height))
            for distance in DISTANCES
            for angle in range(0, 360, 30)
            for offset in [_offset(angle, distance * scale, width, height)]
        ]
        distance, offset, box = min(
            candidates,
            key=lambda candidate: (_overlap(candidate[2], occupied) + _outside(candidate[2], frame), candidate[0]),
        )
        occupied.append(box)
        text = axes.annotate(
            label,
            points[label],
            tuple(offset / scale),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=FONT_SIZE,
            arrowprops=LEADER if distance > DISTANCES[1] else None,
        )
        text.set_in_layout(False)


def _size(figure: Figure, label: str) -> tuple[float, float]:
    """Return width and height of a name in pixels."""
    text = figure.text(0, 0, label, fontsize=FONT_SIZE)
    extent = text.get_window_extent()
    text.remove()
    return extent.width, extent.height


def _offset(angle: float, distance: float, width: float, height: float) -> Floats:
    x, y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return np.array([x * (distance + width / 2), y * (distance + height / 2)])


def _box(middle: Floats, width: float, height: float) -> Bbox:
    return Bbox.from_bounds(middle[0] - width / 2, middle[1] - height / 2, width, height)


def _overlap(box: Bbox, occupied: Sequence[Bbox]) -> float:
    shared = [Bbox.intersection(box, other) for other in occupied]
    return sum(part.width * part.height for part in shared if part is not None)


def _outside(box: Bbox, frame: Bbox) -> float:
    inside = Bbox.intersection(box, frame)
    return box.width * box.height - (inside.width * inside.height if inside is not None else 0.0)


def _runs(methods: ByMethod) -> list[RunResult]:
    return [run for runs in methods.values() for run in runs]

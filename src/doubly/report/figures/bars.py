"""Bars of the robust accuracy of each class (figure 1 of the paper)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from doubly.report.figures.style import COLORS, HATCHES, INK, finish, panel_size, style
from doubly.report.figures.values import (
    ByMethod,
    Floats,
    attack_of,
    class_accuracies,
    class_names,
    over_seeds,
    weakest,
    with_legend_labels,
)
from doubly.text import shorten

MAX_BARS = 110  # in a row, the gap between two classes counted as one bar
BAR_WIDTH = 0.1  # inches
MAX_ROWS = 6


@dataclass(frozen=True)
class Row:
    """A row of bars: some classes of one setting."""

    title: str
    classes: list[str]
    spread: dict[str, tuple[Floats, Floats]]  # method -> mean and sd over seeds

    @property
    def ticks(self) -> list[str]:
        """The labels below the bars."""
        return [shorten(name) for name in self.classes]

    @property
    def width(self) -> float:
        """The width of the row in inches."""
        return BAR_WIDTH * len(self.classes) * (1 + len(self.spread))


def per_class(results_by_method: ByMethod, path: Path) -> bool:
    """Draw grouped bars of the robust accuracy of each class, mean over seeds with its sd."""
    return per_class_panels({"": results_by_method}, path)


def per_class_panels(settings: Mapping[str, ByMethod], path: Path) -> bool:
    """Draw the bars of several settings side by side, such as balanced and imbalanced; a method keeps its color."""
    rows = [row for title, results in settings.items() for row in _rows(title, results)]
    if not rows:
        return False
    runs = [run for results in settings.values() for group in results.values() for run in group]
    methods = list(dict.fromkeys(label for row in rows for label in row.spread))
    wrapped = len(rows) > len(settings)  # a setting needs more than one row
    columns = 1 if wrapped else len(rows) if len(rows) <= 3 else 2
    lines = math.ceil(len(rows) / columns)
    sizes = [panel_size(row.ticks, max(7.2 / min(columns, 2), *(row.width for row in rows))) for row in rows]
    width, names = (max(size) for size in zip(*sizes, strict=True))
    with style(path):
        size = (columns * width, lines * ((2.1 if wrapped else 3.1) + names) + 0.3)
        figure = Figure(figsize=size, layout="constrained")
        shared = None
        for index, row in enumerate(rows):
            axes = figure.add_subplot(lines, columns, index + 1, sharey=shared)
            shared = shared or axes
            _draw(axes, row, methods, max(len(other.classes) for other in rows if other.title == row.title))
            axes.tick_params(axis="x", length=0, rotation=90 if names else 0)
        figure.supxlabel(_classes_label(rows, settings), fontsize=10)
        figure.supylabel(f"robust accuracy under {attack_of(runs)} (%)", fontsize=10)
        return finish(figure, figure.axes, path)


def _rows(title: str, results: ByMethod) -> list[Row]:
    """Split the classes into rows with bars that are wide enough; too many classes are cut to the weakest."""
    methods = with_legend_labels(results)
    if not methods:
        return []
    names = class_names(next(iter(methods.values()))[0])
    spread = {label: over_seeds([class_accuracies(run) for run in runs]) for label, runs in methods.items()}
    overall, _ = over_seeds([mean for mean, _ in spread.values()])
    if np.isnan(overall).all():
        return []
    room = max(1, MAX_BARS // (1 + len(spread)))
    drawn = weakest(overall, MAX_ROWS * room)
    return [
        Row(title, [names[i] for i in part], {label: (mean[part], sd[part]) for label, (mean, sd) in spread.items()})
        for part in np.array_split(drawn, math.ceil(len(drawn) / room))
    ]


def _draw(axes: Axes, row: Row, methods: list[str], class_count: int) -> None:
    width = 0.84 / len(row.spread)
    for position, (label, (mean, sd)) in enumerate(row.spread.items()):
        index = methods.index(label)
        x = np.arange(len(mean)) + (position - (len(row.spread) - 1) / 2) * width
        for bar in axes.bar(x, np.nan_to_num(mean), 0.92 * width, label=label, color=COLORS[index % len(COLORS)]):
            bar.set(hatch=HATCHES[index % len(HATCHES)], edgecolor="white", linewidth=0)
        if sd.any():
            axes.errorbar(x, mean, sd, fmt="none", ecolor=INK, elinewidth=0.9, capsize=1.5)
    axes.set_xticks(range(len(row.ticks)), row.ticks)
    axes.set(xlim=(-0.6, class_count - 0.4), ylim=(0, 100))
    if row.title:
        axes.set_title(shorten(row.title, 60), loc="left", fontsize=10)


def _classes_label(rows: list[Row], settings: Mapping[str, ByMethod]) -> str:
    """Return the label of the x axis, which says if not all classes are drawn."""
    parts = []
    for title, results in settings.items():
        drawn = sum(len(row.classes) for row in rows if row.title == title)
        total = max((len(class_names(run)) for runs in results.values() for run in runs), default=0)
        if 0 < drawn < total:
            parts.append(f"the {drawn} weakest of {total}")
    return f"class ({', '.join(dict.fromkeys(parts))})" if parts else "class"

"""Confusion matrices (figure 3 of the paper)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from doubly.report.figures.style import LETTER, finish, style
from doubly.report.figures.values import ByMethod, Floats, attack_of, class_names, with_legend_labels
from doubly.text import shorten

MAX_PANELS = 6
MAX_COUNTED = 20  # with more classes the numbers in the cells cannot be read
MAX_NAMED = 50  # class names on an axis
MAX_WIDTH = 13.0  # inches
COLOR_MAP = mpl.colormaps["Blues"]  # darker means more, also in a gray print


def confusion(results_by_method: ByMethod, path: Path, attack: str = "pgd") -> bool:
    """Draw a matrix of counts for each method, summed over seeds: rows are true classes, columns are predictions."""
    methods = with_legend_labels(results_by_method)
    of_runs = {
        label: [counts[attack] for run in runs if attack in (counts := run.evaluation.get("confusion", {}))]
        for label, runs in methods.items()
    }
    matrices = {label: np.array(counts) for label, counts in of_runs.items() if counts}
    if not matrices:
        return False
    drawn = list(matrices.items())[:MAX_PANELS]
    names = [shorten(name) for name in class_names(next(iter(methods.values()))[0])]
    size = max(2.6, 0.29 * len(names)) if len(names) <= MAX_COUNTED else 4.2
    columns = max(1, min({1: 1, 2: 2, 4: 2}.get(len(drawn), 3), int(MAX_WIDTH / size)))
    rows = math.ceil(len(drawn) / columns)
    with style(path):
        room = LETTER * max(map(len, names)) * _font_size(names) / 10  # for the names at the left and below
        figsize = (columns * size + room + 1.2, rows * (size + 0.3) + room + 0.5)
        figure = Figure(figsize=figsize, layout="constrained")
        for index, (label, counts) in enumerate(drawn):
            axes = figure.add_subplot(rows, columns, index + 1)
            image = _matrix(axes, counts.sum(axis=0))
            axes.set_title(shorten(label, int(0.85 * size / LETTER)), loc="left", fontsize=10)
            _label_classes(axes, names, left=index % columns == 0, below=index + columns >= len(drawn))
        more = f"; {len(drawn)} of {len(matrices)} methods" if len(matrices) > len(drawn) else ""
        figure.supxlabel(f"prediction {_under(results_by_method, attack)}{_seeds(drawn)}{more}", fontsize=10)
        figure.supylabel("true class", fontsize=10)
        bar = figure.colorbar(image, ax=figure.axes, shrink=0.8, aspect=30, label="share of the true class (%)")
        bar.outline.set_visible(False)
        return finish(figure, [], path, grid=None)


def _under(results: ByMethod, attack: str) -> str:
    if attack == "clean":
        return "on clean images"
    return (
        f"under {attack_of(run for runs in results.values() for run in runs) if attack == 'pgd' else shorten(attack)}"
    )


def _seeds(drawn: Sequence[tuple[str, npt.NDArray[np.int64]]]) -> str:
    counts = sorted({len(matrix) for _, matrix in drawn})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f", sum of {number} seeds" if counts[-1] > 1 else ""


def _matrix(axes: Axes, counts: npt.NDArray[np.int64]) -> Any:
    """Draw one matrix. The color is the share of the row, so that rare classes show as well as common ones."""
    shares: Floats = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap=COLOR_MAP, vmin=0, vmax=100, interpolation="none")
    axes.spines[:].set_visible(False)
    if len(counts) <= MAX_COUNTED:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                red, green, blue, _ = COLOR_MAP(shares[row, column] / 100)
                # The page must not replace these colors by its text color, as it does with pure black.
                color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "#111111"
                axes.text(column, row, f"{count}", ha="center", va="center", fontsize=7, color=color)
    return image


def _label_classes(axes: Axes, names: list[str], left: bool, below: bool) -> None:
    """Write class names at the outer edges of the figure; of many classes only every second or third."""
    ticks = range(0, len(names), math.ceil(len(names) / MAX_NAMED))
    size = _font_size(names)
    axes.set_xticks(ticks, [names[tick] for tick in ticks] if below else [""] * len(ticks), rotation=90, fontsize=size)
    axes.set_yticks(ticks, [names[tick] for tick in ticks] if left else [""] * len(ticks), fontsize=size)
    axes.tick_params(length=0)


def _font_size(names: list[str]) -> int:
    return 9 if len(names) <= MAX_COUNTED else 6

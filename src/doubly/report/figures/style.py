"""Colors, markers, axes and legends of the figures, for print and screen, light and dark, color and gray."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from doubly.files import make_folder, replacing
from doubly.report.figures.values import over_seeds

INK = "#1c1d20"  # text and axes; the page replaces it by its own text color
# The palette of Okabe and Ito, with gray for their yellow, which cannot be seen on white. Each list repeats on its own:
# the lengths have no common factor with seven, so that at least 28 methods differ.
COLORS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#868A91")
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")
MAX_POINTS = 400  # of a line
LEGEND_SIZE = 9
LETTER = 0.083  # width of a letter on an axis, in inches
MARGIN = 0.7  # room for the axis on the left, in inches
MAX_WIDTH = 9.2  # inches; the page would shrink a wider figure too far
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a class name may contain a dollar sign
    "svg.fonttype": "none",
    "hatch.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@contextmanager
def style(path: Path) -> Iterator[None]:
    """Set the style while a figure is drawn, with ids inside the SVG that no other figure on the page has."""
    settings: Any = {**STYLE, "svg.hashsalt": f"doubly {path.name}"}
    with mpl.rc_context(settings), warnings.catch_warnings():
        # The font may lack the script of a name: the PNG shows boxes, the SVG keeps the text for the browser.
        warnings.filterwarnings("ignore", "Glyph|Matplotlib currently does not support", UserWarning)
        yield


def look(index: int) -> dict[str, Any]:
    """Return color and marker of the method at this index."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def curve(axes: Axes, index: int, label: str, series: Sequence[Mapping[Any, float]], steps: bool = False) -> None:
    """Draw the mean over seeds with a band of one sd, on at most `MAX_POINTS` points.

    Args:
        axes: Where to draw.
        index: Index of the method, which decides color, marker and dashes.
        label: Label in the legend.
        series: For each seed x -> y.
        steps: Draw a value that stays constant until the next x.
    """
    all_x = sorted({x for points in series for x in points})
    if not all_x:
        return
    thinned = np.unique(np.linspace(0, len(all_x) - 1, min(len(all_x), MAX_POINTS)).round().astype(int))
    drawn_x = [all_x[index] for index in thinned]
    mean, sd = over_seeds([[points.get(x, np.nan) for x in drawn_x] for points in series])
    color, marker = look(index).values()
    shape: dict[str, Any] = {"linestyle": DASHES[index % len(DASHES)], "linewidth": 1.6, "markersize": 4}
    shape |= {"drawstyle": "steps-post"} if steps else {}
    axes.plot(drawn_x, mean, color=color, label=label, marker=marker if len(drawn_x) <= 15 else "", **shape)
    if sd.any():
        shape = {"linewidth": 0, "step": "post" if steps else None}
        axes.fill_between(drawn_x, mean - sd, mean + sd, color=color, alpha=0.18, **shape)


def logarithmic(axes: Axes, direction: Literal["x", "y"], low: float, high: float) -> None:
    """Make an axis logarithmic with plain numbers at the ticks, since TeX for powers is switched off."""
    axis = axes.xaxis if direction == "x" else axes.yaxis
    (axes.set_xscale if direction == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def log_if_wide(axes: Axes, direction: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic if the values span more than a factor of ten."""
    numbers = [value for value in values if not math.isnan(value)]
    if numbers and 0 < 10 * min(numbers) < max(numbers):
        logarithmic(axes, direction, min(numbers), max(numbers))


def finish(
    figure: Figure, panels: Sequence[Axes], path: Path, grid: Literal["x", "y", "both"] | None = "y"
) -> Literal[True]:
    """Add a light grid and one legend above all panels, and write the PNG and the SVG.

    Args:
        figure: The figure.
        panels: Axes that get the grid and whose labels stand in the legend.
        path: Path without ending.
        grid: Axes of the grid lines; None for no grid.

    Returns:
        True, as every function that has drawn a figure.
    """
    for axes in panels if grid else ():
        axes.grid(axis=grid or "y", color="#8a8d93", alpha=0.3, linewidth=0.6)
    _legend(figure, panels)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # so that the layout is computed once and not for each file
    make_folder(path.parent)
    with replacing(path.with_name(f"{path.name}.png")) as file:
        figure.savefig(file, dpi=200, facecolor="white")
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # so that equal runs give equal bytes
    with replacing(path.with_name(f"{path.name}.svg")) as file:
        figure.savefig(file, transparent=True, metadata=no_metadata)
    return True


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Draw the legend, and make the figure taller by its height, so that the panels keep their size."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    width, height = figure.get_size_inches()
    columns = max(1, min(6, len(entries), int(width / (0.6 + 0.08 * max(map(len, entries))))))
    rows = math.ceil(len(entries) / columns)
    figure.set_size_inches(width, height + 0.2 * rows)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=LEGEND_SIZE,
    )


def flat_width(ticks: Sequence[str]) -> float:
    """Return the width in inches of an axis on which no name runs into the next."""
    lengths = [len(tick) for tick in ticks]
    pairs = [(a + b) / 2 for a, b in pairwise(lengths)]
    return LETTER * (max(pairs, default=lengths[0]) + 1) * len(ticks)


def panel_size(ticks: Sequence[str], min_width: float) -> tuple[float, float]:
    """Return the width of a panel, and the height that its tick labels add if they must be vertical, in inches."""
    flat = flat_width(ticks) + MARGIN
    width = max(min_width, flat) if flat <= MAX_WIDTH else min_width
    return width, 0.0 if flat <= width else LETTER * max(map(len, ticks))

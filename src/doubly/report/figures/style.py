"""How the pictures look: colors, marks, axes and legend, for print and screen, light and dark, and in gray."""

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

from doubly.report.figures.values import over_seeds

INK = "#1c1d20"  # text and axes; the page swaps it for its own text color
# Okabe and Ito, with gray for their yellow, which is lost on white. Each list goes round on its own: the lengths have
# no common factor with seven, so that 28 methods and more differ.
COLORS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#868A91")
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")
MOST_POINTS = 400  # of a line
LEGEND_SIZE = 9
LETTER = 0.083  # inches, of a name on an axis
MARGIN = 0.7  # inches, for the axis on the left
FLAT = 9.2  # inches; wider, a page would shrink it too far
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
    """With names for the parts of an SVG that no other picture on the page has."""
    settings: Any = {**STYLE, "svg.hashsalt": f"doubly {path.name}"}
    with mpl.rc_context(settings), warnings.catch_warnings():
        # A name may be in a script that the font lacks: boxes in the PNG, while the SVG keeps the text for the browser.
        warnings.filterwarnings("ignore", "Glyph|Matplotlib currently does not support", UserWarning)
        yield


def look(index: int) -> dict[str, Any]:
    """Color and marker of the method at this place among the methods."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def curve(axes: Axes, index: int, label: str, series: Sequence[Mapping[Any, float]], steps: bool = False) -> None:
    """Mean over seeds with a band of one sd, thinned out to what can be seen."""
    places = sorted({place for one in series for place in one})
    if not places:
        return
    kept = np.unique(np.linspace(0, len(places) - 1, min(len(places), MOST_POINTS)).round().astype(int))
    x = [places[index] for index in kept]
    mean, sd = over_seeds([[one.get(place, np.nan) for place in x] for one in series])
    color, marker = look(index).values()
    shape: dict[str, Any] = {"linestyle": DASHES[index % len(DASHES)], "linewidth": 1.6, "markersize": 4}
    shape |= {"drawstyle": "steps-post"} if steps else {}
    axes.plot(x, mean, color=color, label=label, marker=marker if len(x) <= 15 else "", **shape)
    if sd.any():
        axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.18, linewidth=0, step="post" if steps else None)


def logarithmic(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """Plain numbers at the ticks: matplotlib would write powers in TeX, which is switched off."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def log_if_wide(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Logarithmic where the values span more than a factor of ten."""
    known = [value for value in values if not math.isnan(value)]
    if known and 0 < 10 * min(known) < max(known):
        logarithmic(axes, which, min(known), max(known))


def finish(
    figure: Figure, panels: Sequence[Axes], path: Path, grid: Literal["x", "y", "both"] | None = "y"
) -> Literal[True]:
    """Light grid, one legend above all panels for whatever has a label, and both files."""
    for axes in panels if grid else ():
        axes.grid(axis=grid or "y", color="#8a8d93", alpha=0.3, linewidth=0.6)
    _legend(figure, panels)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is found: once, not for each file again
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_name(f"{path.name}.png"), dpi=200, facecolor="white")
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # the same runs give the same bytes
    figure.savefig(path.with_name(f"{path.name}.svg"), transparent=True, metadata=nothing)
    return True


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """The figure grows by what the legend takes, so that many methods do not eat the picture."""
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
    """Inches of axis on which no name runs into the next; on a narrower one they stand upright."""
    lengths = [len(tick) for tick in ticks]
    pairs = [(a + b) / 2 for a, b in pairwise(lengths)]
    return LETTER * (max(pairs, default=lengths[0]) + 1) * len(ticks)


def fitting(ticks: Sequence[str], least: float) -> tuple[float, float]:
    """Width of a panel, a little wider where that keeps the names flat, and the height that upright names add."""
    flat = flat_width(ticks) + MARGIN
    width = max(least, flat) if flat <= FLAT else least
    return width, 0.0 if flat <= width else LETTER * max(map(len, ticks))

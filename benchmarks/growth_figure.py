"""The growth curves as pictures and as a table, from what growth.py measured. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from doubly.report.figures.style import finish, logarithmic, look, style

Curve = dict[str, Any]  # along, who, quantity, x, y
NAMES = {
    "batch": "batch",
    "steps": "attack steps K",
    "size": "image size (edge, pixels)",
    "width": "width (channels)",
    "classes": "classes",
    "images": "data (images; one epoch's loader)",
}
TITLES = {"seconds": "seconds of a step", "MiB": "peak memory of a step, MiB"}
PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # no grid through the words
ORDER = ("AT", "DONE exact", "loader")


def upper(count: int) -> int:
    """Where the fitted half of that many points begins, at least three: small sizes cost the same whatever they are."""
    return min(count // 2, max(count - 3, 0))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """p of y ~ x^p: the slope by least squares, both in logarithms, over the upper half of the points."""
    first = upper(len(x))
    return float(np.polyfit(np.log(x[first:]), np.log(np.maximum(y[first:], 1e-9)), 1)[0])


def fitted(curve: Curve) -> str:
    return f"{exponent(curve['x'], curve['y']):.2f}".replace("-0.00", "0.00").replace("-", "−")


def draw(curves: Sequence[Curve], quantity: str, path: Path) -> None:
    """One panel for each thing that grows, both axes logarithmic; fitted points are filled."""
    shown = [curve for curve in curves if curve["quantity"] == quantity]
    with style(path):
        figure = Figure(figsize=(9.0, 5.2), layout="constrained")
        panels = []
        for along in dict.fromkeys(curve["along"] for curve in shown):
            axes = figure.add_subplot(2, 3, len(panels) + 1)
            panels.append(axes)
            drawn = [curve for curve in shown if curve["along"] == along]
            for place, curve in enumerate(drawn):
                _curve(axes, curve, place)
            _scales(axes, drawn)
            axes.set_title(NAMES[along], loc="left", fontsize=10)
        for axes in panels[::3]:
            axes.set_ylabel(TITLES[quantity].partition(" of ")[0] if quantity == "seconds" else "peak memory, MiB")
        finish(figure, panels, path, grid="both")
    path.with_name(f"{path.name}.svg").unlink()  # pages show the PNG


def _curve(axes: Axes, curve: Curve, place: int) -> None:
    index = ORDER.index(curve["who"])
    color, marker = look(index).values()
    x, y, first = curve["x"], curve["y"], upper(len(curve["x"]))
    axes.plot(x, y, color=color, linewidth=1.4)
    axes.plot(x[:first], y[:first], linestyle="", marker=marker, markersize=5, color=color, markerfacecolor="white")
    axes.plot(x[first:], y[first:], linestyle="", marker=marker, markersize=5, color=color, label=curve["who"])
    text = f"{curve['who']}: exponent {fitted(curve)}"
    axes.text(0.04, 0.96 - 0.1 * place, text, transform=axes.transAxes, fontsize=9, va="top", bbox=PLAIN)


def _scales(axes: Axes, curves: Sequence[Curve]) -> None:
    """Room above the curves for the exponents."""
    values = [value for curve in curves for value in curve["y"] if value > 0]
    places = curves[0]["x"]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.tick_params(axis="x", labelsize=9)
    logarithmic(axes, "y", min(values), max(values))
    low, high = min(values) / 1.3, max(max(values), 3 * min(values))
    axes.set_ylim(low, high * (high / low) ** 0.35)


def table(curves: Sequence[Curve]) -> list[str]:
    """Rows of Markdown: the exponents."""
    rows = [
        "| against | range | fitted from | of | seconds | peak memory |",
        "| --- | --- | ---: | --- | ---: | ---: |",
    ]
    for along, who in dict.fromkeys((curve["along"], curve["who"]) for curve in curves):
        by_quantity = {c["quantity"]: c for c in curves if (c["along"], c["who"]) == (along, who)}
        x = by_quantity["seconds"]["x"]
        fits = [fitted(by_quantity[quantity]) for quantity in TITLES]
        range_ = f"{x[0]:,} to {x[-1]:,}"
        rows.append(f"| {NAMES[along]} | {range_} | {x[upper(len(x))]:,} | {who} | {' | '.join(fits)} |")
    return rows

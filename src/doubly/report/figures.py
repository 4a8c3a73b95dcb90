"""Pictures from files alone: per-class robust accuracy (fig. 1 of the paper) and learning curves (fig. 2).

A path is given without ending; each picture is written as PNG, for print, and as SVG, for the page.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from doubly.report.collect import RunResult
from doubly.report.protocol import attack_name

ByMethod = Mapping[str, Sequence[RunResult]]
Floats = npt.NDArray[np.float64]

INK = "#1c1d20"  # text and axes; the page swaps it for its own text colour
COLOURS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")  # Okabe and Ito
HATCHES = ("", "", "//", "..", "xx", "\\\\", "oo")  # so that a grey print still tells them apart
DASHES = ("-", "--", "-.", ":")
MOST_CLASSES = 40  # more names than this cannot be read side by side
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


def per_class(results_by_method: ByMethod, path: Path) -> None:
    """Grouped bars of the robust accuracy of each class, mean over seeds with its sd."""
    names = list(_first(results_by_method).evaluation["per_class"])
    spread = {label: _over_seeds([_class_accuracies(run) for run in runs]) for label, runs in results_by_method.items()}
    weakest = np.argsort(np.mean([mean for mean, _ in spread.values()], axis=0), kind="stable")
    shown = np.sort(weakest[:MOST_CLASSES])
    ticks = [_short(names[index]) for index in shown]
    longest = max(map(len, ticks))
    upright = longest * len(ticks) > 90  # the names would run into each other
    size = (max(7.2, 0.12 * len(ticks) * (1 + len(spread))), 3.6 + 0.08 * longest * upright)
    with _style(path):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for place, (mean, sd) in enumerate(spread.values()):
            _bars(axes, place, list(spread), mean[shown], sd[shown])
        axes.set_xticks(range(len(ticks)), ticks)
        axes.tick_params(axis="x", length=0, rotation=90 if upright else 0)
        axes.set_xlabel("class" if len(ticks) == len(names) else f"class (the {len(ticks)} weakest of {len(names)})")
        axes.set_ylabel(f"robust accuracy under {_attack(results_by_method)} (%)")
        axes.set(xlim=(-0.6, len(ticks) - 0.4), ylim=(0, 100))
        _finish(figure, [axes], path)


def learning_curves(results_by_method: ByMethod, path: Path) -> None:
    """Accuracies on the probe, training loss and effective sample size over the epochs: mean line, band of one sd."""
    panels: list[tuple[str, Callable[[dict[str, Any]], float | None]]] = [
        ("accuracy on the clean probe (%)", lambda row: _percent(row, "sa")),
        (f"accuracy on the probe under {_attack(results_by_method)} (%)", lambda row: _percent(row, "ra_pgd")),
        ("training loss", lambda row: row.get("loss")),
        ("effective sample size (share of the batch)", lambda row: row.get("weight_ess")),
    ]
    rows = [row for runs in results_by_method.values() for run in runs for row in run.metrics]
    recorded = [(title, value) for title, value in panels if any(value(row) is not None for row in rows)]
    with _style(path):
        height = max(1, (len(recorded) + 1) // 2)
        figure = Figure(figsize=(7.2, 2.6 * height), layout="constrained")
        grid: list[Axes] = []
        for place in range(len(recorded)):
            grid.append(figure.add_subplot(height, 2, place + 1, sharex=grid[0] if grid else None))
        for axes, (title, value) in zip(grid, recorded, strict=True):
            for index, (label, runs) in enumerate(results_by_method.items()):
                _curve(axes, index, label, [_series(run, value) for run in runs])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(figure, grid, path)


def _style(path: Path) -> AbstractContextManager[None]:
    """With names for the parts of an SVG that no other picture on the page has."""
    settings: Any = {**STYLE, "svg.hashsalt": f"doubly {path.name}"}
    return mpl.rc_context(settings)


def _bars(axes: Axes, place: int, labels: Sequence[str], mean: Floats, sd: Floats) -> None:
    """The bars of the method at this place among the methods, with error bars where seeds differ."""
    width = 0.84 / len(labels)
    x = np.arange(len(mean)) + (place - (len(labels) - 1) / 2) * width
    for bar in axes.bar(x, mean, 0.92 * width, label=labels[place], color=COLOURS[place % len(COLOURS)]):
        bar.set(hatch=HATCHES[place % len(HATCHES)], edgecolor="white", linewidth=0)
    if sd.any():
        axes.errorbar(x, mean, sd, fmt="none", ecolor=INK, elinewidth=0.9, capsize=1.5)


def _curve(axes: Axes, index: int, label: str, series: Sequence[Mapping[int, float]]) -> None:
    epochs = sorted({epoch for one in series for epoch in one})
    table = [[one.get(epoch, np.nan) for epoch in epochs] for one in series]
    if not epochs:
        return
    mean, sd = _over_seeds(table)
    colour = COLOURS[index % len(COLOURS)]
    style: dict[str, Any] = {"linestyle": DASHES[index % len(DASHES)], "linewidth": 1.8, "markersize": 3.5}
    axes.plot(epochs, mean, color=colour, label=label, marker="o" if len(epochs) <= 15 else "", **style)
    if len(series) > 1:
        axes.fill_between(epochs, mean - sd, mean + sd, color=colour, alpha=0.18, linewidth=0)


def _finish(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    """Light grid, one legend above all panels, and both files."""
    for axes in panels:
        axes.grid(axis="y", color="#8a8d93", alpha=0.3, linewidth=0.6)
    if panels:
        handles, labels = max((axes.get_legend_handles_labels() for axes in panels), key=lambda pair: len(pair[1]))
        figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    else:
        figure.text(0.5, 0.5, "no epoch was recorded", ha="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_name(f"{path.name}.png"), dpi=200, facecolor="white")
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # the same runs give the same bytes
    figure.savefig(path.with_name(f"{path.name}.svg"), transparent=True, metadata=nothing)


def _over_seeds(table: Sequence[Sequence[float]]) -> tuple[Floats, Floats]:
    """Mean and sample sd of each column; a missing value counts for nothing, and one value has no spread."""
    values = np.asarray(table, dtype=float)
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    mean = np.where(known, values, 0).sum(axis=0) / np.where(count, count, np.nan)
    squares = np.where(known, (values - mean) ** 2, 0).sum(axis=0)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1))


def _class_accuracies(run: RunResult) -> list[float]:
    accuracies = [entry["ra_pgd"] for entry in run.evaluation["per_class"].values()]
    return [np.nan if accuracy is None else 100 * accuracy for accuracy in accuracies]


def _series(run: RunResult, value: Callable[[dict[str, Any]], float | None]) -> dict[int, float]:
    return {row["epoch"]: found for row in run.metrics if (found := value(row)) is not None}


def _percent(row: Mapping[str, Any], key: str) -> float | None:
    share = row.get("probe", {}).get(key)
    return None if share is None else 100 * share


def _first(results_by_method: ByMethod) -> RunResult:
    return next(iter(results_by_method.values()))[0]


def _attack(results_by_method: ByMethod) -> str:
    return attack_name(_first(results_by_method).evaluation["protocol"])


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"

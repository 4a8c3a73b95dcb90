"""Learning curves (figure 2 of the paper), and accuracy against the size of the perturbation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from doubly.metric_names import METRICS
from doubly.report.figures.style import curve, finish, logarithmic, style
from doubly.report.figures.values import ByMethod, attack_of, to_percent, with_legend_labels
from doubly.report.protocol import attack_name
from doubly.report.run_result import RunResult

Value = Callable[[Mapping[str, Any]], float | None]
MAX_LEVELS = 32  # a larger ε is not printed as a multiple of 1/255
LR, R, LOSS = (METRICS[key].label for key in ("lr", "r", "loss"))


def learning_curves(results_by_method: ByMethod, path: Path) -> bool:
    """Draw learning rate, r, loss, effective sample size and the accuracies of the validation over the epochs."""
    methods = with_legend_labels(results_by_method)
    series = {
        title: {label: [_series(run, value) for run in runs] for label, runs in methods.items()}
        for title, value in _panels(attack_of(run for runs in methods.values() for run in runs)).items()
    }
    recorded = {title: lines for title, lines in series.items() if any(any(runs) for runs in lines.values())}
    if not recorded:
        return False
    rows = (len(recorded) + 1) // 2
    with style(path):
        figure = Figure(figsize=(7.2, 2.3 * rows), layout="constrained")
        grid: list[Axes] = []
        for title, lines in recorded.items():
            axes = figure.add_subplot(rows, 2, len(grid) + 1, sharex=grid[0] if grid else None)
            grid.append(axes)
            for index, (label, runs) in enumerate(lines.items()):
                curve(axes, index, label, runs, steps=title in (LR, R))
            _scale(axes, title, [value for runs in lines.values() for points in runs for value in points.values()])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        return finish(figure, grid, path)


def epsilon_curve(results_by_method: ByMethod, path: Path) -> bool:
    """Draw the accuracy of all classes and of the weakest 30 % of them against the size of the perturbation."""
    methods = with_legend_labels(results_by_method)
    with_curve = [run for runs in methods.values() for run in runs if run.evaluation.get("curve", {}).get("points")]
    if not with_curve:
        return False
    first = with_curve[0].evaluation["curve"]
    alike = [
        run for run in with_curve if all(run.evaluation["curve"].get(key) == first.get(key) for key in ("n", "attack"))
    ]
    shown = {label: drawn for label, runs in methods.items() if (drawn := [run for run in runs if run in alike])}
    indices = {label: index for index, label in enumerate(methods)}  # a method has the same color in all figures
    part = f"; {len(shown)} of {len(methods)} methods" if len(shown) < len(methods) else ""
    epsilons = [
        point["epsilon"] for runs in shown.values() for run in runs for point in run.evaluation["curve"]["points"]
    ]
    scale = 255 if _are_levels(epsilons) else 1
    with style(path):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, key, title in ((left, "accuracy", "all classes"), (right, "tail_30", "the weakest 30 % of classes")):
            for label, runs in shown.items():
                curve(axes, indices[label], label, [_points(run, key, scale) for run in runs])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("ε (of 255)" if scale == 255 else "ε")
        left.set_ylabel(f"accuracy under {attack_name(first)},\n{first.get('n', '?')} images (%){part}")
        left.set_ylim(0, 100)
        return finish(figure, [left, right], path)


def _panels(attack: str) -> dict[str, Value]:
    """Return the title of each panel, and the function that takes its value from a row of metrics."""
    return {
        LR: METRICS["lr"].value,
        R: METRICS["r"].value,
        LOSS: METRICS["loss"].value,
        f"{METRICS['weight_ess'].label} (share of the batch)": METRICS["weight_ess"].value,
        "validation SA (%)": lambda row: to_percent(row.get("validation", {}).get("sa")),
        f"validation RA-PGD ({attack}, %)": lambda row: to_percent(row.get("validation", {}).get("ra_pgd")),
    }


def _series(run: RunResult, value: Value) -> dict[int, float]:
    values = {row["epoch"] + 1: value(row) for row in run.metrics}  # people count from one
    return {epoch: number for epoch, number in values.items() if number is not None and np.isfinite(number)}


def _scale(axes: Axes, title: str, values: list[float]) -> None:
    """Make the axis of r logarithmic, since it falls by powers of ten, and let that of the learning rate start at 0."""
    if title == R and min(values) > 0:
        logarithmic(axes, "y", min(values), max(values))
    elif title == LR:
        axes.set_ylim(bottom=0)


def _points(run: RunResult, key: str, scale: int) -> dict[float, float]:
    """Return ε -> percent; ε is rounded, so that the same ε of two runs is the same key."""
    points = {round(scale * point["epsilon"], 6): point.get(key) for point in run.evaluation["curve"]["points"]}
    return {epsilon: to_percent(share) for epsilon, share in points.items() if share is not None}


def _are_levels(epsilons: list[float]) -> bool:
    """Return True if all are multiples of half a level of 1/255, as 8/255 is, and at most `MAX_LEVELS`."""
    doubled = 510 * np.asarray(epsilons)
    return bool(np.allclose(doubled, doubled.round(), atol=1e-4) and 0 < doubled.max() <= 2 * MAX_LEVELS)

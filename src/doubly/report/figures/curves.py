"""Lines: what was recorded over the epochs (fig. 2 of the paper), and accuracy against the strength of the attack."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from doubly.report.figures.style import curve, finish, logarithmic, style
from doubly.report.figures.values import ByMethod, attack_of, named, percent
from doubly.report.protocol import attack_name
from doubly.report.run_result import RunResult

Value = Callable[[Mapping[str, Any]], float | None]
STEPS_OF_255 = 32  # a larger ε is not counted in steps of an image's values


def learning_curves(results_by_method: ByMethod, path: Path) -> bool:
    """Learning rate, r, loss, effective sample size and the accuracies on the validation: mean line, band of one sd."""
    shown = named(results_by_method)
    series = {
        title: {label: [_series(run, value) for run in runs] for label, runs in shown.items()}
        for title, value in _panels(attack_of(run for runs in shown.values() for run in runs)).items()
    }
    recorded = {title: lines for title, lines in series.items() if any(one for runs in lines.values() for one in runs)}
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
                curve(axes, index, label, runs, steps=title in ("learning rate", "r"))
            _scale(axes, title, [value for runs in lines.values() for one in runs for value in one.values()])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        return finish(figure, grid, path)


def epsilon_curve(results_by_method: ByMethod, path: Path) -> bool:
    """Accuracy of all classes and of the weakest 30 % of them against the size of the perturbation."""
    methods = named(results_by_method)
    having = [run for runs in methods.values() for run in runs if run.evaluation.get("curve", {}).get("points")]
    if not having:
        return False
    about = having[0].evaluation["curve"]
    alike = [
        run for run in having if all(run.evaluation["curve"].get(key) == about.get(key) for key in ("n", "attack"))
    ]
    shown = {label: kept for label, runs in methods.items() if (kept := [run for run in runs if run in alike])}
    places = {label: place for place, label in enumerate(methods)}  # a method has one color on all pictures
    part = f"; {len(shown)} of {len(methods)} methods" if len(shown) < len(methods) else ""
    epsilons = [
        point["epsilon"] for runs in shown.values() for run in runs for point in run.evaluation["curve"]["points"]
    ]
    scale = 255 if _in_steps(epsilons) else 1
    with style(path):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, key, title in ((left, "accuracy", "all classes"), (right, "tail_30", "the weakest 30 % of classes")):
            for label, runs in shown.items():
                curve(axes, places[label], label, [_points(run, key, scale) for run in runs])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("ε (of 255)" if scale == 255 else "ε")
        left.set_ylabel(f"accuracy under {attack_name(about)},\n{about.get('n', '?')} images (%){part}")
        left.set_ylim(0, 100)
        return finish(figure, [left, right], path)


def _panels(attack: str) -> dict[str, Value]:
    return {
        "learning rate": lambda row: row.get("lr"),
        "r": lambda row: row.get("r"),
        "training loss": lambda row: row.get("loss"),
        "effective sample size (share of the batch)": lambda row: row.get("weight_ess"),
        "SA on the validation (%)": lambda row: percent(row.get("validation", {}).get("sa")),
        f"RA-PGD on the validation ({attack}, %)": lambda row: percent(row.get("validation", {}).get("ra_pgd")),
    }


def _series(run: RunResult, value: Value) -> dict[int, float]:
    found = {row["epoch"] + 1: value(row) for row in run.metrics}  # people count from one
    return {epoch: number for epoch, number in found.items() if number is not None and np.isfinite(number)}


def _scale(axes: Axes, title: str, values: list[float]) -> None:
    """r falls by powers of ten. A learning rate that ends near zero would fill a logarithmic axis with its end."""
    if title == "r" and min(values) > 0:
        logarithmic(axes, "y", min(values), max(values))
    elif title == "learning rate":
        axes.set_ylim(bottom=0)


def _points(run: RunResult, key: str, scale: int) -> dict[float, float]:
    """Rounded, so that the same ε of two runs is the same place."""
    points = {round(scale * point["epsilon"], 6): point.get(key) for point in run.evaluation["curve"]["points"]}
    return {epsilon: percent(share) for epsilon, share in points.items() if share is not None}


def _in_steps(epsilons: list[float]) -> bool:
    """Whether all are halves or wholes of 1/255, as 8/255 is."""
    doubled = 510 * np.asarray(epsilons)
    return bool(np.allclose(doubled, doubled.round(), atol=1e-4) and 0 < doubled.max() <= 2 * STEPS_OF_255)

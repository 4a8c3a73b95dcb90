"""The weights that KL-DRO gives to the test images: per class (figure 5 of the paper), and against the margin."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from doubly.metric_names import METRICS
from doubly.report.figures.style import COLORS, INK, finish, logarithmic, panel_size, style
from doubly.report.figures.values import (
    ByMethod,
    Floats,
    arrays,
    attack_of,
    class_accuracies,
    class_names,
    damaged,
    over_seeds,
    weakest,
    with_legend_labels,
)
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir
from doubly.text import shorten

MAX_PANELS = 3
MAX_POINTS = 2000
THRESHOLD = 0.001  # the paper's
MIN_WEIGHT = 1e-9  # smaller weights are drawn here, since a logarithmic axis has no zero
NORMALIZATIONS = {"batch": "sum 1 in a batch of {batch}", "all": "sum 1", "mean_one": "mean 1"}
Entry = Mapping[str, Any]


def weights(results_by_method: ByMethod, path: Path, r: float | None = None) -> bool:
    """Draw the weights of each class: a box from 25 to 75 % with the median, and whiskers from 5 to 95 %.

    Args:
        results_by_method: The runs; of several seeds the median of each quantile is drawn.
        path: Path without ending.
        r: The temperature of the weights; None takes the one at which training ended, 1 where none was recorded, or
            else the first r that the runs have.
    """
    methods = _with_weights(results_by_method, r)
    if not methods:
        return False
    shown = dict(list(methods.items())[:MAX_PANELS])
    runs = [run for pairs in shown.values() for run, _ in pairs]
    names, first = class_names(runs[0]), next(iter(shown.values()))[0][1]
    drawn = weakest(over_seeds([class_accuracies(run) for run in runs])[0])
    ticks = [shorten(names[index]) for index in drawn]
    width, extra = panel_size(ticks, max(7.2, 0.2 * len(drawn)))
    with style(path):
        height = 2.3 + extra + 0.5 * (extra > 0)  # room for the accuracy behind the name
        figure = Figure(figsize=(width, len(shown) * height + 0.4), layout="constrained")
        panels = list(figure.subplots(len(shown), 1, squeeze=False, sharey=True)[:, 0])
        for axes, (label, pairs) in zip(panels, shown.items(), strict=True):
            _boxes(axes, [entry for _, entry in pairs], [names[index] for index in drawn])
            accuracies = over_seeds([class_accuracies(run) for run, _ in pairs])[0][drawn]
            labels = [_tick_label(tick, accuracy, extra > 0) for tick, accuracy in zip(ticks, accuracies, strict=True)]
            axes.set_xticks(range(len(ticks)), labels, rotation=90 if extra else 0)
            axes.tick_params(axis="x", length=0)
            axes.set_title(f"{label}, r = {first['r']:g}", loc="left", fontsize=10)
        weak = "" if len(drawn) == len(names) else f", the {len(drawn)} weakest of {len(names)}"
        more = f"; {len(shown)} of {len(methods)} methods" if len(methods) > len(shown) else ""
        figure.supxlabel(f"class and its robust accuracy under {attack_of(runs)}{weak}{more}", fontsize=10)
        normalized = NORMALIZATIONS.get(first.get("normalize", ""), "").format(batch=first.get("batch", "?"))
        figure.supylabel(f"weight,\n{normalized}" if normalized else "weight", fontsize=10)
        return finish(figure, panels, path)


def weight_against_margin(run: RunResult, path: Path, r: float = 1.0) -> bool:
    """Draw the weight of each test image, scaled to a mean of 1, against its logit margin under attack.

    Args:
        run: The run whose evaluation.npz holds the losses and margins.
        path: Path without ending.
        r: The temperature of the weights.

    Raises:
        UsageError: If evaluation.npz is damaged.
    """
    file = RunDir(run.path).predictions
    saved = arrays(file, ("pgd_losses", "pgd_margins"))
    if not saved or len(saved) < 2:
        return False
    losses, margins = saved["pgd_losses"], saved["pgd_margins"]
    if losses.ndim != 1 or losses.shape != margins.shape:
        raise damaged(file, f"{margins.size} margins for {losses.size} losses")
    finite = np.isfinite(losses) & np.isfinite(margins)
    if not finite.any():
        return False
    losses, margins = losses[finite], margins[finite]
    unscaled = np.exp((losses - losses.max()) / r)
    weight = np.maximum(unscaled / unscaled.mean(), MIN_WEIGHT)
    drawn = np.sort(np.random.default_rng(0).permutation(len(losses))[:MAX_POINTS])
    correct = margins > 0
    with style(path):
        figure = Figure(figsize=(5.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for chosen, label, color, marker in ((correct, "correct", COLORS[1], "o"), (~correct, "wrong", COLORS[4], "x")):
            share = f"{label} under {attack_of([run])}, {chosen.mean():.0%}"
            points = drawn[chosen[drawn]]
            axes.plot(margins[points], weight[points], marker, color=color, markersize=3, alpha=0.6, label=share)
        logarithmic(axes, "y", weight[drawn].min(), weight[drawn].max())
        axes.axvline(0, color=INK, linewidth=0.8)
        part = f"{len(drawn):,} of {len(losses):,} images" if len(drawn) < len(losses) else f"{len(drawn):,} images"
        axes.set_xlabel(f"logit margin under attack: true class minus largest other\n({part})")
        axes.set_ylabel(f"weight at r = {r:g} (mean 1)")
        axes.set_title(f"{shorten(run.method)}, seed {run.seed}", loc="left", fontsize=10)
        return finish(figure, [axes], path, grid="both")


def _with_weights(results: ByMethod, r: float | None) -> dict[str, list[tuple[RunResult, Entry]]]:
    """Return the runs that have quantiles of the weights, all at the same r and with the same normalization."""
    methods = with_legend_labels(results)
    if r is None:
        r = _default_temperature([run for runs in methods.values() for run in runs])
    pairs_of = {label: [(run, e) for run in runs if (e := _entry(run, r))] for label, runs in methods.items()}
    first = next((_kind(entry) for pairs in pairs_of.values() for _, entry in pairs), None)
    alike = {label: [pair for pair in pairs if _kind(pair[1]) == first] for label, pairs in pairs_of.items()}
    return {label: pairs for label, pairs in alike.items() if pairs}


def _tick_label(tick: str, accuracy: float, vertical: bool) -> str:
    share = "–" if np.isnan(accuracy) else f"{accuracy:.0f} %"
    return f"{tick}, {share}" if vertical else f"{tick}\n{share}"


def _default_temperature(runs: Sequence[RunResult]) -> float | None:
    """Return the r at which training ended if weights were saved at it; else 1, or else the first that was saved."""
    final = [value for run in runs if run.metrics and (value := METRICS["r"].value(run.metrics[-1])) is not None]
    saved = [entry["r"] for run in runs for entry in _entries(run)]
    return next((r for r in (*final, 1.0, *saved) if r in saved), None)


def _entries(run: RunResult) -> list[Entry]:
    """Return the saved weights that have quantiles."""
    return [entry for entry in run.evaluation.get("weights", []) if entry.get("quantiles_per_class")]


def _entry(run: RunResult, r: float | None) -> Entry | None:
    """Return the weights at this r if their quantiles were saved."""
    return next((entry for entry in _entries(run) if entry["r"] == r), None)


def _kind(entry: Entry) -> tuple[Any, ...]:
    return entry["r"], entry.get("normalize"), entry.get("batch")


def _boxes(axes: Axes, entries: Sequence[Entry], names: Sequence[str]) -> None:
    quantiles = [[entry["quantiles_per_class"].get(name) or [np.nan] * 5 for entry in entries] for name in names]
    table: Floats = np.maximum(np.median(np.asarray(quantiles, dtype=float), axis=1), MIN_WEIGHT)
    boxes = [
        {"whislo": low, "q1": lower, "med": middle, "q3": upper, "whishi": high}
        for low, lower, middle, upper, high in table
    ]
    axes.bxp(
        boxes,
        positions=range(len(names)),
        widths=0.6,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": COLORS[5], "edgecolor": INK, "linewidth": 0.8},
        medianprops={"color": "black", "linewidth": 1.6},
        whiskerprops={"color": INK, "linewidth": 0.8},
        capprops={"color": INK, "linewidth": 0.8},
    )
    axes.axhline(THRESHOLD, color=COLORS[4], linestyle="--", linewidth=1.2, label=f"{THRESHOLD:g}")
    logarithmic(axes, "y", np.nanmin([*table.flat, THRESHOLD]), np.nanmax([*table.flat, THRESHOLD]))

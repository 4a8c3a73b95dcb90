"""The weights that KL-DRO gives to the samples: per class (fig. 5 of the paper), and against the margin."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from doubly.report.figures.style import COLORS, INK, finish, fitting, logarithmic, style
from doubly.report.figures.values import (
    ByMethod,
    Floats,
    arrays,
    attack_of,
    class_accuracies,
    class_names,
    damaged,
    named,
    over_seeds,
    short,
    weakest,
)
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir

PANELS = 3
POINTS = 2000
THRESHOLD = 0.001  # the paper's
LEAST = 1e-9  # smaller weights are drawn here: on a logarithmic axis nothing is zero
NORMALizED = {"batch": "sum 1 in a batch of {batch}", "all": "sum 1", "mean_one": "of mean 1"}
Entry = Mapping[str, Any]


def weights(results_by_method: ByMethod, path: Path, r: float | None = None) -> bool:
    """For each class a box from 25 to 75 % with the median, whiskers from 5 to 95 %; over seeds the median of each."""
    methods = _methods(results_by_method, r)
    if not methods:
        return False
    shown = dict(list(methods.items())[:PANELS])
    runs = [run for pairs in shown.values() for run, _ in pairs]
    names, first = class_names(runs[0]), next(iter(shown.values()))[0][1]
    kept = weakest(over_seeds([class_accuracies(run) for run in runs])[0])
    ticks = [short(names[index]) for index in kept]
    width, extra = fitting(ticks, max(7.2, 0.2 * len(kept)))
    with style(path):
        height = 2.3 + extra + 0.5 * (extra > 0)  # for the accuracy behind the name
        figure = Figure(figsize=(width, len(shown) * height + 0.4), layout="constrained")
        panels = list(figure.subplots(len(shown), 1, squeeze=False, sharey=True)[:, 0])
        for axes, (label, pairs) in zip(panels, shown.items(), strict=True):
            _boxes(axes, [entry for _, entry in pairs], [names[index] for index in kept])
            accuracies = over_seeds([class_accuracies(run) for run, _ in pairs])[0][kept]
            marks = [_mark(tick, accuracy, extra > 0) for tick, accuracy in zip(ticks, accuracies, strict=True)]
            axes.set_xticks(range(len(ticks)), marks, rotation=90 if extra else 0)
            axes.tick_params(axis="x", length=0)
            axes.set_title(f"{label}, r = {first['r']:g}", loc="left", fontsize=10)
        weak = "" if len(kept) == len(names) else f", the {len(kept)} weakest of {len(names)}"
        more = f"; {len(shown)} of {len(methods)} methods" if len(methods) > len(shown) else ""
        figure.supxlabel(f"class and its robust accuracy under {attack_of(runs)}{weak}{more}", fontsize=10)
        normalized = NORMALizED.get(first.get("normalize", ""), "").format(batch=first.get("batch", "?"))
        figure.supylabel(f"weight,\n{normalized}" if normalized else "weight", fontsize=10)
        return finish(figure, panels, path)


def weight_against_margin(run: RunResult, path: Path, r: float = 1.0) -> bool:
    """Each image's weight at this r, of mean one, against how far its class leads under attack."""
    file = RunDir(run.path).predictions
    kept = arrays(file, ("pgd_losses", "pgd_margins"))
    if not kept or len(kept) < 2:
        return False
    losses, margins = kept["pgd_losses"], kept["pgd_margins"]
    if losses.ndim != 1 or losses.shape != margins.shape:
        raise damaged(file, f"{margins.size} margins for {losses.size} losses")
    known = np.isfinite(losses) & np.isfinite(margins)
    if not known.any():
        return False
    losses, margins = losses[known], margins[known]
    grown = np.exp((losses - losses.max()) / r)
    weight = np.maximum(grown / grown.mean(), LEAST)
    drawn = np.sort(np.random.default_rng(0).permutation(len(losses))[:POINTS])
    right = margins > 0
    with style(path):
        figure = Figure(figsize=(5.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for chosen, label, color, marker in ((right, "right", COLORS[1], "o"), (~right, "wrong", COLORS[4], "x")):
            share = f"{label} under {attack_of([run])}, {chosen.mean():.0%}"
            points = drawn[chosen[drawn]]
            axes.plot(margins[points], weight[points], marker, color=color, markersize=3, alpha=0.6, label=share)
        logarithmic(axes, "y", weight[drawn].min(), weight[drawn].max())
        axes.axvline(0, color=INK, linewidth=0.8)
        part = f"{len(drawn):,} of {len(losses):,} images" if len(drawn) < len(losses) else f"{len(drawn):,} images"
        axes.set_xlabel(f"margin under attack: logit of the class less the largest other\n({part})")
        axes.set_ylabel(f"weight at r = {r:g}, of mean 1")
        axes.set_title(f"{short(run.method)}, seed {run.seed}", loc="left", fontsize=10)
        return finish(figure, [axes], path, grid="both")


def _methods(results: ByMethod, r: float | None) -> dict[str, list[tuple[RunResult, Entry]]]:
    """The runs that kept quantiles, all of the same r and normalization."""
    found = {label: [(run, e) for run in runs if (e := _entry(run, r))] for label, runs in named(results).items()}
    first = next((_kind(entry) for pairs in found.values() for _, entry in pairs), None)
    alike = {label: [pair for pair in pairs if _kind(pair[1]) == first] for label, pairs in found.items()}
    return {label: pairs for label, pairs in alike.items() if pairs}


def _mark(tick: str, accuracy: float, turned: bool) -> str:
    share = "–" if np.isnan(accuracy) else f"{accuracy:.0f} %"
    return f"{tick}, {share}" if turned else f"{tick}\n{share}"


def _entry(run: RunResult, r: float | None) -> Entry | None:
    """The weights at this r, if their quantiles were kept; without an r, at 1 or else the first."""
    entries = [entry for entry in run.evaluation.get("weights", []) if entry.get("quantiles_per_class")]
    usual = None if r is not None or not entries else entries[0]
    return next((entry for entry in entries if entry["r"] == (1.0 if r is None else r)), usual)


def _kind(entry: Entry) -> tuple[Any, ...]:
    return entry["r"], entry.get("normalize"), entry.get("batch")


def _boxes(axes: Axes, entries: Sequence[Entry], names: Sequence[str]) -> None:
    quantiles = [[entry["quantiles_per_class"].get(name) or [np.nan] * 5 for entry in entries] for name in names]
    table: Floats = np.maximum(np.median(np.asarray(quantiles, dtype=float), axis=1), LEAST)
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

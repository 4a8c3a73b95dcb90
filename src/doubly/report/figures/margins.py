"""Logit margins of the test images under attack: how far from the decision each method leaves them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from doubly.report.figures.style import COLORS, DASHES, INK, finish, style
from doubly.report.figures.values import ByMethod, Floats, arrays, with_legend_labels
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir

ATTACKED, CLEAN = "margin_margins", "clean_margins"  # in evaluation.npz
BINS = 40
QUANTILES = (0.01, 0.99)  # of all margins, which the axis spans


def margin_histograms(results_by_method: ByMethod, path: Path) -> bool:
    """Draw histograms of the logit margins under the margin attack: as they are, and in units of the spread.

    The spread is the standard deviation of the margins of the clean images of the same network, so that the second
    panel does not depend on how large the logits of a network are.

    Args:
        results_by_method: The runs; images of all seeds are counted together.
        path: Path without ending.

    Raises:
        UsageError: If an evaluation.npz is damaged.
    """
    margins = {
        label: pair for label, runs in with_legend_labels(results_by_method).items() if (pair := margin_values(runs))
    }
    if not margins:
        return False
    titles = ("logit margin under attack; below 0 the attack wins", "the same in units of the spread of clean margins")
    with style(path):
        figure = Figure(figsize=(9.2, 3.4), layout="constrained")
        panels = list(figure.subplots(1, 2))
        for column, (axes, title) in enumerate(zip(panels, titles, strict=True)):
            low, high = np.quantile(np.concatenate([pair[column] for pair in margins.values()]), QUANTILES)
            edges = np.linspace(low, high, BINS + 1)
            for index, (label, pair) in enumerate(margins.items()):
                counts = np.histogram(pair[column], edges)[0]
                look = {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)]}
                axes.stairs(100 * counts / len(pair[column]), edges, linewidth=1.6, label=label, **look)
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.set_xlabel(title)
        panels[0].set_ylabel("images in a bin (%)")
        return finish(figure, panels, path)


def margin_values(runs: Sequence[RunResult]) -> tuple[Floats, Floats] | None:
    """Return the finite margins under attack of all runs, as they are and in units of the spread; None without any."""
    raw, scaled = [], []
    for run in runs:
        saved = arrays(RunDir(run.path).predictions, (ATTACKED, CLEAN))
        if saved and len(saved) == 2:
            attacked, clean = (part[np.isfinite(part)].astype(np.float64) for part in (saved[ATTACKED], saved[CLEAN]))
            if len(attacked) and len(clean) and clean.std() > 0:
                raw.append(attacked)
                scaled.append(attacked / clean.std())
    return (np.concatenate(raw), np.concatenate(scaled)) if raw else None

"""The ratios of all benchmarks as bars, with a mark at each aim."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lines import Line
from matplotlib.figure import Figure

MET, MISSED, NO_AIM = "#3b7dd8", "#d8733b", "#9aa5b1"


def draw_ratios(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw every ratio that has an aim, or nothing if there is none."""
    rows = [
        (result["title"], Line(**{**line, "values": tuple(line["values"])}))
        for result in results.values()
        for line in (result.get("outcome") or {}).get("lines", [])
    ]
    rows = [(title, line) for title, line in rows if line.values and line.aim is not None and line.unit == ""]
    if not rows:
        return
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for y, (_, line) in enumerate(rows):
        low, high = line.interval if len(line.values) > 2 else (line.median, line.median)
        axes.barh(y, line.median, color=MET if line.verdict == "met" else MISSED, height=0.6)
        axes.plot([low, high], [y, y], color="black", linewidth=1)
        axes.plot([line.aim] * 2, [y - 0.4, y + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), [f"{line.what}\n{title}" for title, line in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ratio (thick: aim, thin: 95 % interval)", fontsize=9)
    axes.set_title("blue: aim met, orange: missed", fontsize=9)
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})

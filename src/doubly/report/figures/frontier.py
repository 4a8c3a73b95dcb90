"""Average against tail along the class offsets of networks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from doubly.report.figures.style import DASHES, finish, look, style
from doubly.report.protocol import attack_name
from doubly.text import shorten


def frontier(frontiers_by_method: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> bool:
    """Draw average against tail along the offsets of each network, with 95 % intervals.

    Args:
        frontiers_by_method: Contents of frontier.json by label, one for each seed.
        path: Path of the figure, without ending.
    """
    methods = {label: frontiers for label, frontiers in frontiers_by_method.items() if frontiers}
    if not methods:
        return False
    protocol = next(iter(methods.values()))[0]["protocol"]
    with style(path):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        for index, (label, frontiers) in enumerate(methods.items()):
            for seed, one in enumerate(frontiers):
                points = sorted(one["points"], key=lambda point: float(point["scale"]))
                x, y = ([100 * point[key][0] for point in points] for key in ("average", "tail"))
                tail_ends, average_ends = (_distances(points, key) for key in ("tail", "average"))
                color, marker = look(index).values()
                axes.errorbar(x, y, tail_ends, average_ends, fmt="none", ecolor=color, elinewidth=0.7, alpha=0.35)
                axes.plot(
                    x,
                    y,
                    color=color,
                    marker=marker,
                    markersize=5,
                    linewidth=1.4,
                    linestyle=DASHES[index % len(DASHES)],
                    label="_" if seed else _legend_label(label),
                )
                axes.plot(x[0], y[0], color=color, marker=marker, markersize=9, markerfacecolor="none")
        axes.set_xlabel(f"average accuracy under {_attack(protocol)}, {protocol.get('n', '?')} images (%)")
        axes.set_ylabel("weakest 30 % of classes (%)")
        axes.margins(0.08)
        return finish(figure, [axes], path, grid="both")


def _distances(points: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    """Return the distances of the values to the lower and to the upper ends of their intervals, in percent."""
    values = [point[key] for point in points]
    return [[100 * max(0.0, v - low) for v, low, _ in values], [100 * max(0.0, high - v) for v, _, high in values]]


def _legend_label(label: str) -> str:
    name = shorten(label, 40)
    return f" {name}" if name.startswith("_") else name  # matplotlib leaves such labels out of the legend


def _attack(protocol: Mapping[str, Any]) -> str:
    """Return the name of the attack, which the protocol describes under its name unless it is pgd."""
    settings = protocol.get("attacks", {}).get(protocol.get("name"), protocol.get("attack", {}))
    on_margin = isinstance(settings, Mapping) and (settings.get("loss") or {}).get("kind") == "loss.logit_margin"
    return ("margin " if on_margin else "") + attack_name({"attack": settings})

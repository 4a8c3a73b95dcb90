"""How the cost of one hypergradient grows, and its picture; a part of bilevel.py."""

import statistics
import weakref
from collections import Counter
from math import log
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from bilevel_cases import (
    OURS,
    TORCHOPT,
    UNROLLED,
    Effort,
    Estimate,
    Rounds,
    alternate,
    make_estimates,
    quadratic,
    ratio,
    separable,
)
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from torch import Tensor

MARKS = {  # the colors of Okabe and Ito, which marker and line tell apart too
    OURS: {"color": "#0072B2", "marker": "o"},
    UNROLLED: {"color": "#D55E00", "marker": "s"},
    TORCHOPT: {"color": "#009E73", "marker": "^"},
    "ours, Direct": {"color": "#56B4E9", "marker": "D"},
    "ours, Diagonal": {"color": "#CC79A7", "marker": "v"},
}
LINES = {OURS: "-", UNROLLED: "--", TORCHOPT: ":"}
BASE = {"M": 64, "p": 64, "d": 16, "K": 20}
GROWTH = {
    "M": [32, 128, 512, 2048, 8192],
    "p": [64, 256, 1024, 4096, 16384],
    "d": [8, 64, 128, 256],
    "K": [5, 20, 80, 320, 1280],
}
MEANING = {"M": "samples M", "p": "parameters p of θ", "d": "coordinates d of each δᵢ", "K": "inner steps K"}
FITTED = 3  # the largest sizes: below them the cost is that of calling torch at all


class Held:
    """A tensor that autograd keeps, as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(estimate: Estimate, data: tuple[Tensor, ...]) -> int:
    """The largest number of bytes that autograd kept for its backward passes at one time, without the data."""
    holders: Counter[int] = Counter()
    data_addresses = {tensor.untyped_storage().data_ptr() for tensor in data}
    current = largest = 0

    def release(address: int, count: int) -> None:
        nonlocal current
        holders[address] -= 1
        current -= count if holders[address] == 0 else 0

    def pack(tensor: Tensor) -> Held:
        nonlocal current, largest
        storage, held = tensor.untyped_storage(), Held(tensor)
        if storage.data_ptr() not in data_addresses:
            holders[storage.data_ptr()] += 1
            current += storage.nbytes() if holders[storage.data_ptr()] == 1 else 0
            largest = max(largest, current)
            weakref.finalize(held, release, storage.data_ptr(), storage.nbytes())
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        estimate()
    return largest


def growth(name: str) -> Rounds:
    """Seconds of each estimator at each value of one size, the others as in BASE."""
    curves: Rounds = {}
    for value in GROWTH[name]:
        sizes = BASE | {name: value}
        case = quadratic(sizes["M"], sizes["p"], sizes["d"])
        for label, seconds in alternate(make_estimates(case, Effort(sizes["K"], 10)), 2, 3).items():
            curves.setdefault(label, []).append(statistics.median(seconds))
    return curves


def exponent(sizes: list[int], numbers: list[float]) -> float:
    logarithms = ([log(x) for x in some[-FITTED:]] for some in (sizes, numbers))
    return statistics.linear_regression(*logarithms).slope


def memory() -> Rounds:
    """Bytes against K, of ours and unrolled; functorch refuses the hooks that would count torchopt's.

    On the separable problem: the gradient of a quadratic is linear, so there autograd has next to nothing to keep.
    """
    case = separable(BASE["M"], BASE["p"], BASE["d"])
    saved: Rounds = {OURS: [], UNROLLED: []}
    for steps in GROWTH["K"]:
        for label in saved:
            saved[label].append(saved_bytes(make_estimates(case, Effort(steps, 10))[label], case.data))
    return saved


def draw_curves(axis: Axes, name: str, curves: Rounds, scale: float, ylabel: str) -> None:
    for label, numbers in curves.items():
        slope = exponent(GROWTH[name], numbers)
        text = f"{label}: {name}$^{{{slope:.2f}}}$"
        axis.loglog(GROWTH[name], [scale * number for number in numbers], label=text, ls=LINES[label], **MARKS[label])
    axis.set(xlabel=MEANING[name], ylabel=ylabel)
    axis.set_xticks(GROWTH[name], [f"{value:,}" for value in GROWTH[name]])
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def draw_ratios(axis: Axes, trials: dict[str, Rounds]) -> None:
    axis.axvline(1, color=MARKS[OURS]["color"])
    for row, seconds in enumerate(trials.values()):
        for shift, label in enumerate(label for label in seconds if label != OURS):
            low, middle, high = ratio(seconds, label)
            place, ends = row + 0.22 * (shift - 1), [[middle - low], [high - middle]]
            axis.errorbar(middle, place, xerr=ends, capsize=3, ls="", **MARKS[label])
    for label in dict.fromkeys(label for seconds in trials.values() for label in seconds if label != OURS):
        axis.plot([], [], ls="", label=label, **MARKS[label])
    axis.set_yticks(range(len(trials)), list(trials), fontsize=8)
    axis.set_ylim(len(trials) - 0.4, -0.6)
    axis.set(xlabel="CPU time / ours with CG (95% interval)")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


def draw(curves: dict[str, Rounds], saved: Rounds, trials: dict[str, Rounds], path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    for axis, (name, seconds) in zip(axes.flat, curves.items(), strict=False):
        draw_curves(axis, name, seconds, 1, "CPU seconds per hypergradient")
    draw_curves(axes.flat[4], "K", saved, 2**-20, "MiB that autograd keeps (separable)")
    draw_ratios(axes.flat[5], trials)
    fixed = ", ".join(f"{name} = {value}" for name, value in BASE.items())
    figure.suptitle(f"One hypergradient: {fixed} where not varied, 10 CG iterations; exponents of the largest sizes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"\nwrote {path}")

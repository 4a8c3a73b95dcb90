"""What one hypergradient costs: ours against unrolled differentiation and against torchopt's implicit gradients.

All contestants get the same g, h and theta, and the same number of inner gradient steps and of conjugate-gradient
iterations; f is the plain mean; float64. They take turns within one run, in a new order each round; a ratio is the
median over the rounds, in its 95% confidence interval. The clock is CPU time, which other processes disturb less.

    OMP_NUM_THREADS=1 python benchmarks/bilevel.py [--output docs] [--seconds 20]

The lines of torchopt need `pip install torchopt==0.7.3`, beside the torch that is there; without it they are left out.
"""

import argparse
import random
import statistics
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, log
from pathlib import Path
from unittest.mock import patch

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from torch import Tensor

from doubly.bilevel import (
    ConjugateGradient,
    Diagonal,
    Direct,
    GradientStep,
    RunningMean,
    Solver,
    Terms,
    WholeSpace,
    cid,
    projected_descent,
)

try:
    import torchopt
except ImportError:
    torchopt = None

Level = Callable[[Tensor, Tensor], Tensor]  # theta, delta -> one value per sample
Estimate = Callable[[], Tensor]  # -> the gradient in theta
Rounds = dict[str, list[float]]  # contestant -> seconds, round by round

OURS, UNROLLED, TORCHOPT = "ours, CG", "unrolled", "torchopt, CG"
MARKS = {  # the colours of Okabe and Ito, told apart by marker and line too
    OURS: {"color": "#0072B2", "marker": "o"},
    UNROLLED: {"color": "#D55E00", "marker": "s"},
    TORCHOPT: {"color": "#009E73", "marker": "^"},
    "ours, Direct": {"color": "#56B4E9", "marker": "D"},
    "ours, Diagonal": {"color": "#CC79A7", "marker": "v"},
}
LINES = {OURS: "-", UNROLLED: "--", TORCHOPT: ":"}


@dataclass(frozen=True, eq=False)
class Case:
    """min over theta of mean g(theta, delta*), delta* = argmin h; every contestant can express it."""

    outer: Level  # g_i
    inner: Level  # h_i
    theta: Tensor
    start: Tensor
    size: float  # of the inner steps
    given: tuple[Tensor, ...]  # the data
    shared: bool = False

    def total(self, delta: Tensor, theta: Tensor) -> Tensor:
        """The function of delta that the inner steps descend."""
        values = self.inner(theta, delta)
        return values.mean() if self.shared else values.sum()


@dataclass(frozen=True)
class Effort:
    steps: int  # K
    iterations: int  # of conjugate gradients


def quadratic(samples: int, parameters: int, size: int) -> Case:
    """Each sample its own delta_i in R^size, with Hessian A_i of eigenvalues 1 to 10."""
    draw = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(samples, size, size, generator=draw)).Q
    A = (rotation * torch.linspace(1, 10, size)) @ rotation.mT
    B = torch.randn(samples, size, parameters, generator=draw) / parameters**0.5
    shift, target = torch.randn(2, samples, size, generator=draw)

    def inner(theta: Tensor, delta: Tensor) -> Tensor:
        return ((A @ delta.unsqueeze(2)).squeeze(2) * delta).sum(1) / 2 - ((B @ theta + shift) * delta).sum(1)

    def outer(theta: Tensor, delta: Tensor) -> Tensor:
        return ((delta - target).square().sum(1) + 0.1 * theta.square().sum()) / 2

    theta, start = torch.randn(parameters, generator=draw), torch.zeros(samples, size)
    return Case(outer, inner, theta, start, 2 / 11, (A, B, shift, target))


def separable(samples: int, parameters: int, size: int) -> Case:
    """As `quadratic`, with diagonal A_i and a cosh beside it: h is a sum over the coordinates of delta."""
    draw = torch.Generator().manual_seed(0)
    curvature = 1 + 4 * torch.rand(samples, size, generator=draw)
    B = torch.randn(samples, size, parameters, generator=draw) / parameters**0.5
    target = torch.randn(samples, size, generator=draw)

    def inner(theta: Tensor, delta: Tensor) -> Tensor:
        return (curvature * delta.square() / 2 + delta.cosh() - (B @ theta) * delta).sum(1)

    def outer(theta: Tensor, delta: Tensor) -> Tensor:
        return (delta - target).square().sum(1) / 2

    theta, start = torch.randn(parameters, generator=draw), torch.zeros(samples, size)
    return Case(outer, inner, theta, start, 0.25, (curvature, B, target))


def logistic(samples: int, features: int, classes: int) -> Case:
    """Softmax regression: delta are the weights, shared by all samples; theta the log-regularisation of each weight."""
    draw = torch.Generator().manual_seed(0)
    basis = torch.randn(20, features, generator=draw) / features**0.5
    teacher = torch.randn(20, classes, generator=draw)
    latent = torch.randn(2 * samples, 20, generator=draw)
    noise = torch.randn(2 * samples, features, generator=draw) * (0.3 / features**0.5)
    x, held_out = (latent @ basis + noise).chunk(2)
    y, labels = (latent @ teacher).argmax(1).chunk(2)
    theta = (0.2 + 0.2 * torch.rand(features, classes, generator=draw)).log()
    steepest = torch.linalg.eigvalsh(x @ x.T / samples)[-1].item() / 2 + 0.4  # bound on the curvature of h

    def inner(theta: Tensor, weights: Tensor) -> Tensor:
        fit = F.cross_entropy(x @ weights, y, reduction="none")
        return fit + (theta.exp() * weights.square()).sum() / 2

    def outer(theta: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(held_out @ weights, labels, reduction="none")

    start = torch.zeros(features, classes)
    return Case(outer, inner, theta, start, 2 / (steepest + 0.2), (x, y, held_out, labels), shared=True)


def descend(case: Case, theta: Tensor, start: Tensor, steps: int) -> Tensor:
    def h(rows: Tensor) -> Tensor:
        return case.total(rows.squeeze(0), theta)[None] if case.shared else case.inner(theta, rows)

    rows = start[None] if case.shared else start
    found = projected_descent(h, rows, WholeSpace(), GradientStep(case.size), steps, shared=case.shared)
    return found[0] if case.shared else found


def ours(case: Case, steps: int, solve: Solver) -> Estimate:
    theta = case.theta.clone().requires_grad_()

    def problem(delta: Tensor) -> Terms:
        return Terms(case.outer(theta, delta), case.inner(theta, delta))

    def estimate() -> Tensor:
        delta = descend(case, theta.detach(), case.start, steps)
        direction = cid(problem, delta, RunningMean(), {}, solve, shared=case.shared)
        return torch.autograd.grad(direction.scalar, theta)[0]

    return estimate


def unrolled(case: Case, steps: int) -> Estimate:
    """Plain torch: the inner steps are part of the graph."""
    theta = case.theta.clone().requires_grad_()

    def estimate() -> Tensor:
        delta = case.start.clone().requires_grad_()
        for _ in range(steps):
            (gradient,) = torch.autograd.grad(case.total(delta, theta), delta, create_graph=True)
            delta = delta - case.size * gradient
        return torch.autograd.grad(case.outer(theta, delta).mean(), theta)[0]

    return estimate


def by_torchopt(case: Case, effort: Effort) -> Estimate:
    """All delta_i stacked as one variable, inner steps in a bare loop: what costs a user of torchopt the least."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchopt")  # it calls functorch by its old name
    theta = case.theta.clone().requires_grad_()
    solve = torchopt.linear_solve.solve_cg(rtol=0.0, maxiter=effort.iterations)

    @torchopt.diff.implicit.custom_root(torch.func.grad(case.total), argnums=1, solve=solve)
    def minimiser(delta: Tensor, theta: Tensor) -> Tensor:
        theta = theta.detach()
        for _ in range(effort.steps):
            delta = delta.detach().requires_grad_()
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(case.total(delta, theta), delta)
            delta = delta.detach() - case.size * gradient
        return delta

    def estimate() -> Tensor:
        return torch.autograd.grad(case.outer(theta, minimiser(case.start, theta)).mean(), theta)[0]

    return estimate


def contestants(case: Case, effort: Effort, further: dict[str, Solver] | None = None) -> dict[str, Estimate]:
    """Ours with a fixed number of iterations, the others, and ours with further solvers."""
    found = {OURS: ours(case, effort.steps, ConjugateGradient(effort.iterations, tolerance=None))}
    found |= {name: ours(case, effort.steps, solve) for name, solve in (further or {}).items()}
    found[UNROLLED] = unrolled(case, effort.steps)
    if torchopt is not None:
        found[TORCHOPT] = by_torchopt(case, effort)
    return found


def alternate(estimates: dict[str, Estimate], budget: float, fewest: int) -> Rounds:
    """Rounds until `budget` seconds are spent."""
    for estimate in estimates.values():
        estimate()
    seconds: Rounds = {label: [] for label in estimates}
    order, spent, rounds = random.Random(0), 0.0, 0
    while rounds < fewest or spent < budget:
        # Shuffled, not rotated: what ran just before leaves its mark on heap and cache.
        for label in order.sample(list(estimates), len(estimates)):
            begun = time.process_time()
            estimates[label]()
            seconds[label].append(time.process_time() - begun)
            spent += seconds[label][-1]
        rounds += 1
    return seconds


def ratio(seconds: Rounds, label: str) -> tuple[float, float, float]:
    """How many times as long as ours: the median round, between the ends of its 95% interval by order statistics."""
    rounds = sorted(a / b for a, b in zip(seconds[label], seconds[OURS], strict=True))
    reach = 0.98 * len(rounds) ** 0.5
    low, high = floor(len(rounds) / 2 - reach), ceil(len(rounds) / 2 + reach)
    return rounds[max(low, 0)], statistics.median(rounds), rounds[min(high, len(rounds) - 1)]


def spread(seconds: Rounds, label: str) -> str:
    low, middle, high = ratio(seconds, label)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def verdict(distance: float, low: float, middle: float, high: float) -> str:
    """Of the aim: the same gradient to 1e-5, and ours at least as fast."""
    if distance > 1e-5 or high < 1:
        return "aim MISSED"
    return "aim met" if middle >= 1 else "aim within the noise"


def apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def difference_quotient(case: Case, gradient: Tensor, steps: int) -> float:
    """How far the gradient's length is from the quotient of F along it: a check without any derivative."""
    along, reach = gradient / gradient.norm(), 1e-3 * case.theta.norm()

    def value(theta: Tensor) -> Tensor:
        return case.outer(theta, descend(case, theta, case.start, 2 * steps)).mean()

    rise = value(case.theta + reach * along) - value(case.theta - reach * along)
    return abs((rise / (2 * reach) / gradient.norm()).item() - 1)


@dataclass(frozen=True)
class Trial:
    """A line of the table and of the figure."""

    name: str
    case: Case
    effort: Effort
    further: dict[str, Solver]


def trials() -> list[Trial]:
    return [
        Trial("quadratic\nM=256 p=64 d=32", quadratic(256, 64, 32), Effort(100, 25), {"ours, Direct": Direct()}),
        Trial("quadratic, small\nM=16 p=8 d=4", quadratic(16, 8, 4), Effort(100, 25), {"ours, Direct": Direct()}),
        Trial("separable\nM=256 p=64 d=32", separable(256, 64, 32), Effort(50, 20), {"ours, Diagonal": Diagonal()}),
        Trial("logistic, shared δ\np=d=100,000", logistic(100, 10_000, 10), Effort(60, 20), {}),
    ]


def compare(trial: Trial, budget: float) -> Rounds:
    """One problem: gradients side by side, then the clock."""
    case, effort = trial.case, trial.effort
    found = contestants(case, effort, trial.further)
    gradients = {label: estimate() for label, estimate in found.items()}
    seconds = alternate(found, budget, 21)
    solved = replace(case, start=descend(case, case.theta, case.start, effort.steps))
    alone = contestants(solved, Effort(0, effort.iterations), trial.further)
    alone.pop(UNROLLED)  # without its steps there is nothing of it
    implicit = alternate(alone, budget / 3, 21)
    quotient = difference_quotient(case, gradients[OURS], effort.steps)
    title = trial.name.replace("\n", ", ")
    print(f"\n{title}; K = {effort.steps}, {effort.iterations} CG iterations; {len(seconds[OURS])} rounds")
    print(f"  ours against a difference quotient of F: {quotient:.1e}")
    print("                  |gradient - ours|   CPU ms   time / ours           its implicit part / ours")
    for label, values in seconds.items():
        distance = apart(gradients[label], gradients[OURS])
        text = f"  {label:16} {distance:12.1e} {1e3 * statistics.median(values):13.1f}   {spread(seconds, label)}"
        if label in implicit:
            text += f"   {spread(implicit, label)}"
        print(text if label.startswith("ours") else f"{text:80} {verdict(distance, *ratio(seconds, label))}")
    return seconds


def count_passes(samples: int, effort: Effort) -> tuple[int, int]:
    """(evaluations of h, backward passes) of one hypergradient of ours."""
    case = quadratic(samples, 8, 4)
    evaluations = 0

    def counted(theta: Tensor, delta: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return case.inner(theta, delta)

    estimate = contestants(replace(case, inner=counted), effort)[OURS]
    with patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as backward:
        estimate()
    return evaluations, backward.call_count


class Held:
    """A tensor that autograd keeps, as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(estimate: Estimate, given: tuple[Tensor, ...]) -> int:
    """The most that autograd held for its backward passes at any one time, each storage once, the data left out."""
    holders: Counter[int] = Counter()
    data = {tensor.untyped_storage().data_ptr() for tensor in given}
    now = most = 0

    def release(address: int, count: int) -> None:
        nonlocal now
        holders[address] -= 1
        now -= count if holders[address] == 0 else 0

    def pack(tensor: Tensor) -> Held:
        nonlocal now, most
        storage, held = tensor.untyped_storage(), Held(tensor)
        if storage.data_ptr() not in data:
            holders[storage.data_ptr()] += 1
            now += storage.nbytes() if holders[storage.data_ptr()] == 1 else 0
            most = max(most, now)
            weakref.finalize(held, release, storage.data_ptr(), storage.nbytes())
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        estimate()
    return most


BASE = {"M": 64, "p": 64, "d": 16, "K": 20}
GROWTH = {
    "M": [32, 128, 512, 2048, 8192],
    "p": [64, 256, 1024, 4096, 16384],
    "d": [8, 64, 128, 256],
    "K": [5, 20, 80, 320, 1280],
}
MEANING = {"M": "samples M", "p": "parameters p of θ", "d": "coordinates d of each δᵢ", "K": "inner steps K"}
FITTED = 3  # the largest sizes: below them the cost is that of calling torch at all


def growth(name: str) -> Rounds:
    """Seconds of each contestant at each value of one size, the others as in BASE."""
    curves: Rounds = {}
    for value in GROWTH[name]:
        sizes = BASE | {name: value}
        case = quadratic(sizes["M"], sizes["p"], sizes["d"])
        for label, seconds in alternate(contestants(case, Effort(sizes["K"], 10)), 2, 3).items():
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
    found: Rounds = {OURS: [], UNROLLED: []}
    for steps in GROWTH["K"]:
        for label in found:
            found[label].append(saved_bytes(contestants(case, Effort(steps, 10))[label], case.given))
    return found


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


def draw_ratios(axis: Axes, found: dict[str, Rounds]) -> None:
    axis.axvline(1, color=MARKS[OURS]["color"])
    for row, seconds in enumerate(found.values()):
        for shift, label in enumerate(label for label in seconds if label != OURS):
            low, middle, high = ratio(seconds, label)
            place, ends = row + 0.22 * (shift - 1), [[middle - low], [high - middle]]
            axis.errorbar(middle, place, xerr=ends, capsize=3, ls="", **MARKS[label])
    for label in dict.fromkeys(label for seconds in found.values() for label in seconds if label != OURS):
        axis.plot([], [], ls="", label=label, **MARKS[label])
    axis.set_yticks(range(len(found)), list(found), fontsize=8)
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.set(xlabel="CPU time / ours with CG (95% interval)")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


def draw(curves: dict[str, Rounds], held: Rounds, found: dict[str, Rounds], path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    for axis, (name, seconds) in zip(axes.flat, curves.items(), strict=False):
        draw_curves(axis, name, seconds, 1, "CPU seconds per hypergradient")
    draw_curves(axes.flat[4], "K", held, 2**-20, "MiB that autograd keeps (separable)")
    draw_ratios(axes.flat[5], found)
    fixed = ", ".join(f"{name} = {value}" for name, value in BASE.items())
    figure.suptitle(f"One hypergradient: {fixed} where not varied, 10 CG iterations; exponents of the largest sizes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"\nwrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a folder such as docs: measure growth too, write images/ there")
    parser.add_argument("--seconds", type=float, default=20, help="of CPU time for each comparison")
    options = parser.parse_args()
    begun = time.monotonic()
    torch.set_default_dtype(torch.float64)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float64")
    print("torchopt is not installed: left out" if torchopt is None else f"torchopt {torchopt.__version__}")
    effort = Effort(20, 10)
    for samples in (8, 2048):
        evaluations, backward = count_passes(samples, effort)
        print(f"M = {samples}: h evaluated {evaluations} times, {backward} backward passes; K = 20, 10 CG iterations")
    found = {trial.name: compare(trial, options.seconds) for trial in trials()}
    if options.output is None:
        return
    curves = {name: growth(name) for name in GROWTH}
    held = memory()
    print(f"\nexponents, fitted to the {FITTED} largest sizes")
    for name, seconds in [*curves.items(), ("K", held)]:
        what = "bytes" if seconds is held else "seconds"
        slopes = (f"{label} {exponent(GROWTH[name], numbers):.2f}" for label, numbers in seconds.items())
        print(f"  {what} in {name}: " + "; ".join(slopes))
    draw(curves, held, found, options.output / "images" / "bilevel_cost.png")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()

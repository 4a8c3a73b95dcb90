"""What one hypergradient costs: ours against unrolled differentiation and against torchopt's implicit gradients.

All estimators get the same g, h and theta, and the same number of inner gradient steps and of conjugate-gradient
iterations; f is the plain mean; float64. They take turns within one run, in a new order each round; a ratio is the
median over the rounds, in its 95% confidence interval. The clock is CPU time, which other processes disturb less.

    OMP_NUM_THREADS=1 python benchmarks/bilevel.py [--output docs] [--seconds 20]

The lines of torchopt need `pip install torchopt==0.7.3`, beside the torch that is there; without it they are left out.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from bilevel_cases import (
    OURS,
    UNROLLED,
    Case,
    Effort,
    Rounds,
    alternate,
    descend,
    logistic,
    make_estimates,
    quadratic,
    ratio,
    separable,
    torchopt,
)
from bilevel_growth import FITTED, GROWTH, draw, exponent, growth, memory
from torch import Tensor

from doubly.bilevel import Diagonal, Direct, Solver


def spread(seconds: Rounds, label: str) -> str:
    low, middle, high = ratio(seconds, label)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def verdict(distance: float, low: float, middle: float, high: float) -> str:
    """Whether the aim is met: the same gradient to 1e-5, and ours at least as fast."""
    if distance > 1e-5 or high < 1:
        return "aim MISSED"
    return "aim met" if middle >= 1 else "aim within the noise"


def relative_difference(a: Tensor, b: Tensor) -> float:
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
    """One problem of the table and of the figure."""

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
    """Compare the gradients and the times of all estimators on one problem."""
    case, effort = trial.case, trial.effort
    estimates = make_estimates(case, effort, trial.further)
    gradients = {label: estimate() for label, estimate in estimates.items()}
    seconds = alternate(estimates, budget, 21)
    solved = replace(case, start=descend(case, case.theta, case.start, effort.steps))
    implicit_estimates = make_estimates(solved, Effort(0, effort.iterations), trial.further)
    implicit_estimates.pop(UNROLLED)  # it has no implicit part
    implicit = alternate(implicit_estimates, budget / 3, 21)
    quotient = difference_quotient(case, gradients[OURS], effort.steps)
    title = trial.name.replace("\n", ", ")
    print(f"\n{title}; K = {effort.steps}, {effort.iterations} CG iterations; {len(seconds[OURS])} rounds")
    print(f"  ours against a difference quotient of F: {quotient:.1e}")
    print("                  |gradient - ours|   CPU ms   time / ours           its implicit part / ours")
    for label, values in seconds.items():
        distance = relative_difference(gradients[label], gradients[OURS])
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

    estimate = make_estimates(replace(case, inner=counted), effort)[OURS]
    with patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as backward:
        estimate()
    return evaluations, backward.call_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a folder such as docs: measure growth too, write images/ there")
    parser.add_argument("--seconds", type=float, default=20, help="of CPU time for each comparison")
    options = parser.parse_args()
    start = time.monotonic()
    torch.set_default_dtype(torch.float64)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float64")
    print("torchopt is not installed: left out" if torchopt is None else f"torchopt {torchopt.__version__}")
    effort = Effort(20, 10)
    for samples in (8, 2048):
        evaluations, backward = count_passes(samples, effort)
        print(f"M = {samples}: h evaluated {evaluations} times, {backward} backward passes; K = 20, 10 CG iterations")
    seconds_of_trials = {trial.name: compare(trial, options.seconds) for trial in trials()}
    if options.output is None:
        return
    curves = {name: growth(name) for name in GROWTH}
    saved = memory()
    print(f"\nexponents, fitted to the {FITTED} largest sizes")
    for name, seconds in [*curves.items(), ("K", saved)]:
        unit = "bytes" if seconds is saved else "seconds"
        slopes = (f"{label} {exponent(GROWTH[name], numbers):.2f}" for label, numbers in seconds.items())
        print(f"  {unit} in {name}: " + "; ".join(slopes))
    draw(curves, saved, seconds_of_trials, options.output / "images" / "bilevel_cost.png")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()

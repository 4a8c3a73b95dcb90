"""Which estimator of u tracks best? Moving averages and STORM, for several eta, batches, compositions and step sizes.

The losses are the distances of examples/convergence.py, with a well-conditioned inner problem and a start far away:
theta travels for about an eighth of the steps, then it stays near the minimizer. 16 runs go side by side. Writes
docs/images/estimators.png and prints the numbers as tables. About seven minutes.

    python benchmarks/estimators.py
"""

import runpy
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from doubly.bilevel import Descent, Diagonal, GradientStep, LogMeanExp, RunningMean, Step, Terms, minimize
from doubly.bilevel.composition import Composition, State

ROOT = Path(__file__).parent.parent
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "convergence.py"))
RUNS, STEPS, STEP_SIZE, TEMPERATURE = 16, 400, 0.5, 8.0
BATCHES = {2: "#D55E00", 8: "#009E73", 32: "#0072B2"}  # with the color of the figure
ETAS = {"1": 1.0, "0.9": 0.9, "0.5": 0.5, "T^(-1/4)": STEPS**-0.25, "0.1": 0.1, "0.02": 0.02}
FACTORS: dict[str, Callable[[int], float]] = {  # of the step size
    "constant steps": lambda step: 1.0,
    "falling steps": lambda step: (1 + step / 20) ** -0.5,
}


class SideBySide(LogMeanExp):
    """LogMeanExp of several runs: one column and one u per run. The value is their sum, one number for the history."""

    def update(
        self, values: Tensor, all_values: Tensor, state: State, all_previous: Tensor | None = None
    ) -> tuple[Tensor, State]:
        updates = []
        for run in range(values.shape[1]):
            run_state = {name: part[run] for name, part in state.items()}
            previous = None if all_previous is None else all_previous[:, run]
            updates.append(super().update(values[:, run], all_values[:, run], run_state, previous))
        weights, states = zip(*updates, strict=True)
        return torch.stack(weights, 1), {name: torch.stack([each[name] for each in states]) for name in states[0]}

    def value(self, values: Tensor) -> Tensor:
        return torch.stack([super(SideBySide, self).value(column) for column in values.T]).sum()


def mean_variance(u: Tensor) -> Tensor:
    mean, square = u.view(2, -1)
    return (mean + (square - mean.square()) / (2 * TEMPERATURE)).sum()


class Outer(NamedTuple):
    composition: Composition
    lift: Callable[[Tensor], Tensor]  # losses (B, runs) -> g
    read: Callable[[Tensor], Tensor]  # u -> the entry that f' depends on, one per run
    truth: Callable[[Tensor], Tensor]  # losses (runs, M) -> that entry for all samples
    value: Callable[[Tensor], Tensor]  # losses (runs, M) -> F


OUTERS = {
    "KL": Outer(
        SideBySide(TEMPERATURE),
        lambda losses: losses,
        lambda u: u,
        lambda losses: (losses / TEMPERATURE).exp().mean(1),
        lambda losses: TEMPERATURE * (losses / TEMPERATURE).exp().mean(1).log(),
    ),
    "mean-variance": Outer(  # as MeanVariance, for several runs
        RunningMean(mean_variance),
        lambda losses: torch.cat([losses, losses.square()], 1),
        lambda u: u.view(2, -1)[0],
        lambda losses: losses.mean(1),
        lambda losses: losses.mean(1) + losses.var(1, correction=0) / (2 * TEMPERATURE),
    ),
}


class Scores(NamedTuple):
    """One number per run. Errors are roots of mean squares."""

    traveling: Tensor  # relative error of u, over the first eighth of all steps
    settled: Tensor  # the same over the last half of these steps
    gradient: Tensor  # |grad F|, over the last forty
    excess: Tensor  # F - F*, mean over the last forty


TITLES = ["error of u, traveling", "error of u, settled", "final ‖∇F‖", "final F - F*"]


def objective(problem: Any, outer: Outer, theta: Tensor) -> tuple[Tensor, Tensor]:
    """F and its gradient for each row of theta."""
    theta = theta.detach().requires_grad_()
    values = outer.value(problem.values(theta)[0])
    return values.detach(), torch.autograd.grad(values.sum(), theta)[0]


def least(problem: Any, outer: Outer) -> float:
    theta = EXAMPLE["start"](1)
    for _ in range(500):
        theta = theta - 0.5 * objective(problem, outer, theta)[1]
    value, slope = objective(problem, outer, theta)
    assert slope.norm() < 1e-8
    return value.item()


def scores(error: Tensor, square: Tensor, excess: Tensor, steps: int) -> Scores:
    first, last, end = error[1 : STEPS // 8], error[steps // 2 : steps], slice(steps - 40, steps)
    return Scores(first.mean(0).sqrt(), last.mean(0).sqrt(), square[end].mean(0).sqrt(), excess[end].mean(0))


def run(
    problem: Any, outer: Outer, lowest: float, factor: Callable[[int], float], batch: int, eta: float, storm: bool
) -> tuple[Scores, Scores]:
    """After all steps, and after half of them, which cost STORM as much: it solves the inner problems twice."""
    error, square, excess, before = [], [], [], 10 * EXAMPLE["start"](RUNS)

    def lifted(theta: Tensor, delta: Tensor, samples: Any) -> Terms:
        terms = problem(theta, delta, samples)
        return Terms(outer.lift(terms.outer), terms.inner)

    def record(step: Step) -> None:
        truth = outer.truth(problem.values(before)[0])
        error.append((outer.read(outer.composition.estimate(step.direction.state)) / truth - 1).square())
        before.copy_(step.theta.detach())
        value, slope = objective(problem, outer, before)
        square.append(slope.square().sum(1))
        excess.append(value - lowest)

    minimize(
        lifted,
        before.clone(),
        torch.zeros(batch, RUNS, 3, dtype=torch.float64),
        EXAMPLE["draws"](problem, batch, RUNS, seed=0),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        steps=STEPS,
        composition=outer.composition,
        descent=Descent(GradientStep(problem.inner_step()), 8),
        solve=Diagonal(),
        inner=problem.inner,
        step_size=lambda step: STEP_SIZE * factor(step),
        eta=lambda step: eta,
        storm=storm,
        callback=record,
    )
    parts = [torch.stack(part) for part in (error, square, excess)]
    return scores(*parts, STEPS), scores(*parts, STEPS // 2)


Results = dict[tuple[str, int], Scores]  # by estimator and batch size


def measure(problem: Any, outer: Outer, factor: Callable[[int], float]) -> Results:
    results, lowest = {}, least(problem, outer)
    for (name, eta), batch, storm in product(ETAS.items(), BATCHES, (False, True)):
        if storm and eta > 0.5:  # at 1 they are the same, at 0.9 nearly
            continue
        whole, half = run(problem, outer, lowest, factor, batch, eta, storm)
        results[f"{'STORM ' if storm else ''}η = {name}", batch] = whole
        if storm:
            results[f"STORM η = {name}, half the steps", batch] = half
    return results


def show(title: str, results: Results) -> None:
    print(f"\n**{title}**, mean ± standard deviation over {RUNS} runs\n")
    print("| estimator |" + "".join(f" {title}, B = {batch} |" for title, batch in product(TITLES, BATCHES)))
    print("| --- |" + " --- |" * len(TITLES) * len(BATCHES))
    for name in dict.fromkeys(name for name, _ in results):
        cells = [results[name, batch][metric] for metric, batch in product(range(len(TITLES)), BATCHES)]
        print(f"| {name} |" + "".join(f" {cell.mean():.2g} ± {cell.std():.2g} |" for cell in cells), flush=True)


def draw(axis: plt.Axes, results: Results, metric: int) -> None:
    for batch, color in BATCHES.items():
        for prefix, suffix, style in (("", "", "o-"), ("STORM ", "", "^--"), ("STORM ", ", half the steps", "v:")):
            if suffix and metric < 3:
                continue
            keys = {eta: (f"{prefix}η = {name}{suffix}", batch) for name, eta in ETAS.items()}
            points = {eta: results[key][metric].mean() for eta, key in keys.items() if key in results}
            label = f"B = {batch}, {prefix.strip() or 'moving average'}{suffix}"
            axis.loglog(list(points), list(points.values()), style, color=color, markersize=4, label=label)
    axis.grid(alpha=0.3)


def main() -> None:
    torch.set_num_threads(1)
    problem = EXAMPLE["distances"]((1.0, 1.5, 2.0))
    shown = [0, 1, 3]
    figure, axes = plt.subplots(3, 4, figsize=(13, 9), sharex=True, sharey="row", layout="constrained")
    for column, (outer, factor) in zip(axes.T, product(OUTERS, FACTORS), strict=True):
        results = measure(problem, OUTERS[outer], FACTORS[factor])
        show(f"{outer}, {factor}", results)
        column[0].set_title(f"{outer}, {factor}")
        for axis, metric in zip(column, shown, strict=True):
            draw(axis, results, metric)
        column[-1].set(
            xlabel="η", xticks=[0.02, 0.1, STEPS**-0.25, 0.5, 1], xticklabels=["0.02", "0.1", "$T^{-1/4}$", "0.5", "1"]
        )
    for axis, metric in zip(axes[:, 0], shown, strict=True):
        axis.set_ylabel(TITLES[metric])
    handles, labels = axes[-1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    path = ROOT / "docs" / "images" / "estimators.png"
    figure.savefig(path, dpi=150)
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()

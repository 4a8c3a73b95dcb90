"""Theorem 1 in numbers: CID on a problem that meets every assumption and whose gradient is known in closed form.

    python examples/convergence.py                  the numbers, at small size
    python examples/convergence.py --output docs    the full size: docs/images/convergence.png and its numbers

With w = (theta, delta): minimize f(mean_i g_i) for g_i(w) = sqrt(1 + |w - z_i|^2) and f = log, where delta_i minimizes
h_i = delta . (A delta / 2 - B theta - s_i). As g_i >= 1, f may go on linearly below 1; then f and all g_i are
1-Lipschitz and 1-smooth. A quarter of the z_i are far away, so that small batches estimate f'(mean g) badly.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.bilevel import Descent, Diagonal, GradientStep, RunningMean, SolverWarning, Step, Terms, minimize

SCALE = 16.0  # c of the step size beta = c / sqrt(T)
SMALL_BATCH = 2
Results = dict[str, Any]


class Size(NamedTuple):
    horizons: list[int]  # T
    runs: int
    inner_steps: list[int]  # K
    enough_inner_steps: int  # for an inner error below all other errors
    chains: int


SMALL = Size([16, 64, 256], 8, [0, 4, 8, 12, 16], 10, 4_000)
FULL = Size([16, 64, 256, 1024, 4096], 16, list(range(0, 41, 4)), 16, 40_000)


def f(u: Tensor) -> Tensor:
    """f summed over the runs, each of which has its own entry of u."""
    return torch.where(u > 1, u.clamp_min(1).log(), u - 1).sum()


@dataclass(frozen=True, eq=False)
class Distances:
    """The problem of several runs at once: theta is (runs, 2), delta (samples, runs, 3), g_i has an entry per run."""

    curvature: Tensor  # (3,), the diagonal of A
    coupling: Tensor  # (3, 2), B
    shifts: Tensor  # (M, 3), s_i
    points: Tensor  # (M, 5), z_i

    def inner(self, theta: Tensor, delta: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (delta * (self.curvature * delta / 2 - theta @ self.coupling.T - batch[0])).sum((1, 2))

    def __call__(self, theta: Tensor, delta: Tensor, batch: tuple[Tensor, Tensor]) -> Terms:
        w = torch.cat([theta.expand(len(delta), -1, -1), delta], -1)
        return Terms((1 + (w - batch[1]).square().sum(-1)).sqrt(), self.inner(theta, delta, batch))

    def inner_step(self) -> float:
        """alpha = 2 / (L + mu), as in the proof, L being the smoothness of h in (theta, delta)."""
        across = torch.cat([torch.zeros_like(self.coupling[:2]), self.coupling.T], 1)
        hessian = torch.cat([across, torch.cat([self.coupling, self.curvature.diag()], 1)])
        return 2 / (torch.linalg.matrix_norm(hessian, 2) + self.curvature.min()).item()

    def inverse(self, steps: int | None) -> Tensor:
        """The matrix, (3,), with which so many inner steps from 0 replace A^-1; A^-1 itself for None."""
        left = 0 if steps is None else (1 - self.inner_step() * self.curvature) ** steps
        return (1 - left) / self.curvature

    def lipschitz(self, steps: int | None = None) -> float:
        """The Lipschitz constant kappa of theta -> delta_i."""
        return torch.linalg.matrix_norm(self.inverse(steps)[:, None] * self.coupling, 2).item()

    def solutions(self, theta: Tensor, steps: int | None = None) -> Tensor:
        """delta_i after so many inner steps, (runs, M, 3)."""
        return ((theta @ self.coupling.T)[:, None] + self.shifts) * self.inverse(steps)

    def values(self, theta: Tensor, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """All g_i, (runs, M), and dg_i/dtheta by eq. 9, (runs, M, 2)."""
        w = torch.cat([theta[:, None].expand(-1, len(self.points), -1), self.solutions(theta, steps)], -1)
        g = (1 + (w - self.points).square().sum(-1)).sqrt()
        slopes = (w - self.points) @ torch.cat([torch.eye(2).double(), self.coupling / self.curvature[:, None]])
        return g, slopes / g[..., None]

    def gradient(self, theta: Tensor) -> Tensor:
        """The gradient of F, (runs, 2)."""
        g, slopes = self.values(theta)
        return slopes.mean(1) / g.mean(1, keepdim=True)


def distances(curvature: tuple[float, float, float] = (0.25, 1.0, 2.0), samples: int = 256) -> Distances:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    diagonal = torch.tensor(curvature, dtype=torch.float64)
    coupling = torch.tensor([[0.25, 0.0], [0.0, 0.5], [0.5, 0.5]], dtype=torch.float64)
    points = 0.3 * normal[:, :5]
    points[::4] += 14 * torch.rand(len(points[::4]), 1, generator=generator, dtype=torch.float64)
    return Distances(diagonal, coupling, diagonal * (1 + 0.3 * normal[:, 5:]), points)


def start(runs: int) -> Tensor:
    return torch.full((runs, 2), 2.0, dtype=torch.float64)


def draws(problem: Distances, batch: int, runs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches with replacement, as the lemmas have them; every run has its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(len(problem.points), (batch, runs), generator=generator)
        yield problem.shifts[ids], problem.points[ids]


def descend(
    problem: Distances, theta: Tensor, data: Any, batch: int, steps: int, step_size: float, eta: float, inner: int
) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1 with each inner solve from 0; return theta_0 to theta_T and u_1 to u_T of each run."""
    path, estimates = [theta.clone()], []

    def record(step: Step) -> None:
        path.append(step.theta.detach().clone())
        estimates.append(step.direction.state["u"])

    theorem: dict[str, Any] = {"solve": Diagonal(), "inner": problem.inner, "warm_start": False, "callback": record}
    optimizer, descent = partial(torch.optim.SGD, lr=step_size), Descent(GradientStep(problem.inner_step()), inner)
    zero, mean = torch.zeros(batch, len(theta), 3, dtype=theta.dtype), RunningMean(f, eta)
    theorem |= {"optimizer": optimizer, "steps": steps, "composition": mean, "descent": descent}
    with warnings.catch_warnings(action="ignore", category=SolverWarning):  # few inner steps are what is studied
        minimize(problem, theta, zero, data, **theorem)
    return torch.stack(path), torch.stack(estimates)


def slope(x: Tensor, y: list[float]) -> float:
    """The slope of the line of least squares through log y."""
    centered = x.double() - x.double().mean()
    return (centered @ torch.tensor(y, dtype=torch.float64).log() / (centered @ centered)).item()


SETTINGS: dict[str, Callable[[int], tuple[int, float]]] = {  # T -> batch size, eta
    "B = T/4, η = 1/2": lambda horizon: (horizon // 4, 0.5),
    "B = 2, η = T^(-1/4)": lambda horizon: (SMALL_BATCH, horizon**-0.25),
    "B = 2, η = 1": lambda horizon: (SMALL_BATCH, 1.0),
}


def rates(problem: Distances, size: Size) -> Results:
    """(1/T) sum_t |grad F(theta_t)|^2 against T: mean and standard error over runs, and the slope on log-log axes."""
    results: Results = {"T": size.horizons}
    for name, setting in SETTINGS.items():
        averages, errors = [], []
        for horizon in size.horizons:
            batch, eta = setting(horizon)
            data = draws(problem, batch, size.runs, seed=horizon)
            theta, _ = descend(
                problem, start(size.runs), data, batch, horizon, SCALE / horizon**0.5, eta, size.enough_inner_steps
            )
            squares = torch.stack([problem.gradient(each).square().sum(1) for each in theta[:-1]]).mean(0)
            averages.append(squares.mean().item())
            errors.append(squares.std().item() / size.runs**0.5)
        rate = slope(torch.tensor(size.horizons).log(), averages)
        results[name] = {"average": averages, "error": errors, "slope": rate}
    return results


def floors(problem: Distances, size: Size) -> Results:
    """|grad F|^2 where K inner steps lead, on all samples, and the bound const (1 - alpha mu)^K.

    There the estimate is 0, so grad F is the estimate's error, which is at most 2 sqrt(1 + kappa^2) |delta* - delta^K|:
    the two steps of the proof's A_1, with the constants of f and g, 1. So const = 4 (1 + kappa^2) Delta_0, not fitted.
    """
    theta, squares, distance = start(1), [], 0.0
    data = [(problem.shifts[:, None], problem.points[:, None])]
    for steps in size.inner_steps:
        theta = descend(problem, theta, data, len(problem.points), 40, 6.0, 1.0, steps)[0][-1]
        squares.append(problem.gradient(theta).square().sum().item())
        distance = max(distance, problem.solutions(theta).square().sum(-1).max().item())
    rate = 1 - problem.inner_step() * problem.curvature.min().item()
    constant = 4 * (1 + problem.lipschitz() ** 2) * distance
    bound = [constant * rate**steps for steps in size.inner_steps]
    measured = exp(slope(torch.tensor(size.inner_steps), squares))
    return {"K": size.inner_steps, "floor": squares, "bound": bound, "rate": measured, "bound_rate": rate}


def tracking(problem: Distances, size: Size, eta: float, batch: int = 32, horizon: int = 128) -> Results:
    """Lemma 2 along a run, for all t >= 1: the squared error of u against the bound, as means over runs.

    `closest` is the largest quotient of error and bound over all steps of all runs, the error being expected given the
    past, which is known exactly.
    """
    data = draws(problem, batch, 8 * size.runs, seed=0)
    theta, u = descend(
        problem, start(8 * size.runs), data, batch, horizon, SCALE / horizon**0.5, eta, size.enough_inner_steps
    )
    values = torch.stack([problem.values(each, size.enough_inner_steps)[0] for each in theta[:-1]])
    truth, variances = values.mean(2), values.var(2, correction=0)
    error = (u - truth).square()
    moved = (theta[1:-1] - theta[:-2]).square().sum(2)
    noise = 2 * eta**2 * variances.max() / batch  # sigma^2: the largest variance along the run
    bound = (1 - eta) * error[:-1] + noise + (1 + problem.lipschitz(size.enough_inner_steps) ** 2) / eta * moved
    expected = ((1 - eta) * (u[:-1] - truth[1:])).square() + eta**2 * variances[1:] / batch
    closest = (expected / bound).max().item()
    return {"eta": eta, "error": error[1:].mean(1).tolist(), "bound": bound.mean(1).tolist(), "closest": closest}


def bias(problem: Distances, theta: Tensor, eta: float, chains: int, seed: int = 0) -> tuple[float, float]:
    """|E estimate - grad F| at theta in small batches, once u is stationary, and its standard error.

    As grad F = E[G_B] f'(g) for the batch's G_B, the mean of G_B (f'(u) - f'(g)) is the same with less noise.
    """
    generator = torch.Generator().manual_seed(seed)
    g, slopes = (part[0] for part in problem.values(theta))
    composition, state = RunningMean(f, eta), {}
    for _ in range(round(8 / eta)):
        ids = torch.randint(len(g), (SMALL_BATCH, chains), generator=generator)
        cotangents, state = composition.update(g[ids], g[ids], state)
    errors = slopes[ids].mean(0) * (cotangents[0] - 1 / g.mean())[:, None]
    return errors.mean(0).norm().item(), (errors.var(0).sum() / chains).sqrt().item()


def biases(problem: Distances, size: Size) -> Results:
    """(bias, standard error) at the minimizer of F, for constant eta and for eta = T^(-1/4)."""
    theta = start(1)
    for _ in range(200):
        theta = theta - 6 * problem.gradient(theta)
    constant = {str(eta): bias(problem, theta, eta, size.chains) for eta in (1.0, 0.9, 0.5)}
    falling = {str(horizon): bias(problem, theta, horizon**-0.25, size.chains) for horizon in (16, 256, 4096, 65536)}
    return {"eta": constant, "T": falling}


def study(size: Size) -> Results:
    problem = distances()
    tracked = [tracking(problem, size, eta) for eta in (0.5, 0.1)]
    results = {"rates": rates(problem, size), "floors": floors(problem, size), "biases": biases(problem, size)}
    return results | {"tracking": tracked}


def show(results: Results) -> None:
    print("(a) average squared gradient norm")
    print(f"    {'T':22}" + "".join(f"{horizon:10}" for horizon in results["rates"]["T"]) + "     slope")
    for name in SETTINGS:
        line = results["rates"][name]
        print(f"    {name:22}" + "".join(f"{each:10.2e}" for each in line["average"]) + f"{line['slope']:10.2f}")
    part = results["floors"]
    print(f"(b) floor of |grad F|^2: falls by {part['rate']:.3f} per inner step, the bound by {part['bound_rate']:.3f}")
    for row in zip(part["K"], part["floor"], part["bound"], strict=True):
        print("    K = {:2}  floor {:.2e}  bound {:.2e}".format(*row))
    print("(c) Lemma 2: squared error of u over its bound, at its largest; error and bound in the last step")
    for part in results["tracking"]:
        last = part["error"][-1], part["bound"][-1]
        print("    η = {}  {:.2f}  {:.2e}  {:.2e}".format(part["eta"], part["closest"], *last))
    print(f"(d) bias of the estimate at the minimizer, B = {SMALL_BATCH}")
    for name, sizes in results["biases"].items():
        for key, (size, error) in sizes.items():
            print(f"    {name} = {key:6}  {size:.4f} ± {error:.4f}")


def draw(results: Results, path: Path) -> None:
    import matplotlib  # not at the top: its first import on a machine talks about fonts

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    blue, orange, green, gray = "#0072B2", "#D55E00", "#009E73", "#555555"
    figure, ((rate, floor), (track, biased)) = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    part = results["rates"]
    for (name, color), marker in zip(zip(SETTINGS, (blue, green, orange), strict=True), "os^", strict=True):
        label = f"{name.replace('T^(-1/4)', '$T^{-1/4}$')}: slope {part[name]['slope']:.2f}"
        rate.errorbar(part["T"], part[name]["average"], part[name]["error"], color=color, marker=marker, label=label)
    first = part[next(iter(SETTINGS))]["average"][0]
    line = [first * 0.6 * (horizon / part["T"][0]) ** -0.5 for horizon in part["T"]]
    rate.loglog(part["T"], line, "--", color=gray, label="slope -1/2")
    rate.set(title="(a) Theorem 1: convergence", xlabel="steps $T$, with β = 16/√T")
    rate.set(ylabel="average over the run of $|\\nabla F|^2$", ylim=(1e-4, 1e-2))

    part = results["floors"]
    floor.semilogy(part["K"], part["bound"], "--", color=gray, label=f"bound: {part['bound_rate']:.2f} per step")
    square = [part["floor"][0] * part["bound_rate"] ** (2 * steps) for steps in part["K"]]
    floor.semilogy(part["K"], square, ":", color=orange, label="$(1-\\alpha\\mu)^{2K}$ from the first point")
    floor.semilogy(part["K"], part["floor"], "o-", color=blue, label=f"measured: {part['rate']:.2f} per step")
    floor.set(title="(b) Theorem 1: floor", xlabel="inner steps $K$", ylabel="$|\\nabla F|^2$ where the run ends")

    for part, color in zip(results["tracking"], (blue, green), strict=True):
        steps = range(1, len(part["error"]) + 1)
        track.loglog(steps, part["error"], color=color, label=f"η = {part['eta']:g}: measured")
        track.loglog(steps, part["bound"], "--", color=color, label=f"η = {part['eta']:g}: bound")
    track.set(title="(c) Lemma 2: tracking, B = 32", xlabel="step $t$")
    track.set_ylabel("$E\\,|u_{t+1} - g(\\theta_t, \\delta_t^K)|^2$")

    part = results["biases"]
    horizons = [int(horizon) for horizon in part["T"]]
    for (eta, (size, error)), style in zip(part["eta"].items(), ("-", "--", ":"), strict=True):
        biased.plot(horizons, [size] * len(horizons), style, color=orange, label=f"η = {float(eta):g}")
        biased.fill_between(horizons, size - 2 * error, size + 2 * error, color=orange, alpha=0.2, linewidth=0)
    sizes, errors = zip(*part["T"].values(), strict=True)
    biased.errorbar(horizons, sizes, [2 * e for e in errors], color=green, marker="s", label="η = $T^{-1/4}$")
    biased.set(title="(d) Bias of the estimate, B = 2", xlabel="steps $T$", xscale="log", yscale="log")
    biased.set_ylabel("|E[estimate] - $\\nabla F$| at the minimizer")
    for axis in figure.axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Theorem 1 in numbers.")
    parser.add_argument("--output", type=Path, help="run at full size; write images/ and results/ here")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    results = study(FULL if output else SMALL)
    show(results)
    if output:
        draw(results, output / "images" / "convergence.png")
        short = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.4g}"))
        (output / "results").mkdir(exist_ok=True)
        (output / "results" / "convergence.json").write_text(json.dumps(short) + "\n")


if __name__ == "__main__":
    main()

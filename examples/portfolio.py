"""Portfolios that learn from what they earn: the weights of each month solve a problem on the simplex.

    x_i      state of the market in month i: three numbers and a 1; r_i: the returns of five assets, in percent
    theta    coefficients of a forecast of the returns, x_i.theta
    delta_i  the portfolio: minimizes h_i = delta.Q.delta / 2 - delta.(x_i.theta) over weights >= 0 that sum to 1
    g_i      -delta_i.r_i, what the month lost
    f        CVaR: the mean over the worst share of the months; a share of 1 is the plain mean

The usual way fits the forecast to the returns and optimizes afterwards. The data are drawn: the last asset earns 1.6 %
in an ordinary month and loses 13.4 % in a crash, which is likelier where x_3 is large.

    python examples/portfolio.py [--output picture.png]
"""

import argparse
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure

from doubly.bilevel import CVaR, Descent, Direct, GradientStep, Simplex, Terms, cid, minimize, projected_descent

torch.set_default_dtype(torch.float64)
assets = {"cash": "#BBBBBB", "stock 1": "#56B4E9", "stock 2": "#0072B2", "stock 3": "#009E73", "carry": "#D55E00"}
exposure = torch.tensor([[0, 0.5, 0, -0.5, 0], [0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0], [0.2, 0.6, 0.6, 0.6, 1.6]])
Q = torch.diag(torch.tensor([0.5, 2, 2, 2, 2]))  # the risk


def months(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.randn(count, 3, generator=generator), torch.ones(count, 1)], 1)
    returns = x @ exposure + torch.randn(count, 5, generator=generator) * torch.tensor([0.3, 4, 4, 4, 1.5])
    returns[torch.rand(count, generator=generator) < (2 * x[:, 2] - 4).sigmoid(), 4] -= 15  # a crash
    return x, returns


def problem(theta, delta, batch):
    x, returns = batch
    inner = (delta @ Q * delta).sum(1) / 2 - (delta * (x @ theta)).sum(1)
    return Terms(outer=-(delta * returns).sum(1), inner=inner)


def portfolios(theta, batch):
    start = torch.full((len(batch[0]), 5), 0.2)
    return projected_descent(lambda d: problem(theta, d, batch).inner, start, Simplex(), GradientStep(0.5), steps=100)


def learn_forecast(theta, history, share):
    levels = {"constraint": Simplex(), "composition": CVaR(share, eta=0.5), "descent": Descent(GradientStep(0.5), 10)}
    outer = {"optimizer": partial(torch.optim.Adam, lr=0.15), "step_size": lambda t: 0.15 * (1 - t / 60), "steps": 60}
    start = portfolios(theta, history)
    return minimize(problem, theta.clone(), start, history, batch_size=100, **levels, **outer).theta


def slope_of_raising_all(theta, history, constraint):
    """The derivative of F if all forecasts rise alike: 0, since the weights sum to 1 and no portfolio changes."""
    delta, theta = portfolios(theta, history), theta.clone().requires_grad_()
    cid(partial(problem, theta, batch=history), delta, CVaR(0.5), {}, Direct(), constraint=constraint).loss.backward()
    return theta.grad.sum(1).norm()


def draw(results, file):
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (label, runs), marker in zip(results.items(), "x^os", strict=True):
        left.plot([run[1] for run in runs], [run[0] for run in runs], f"k{marker}", label=label)
    left.set(xlabel="return of the worst 10 % of test months (%)", ylabel="return of all test months (%)")
    left.legend(title="forecast taught by")
    names, below = [label.replace(" ", "\n", 1) for label in results], np.zeros(4)
    means = np.array([[run[3] for run in runs] for runs in results.values()]).mean(1)
    for (asset, color), share in zip(assets.items(), means.T, strict=True):
        right.bar(names, share, bottom=below, color=color, edgecolor="white", label=asset)
        below += share
    right.set(ylabel="mean portfolio", ylim=(0, 1))
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    figure.savefig(file, dpi=200)


parser = argparse.ArgumentParser()
parser.add_argument("--output", help="write the picture here")
file, test = parser.parse_args().output, months(5000, seed=0)
results = {"least squares": [], "all months": [], "worst 50 %": [], "worst 10 %": []}
for seed in (1, 2, 3):
    history = months(400, seed)
    fitted = torch.linalg.lstsq(*history).solution
    thetas = [fitted, *(learn_forecast(fitted, history, share) for share in (1.0, 0.5, 0.1))]
    for runs, theta in zip(results.values(), thetas, strict=True):
        weights = portfolios(theta, test)
        earned, zeros = (weights * test[1]).sum(1), (weights == 0).double().mean()
        runs.append((earned.mean().item(), -CVaR(0.1).value(-earned).item(), zeros.item(), weights.mean(0).tolist()))
print("mean ± sd of three histories: return of the test months, of their worst 10 %; share of weights that are 0")
for label, runs in results.items():
    columns = np.array([run[:3] for run in runs]).T
    print(f"{label:14}" + "   ".join(f"{column.mean():6.2f} ± {column.std(ddof=1):.2f}" for column in columns))
face, eq9 = (slope_of_raising_all(fitted, history, constraint) for constraint in (Simplex(), None))
print(f"a derivative that must be 0: {face:.0e} on the face, {eq9:.2f} by eq. 9 alone")
if file:
    draw(results, file)

"""A compositional bilevel problem with a known solution, and what two common mistakes cost.

A leader chooses theta, follower i responds with delta_i, and that costs the leader c_i. Both the mean and the variance
of c_i over all followers should be low:

    h_i = delta.A.delta / 2 - delta.(theta + x_i)      so that delta_i* = A^-1 (theta + x_i)
    c_i = y_i.delta_i + |theta|^2 / 2
    F   = f(mean_i g_i),   g_i = (c_i, c_i^2),   f(u) = u_1 + (u_2 - u_1^2) / (2 r)

    python examples/compositional_quadratic.py [--output picture.png]
"""

import argparse
from functools import partial

import torch
from matplotlib.figure import Figure

from doubly.bilevel import ConjugateGradient, Descent, GradientStep, RunningMean, Terms, cid, minimize

torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(0)
followers, r = 100, 0.5
A = torch.tensor([[1.5, 0.5], [0.5, 1.5]])
y = 1 + 0.5 * torch.randn(followers, 2, generator=generator)
x = 0.3 * torch.randn(followers, 2, generator=generator) - y


def problem(theta, delta, batch):
    x, y = batch
    cost = (y * delta).sum(1) + theta.square().sum() / 2
    inner = (delta @ A * delta).sum(1) / 2 - (delta * (theta + x)).sum(1)
    return Terms(outer=torch.stack([cost, cost**2], 1), inner=inner)


composition = RunningMean(lambda u: u[0] + (u[1] - u[0] ** 2) / (2 * r))
run_cid = partial(minimize, problem, data=(x, y), composition=composition, descent=Descent(GradientStep(2 / 3), 5))


def own_loop(theta, steps):
    theta, state = theta.requires_grad_(), {}
    optimizer = torch.optim.SGD([theta], lr=0.1)
    for _ in range(steps):
        delta = torch.linalg.solve(A, theta.detach() + x, left=False)  # any solver of the inner problems
        terms_at = partial(problem, theta, batch=(x, y))
        direction = cid(terms_at, delta, composition, state, ConjugateGradient())
        state = direction.state
        optimizer.zero_grad()
        direction.loss.backward()
        optimizer.step()
    return theta.detach()


def solution(share=1.0):
    """theta* in closed form, for a leader who sees only a share of the variance."""
    w = torch.linalg.solve(A, y, left=False)  # c_i = w_i.theta + w_i.x_i + |theta|^2 / 2
    covariances = (w - w.mean(0)).T @ torch.cat([w, (w * x).sum(1, keepdim=True)], 1) / followers * share / r
    return -torch.linalg.solve(torch.eye(2) + covariances[:, :2], w.mean(0) + covariances[:, 2])


def path(eta=lambda t: (1 + t) ** -0.5, **settings):
    """theta after each of 500 steps, each on two followers."""
    thetas = []
    settings |= {"step_size": lambda t: 0.1 / (1 + t / 20), "callback": lambda step: thetas.append(step.theta.tolist())}
    sgd, start = partial(torch.optim.SGD, lr=0.1), torch.zeros(followers, 2)
    run_cid(torch.ones(2), start, optimizer=sgd, steps=500, batch_size=2, eta=eta, **settings)
    return torch.tensor(thetas)


def draw(paths, ends, file):
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = [{"color": "#0072B2"}, {"color": "#E69F00", "linestyle": "--"}, {"color": "#D55E00", "linestyle": "-."}]
    for (label, thetas), end, style in zip(paths.items(), ends, styles, strict=True):
        left.loglog(range(1, len(thetas) + 1), (thetas - ends[0]).norm(dim=1), label=label, **style)
        right.plot(*thetas.T, linewidth=0.8, zorder=1, **style)
        right.scatter(*end, marker="*", s=150, color=style["color"], edgecolor="black", zorder=2)
        if label != "CID":
            left.axhline((end - ends[0]).norm(), color=style["color"], linestyle=":")
    left.set(xlabel="step, of two followers each", ylabel="distance to θ*", title="dotted: predicted for each mistake")
    right.set(xlabel="θ₁", ylabel="θ₂", title="paths of θ; stars: predicted ends")
    left.legend(loc="lower left")
    figure.savefig(file, dpi=200)


parser = argparse.ArgumentParser()
parser.add_argument("--output", help="write the picture here")
file = parser.parse_args().output
result = run_cid(torch.ones(2), torch.zeros_like(x), optimizer=partial(torch.optim.SGD, lr=0.1), steps=200)
star, half = solution(), solution(followers / (followers - 1) / 2)  # two followers show half of the variance
print(f"minimize, all followers at once: {(result.theta - star).norm():.0e} from theta*")
print(f"own loop, all followers at once: {(own_loop(torch.ones(2), 200) - star).norm():.0e} from theta*")
paths = {"CID": path(), "no implicit term": path(solve=None), "batch value for u (η = 1)": path(eta=lambda t: 1.0)}
ends = [star, torch.zeros(2), half]
for (label, thetas), end in zip(paths.items(), ends, strict=True):
    print(f"{label:26} {(thetas[-100:].mean(0) - star).norm():.3f} from theta*, predicted {(end - star).norm():.3f}")
if file:
    draw(paths, ends, file)

"""Hyperparameters that are good for the worst class: KL-DRO over the validation losses of the ten digits.

theta   logarithms of ten weights, one per class of the training loss, and of the ridge
delta   the coefficients of a softmax regression, one variable that all rows share
row k   class k: h_k is its weighted training loss plus the ridge, g_k its validation loss
f       the mean of the g_k, or r log mean exp(g_k / r), in which the worst classes count most

python examples/dro_hyperparameters.py [--output picture.png]
"""

import argparse
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from doubly.bilevel import ConjugateGradient, Descent, LogMeanExp, MomentumStep, RunningMean, Terms, minimize

torch.set_default_dtype(torch.float64)
classes, seeds = torch.arange(10), range(5)
images, labels = load_digits(return_X_y=True)
x = images.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16)  # 4 x 4 pixels: a linear model has to choose
x = np.column_stack([(x - x.mean(0)) / x.std(0), np.ones(len(x))])


def split(seed):
    """(10, n, 17) for training, validation and test: 40, 90 and 44 images of each class."""
    order = np.random.default_rng(seed).permutation(len(x))
    by_class = np.stack([x[order[labels[order] == k]][:174] for k in range(10)])
    return [torch.tensor(part) for part in np.split(by_class, [40, 130], axis=1)]


def class_losses(delta, x):
    return -(x @ delta).log_softmax(2)[classes, :, classes].mean(1)


def training_loss(theta, delta, batch):
    weights = 10 * theta["class"].softmax(0)
    return weights * class_losses(delta, batch[0]) + theta["ridge"].exp() * delta.square().sum() / 2


def problem(theta, delta, batch):
    return Terms(outer=class_losses(delta, batch[1]), inner=training_loss(theta, delta, batch))


def tune(composition, training, validation):
    theta = {"class": torch.zeros(10), "ridge": torch.tensor(-4.0)}
    levels = {"shared": True, "inner": training_loss, "composition": composition}
    solvers = {"descent": Descent(MomentumStep(0.5), steps=20), "solve": ConjugateGradient(60, tolerance=1e-2)}
    outer = {"optimizer": partial(torch.optim.Adam, lr=0.2), "step_size": lambda t: 0.2 * (1 - t / 40), "steps": 40}
    result = minimize(problem, theta, torch.zeros(17, 10), (training, validation), **levels, **solvers, **outer)
    return result.delta, (10 * theta["class"].softmax(0)).tolist()


def fit_untuned(training, validation):
    model = LogisticRegression(fit_intercept=False, max_iter=1000)  # the last column of x is 1
    model.fit(training.flatten(0, 1), classes.repeat_interleave(training.shape[1]))
    return torch.tensor(model.coef_.T), [1.0] * 10


def draw(results, file):
    figure = Figure(figsize=(7.2, 5), layout="constrained")
    axes = figure.subplots(2, sharex=True)
    for axis, column, label in zip(axes, (0, 2), ("test loss", "weight in training"), strict=True):
        for place, (name, color) in enumerate([("mean", "#E69F00"), ("KL-DRO", "#0072B2")]):
            values = np.array([run[column] for run in results[name]])
            axis.bar(classes - 0.2 + 0.4 * place, values.mean(0), 0.38, color=color, label=f"tuned for {name}")
            axis.plot(classes - 0.2 + 0.4 * place, values.T, "k.", markersize=4)
        axis.set_ylabel(label)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2, frameon=False)
    axes[1].set(xlabel="digit (bars: mean of five splits, dots: each)", xticks=range(10))
    figure.savefig(file, dpi=200)


parser = argparse.ArgumentParser()
parser.add_argument("--output", help="write the picture here")
file = parser.parse_args().output
kl = LogMeanExp(r=0.2, eta=1.0)  # every step sees all classes, so u need not be averaged
methods = {"untuned": fit_untuned, "mean": partial(tune, RunningMean(eta=1.0)), "KL-DRO": partial(tune, kl)}
results = {name: [] for name in methods}
for training, validation, test in map(split, seeds):
    for name, method in methods.items():
        delta, weights = method(training, validation)
        correct = ((test @ delta).argmax(2) == classes[:, None]).double().mean(1)
        results[name].append((class_losses(delta, test).tolist(), correct.tolist(), weights))
print("on test images, mean ± sd of five splits: loss, of the worst class; accuracy, of the worst class")
for name, runs in results.items():
    losses, correct, _ = np.array(runs).swapaxes(0, 1)
    columns = [losses.mean(1), losses.max(1), correct.mean(1), correct.min(1)]
    print(f"{name:8}  " + "   ".join(f"{column.mean():.3f} ± {column.std(ddof=1):.3f}" for column in columns))
worst = {name: np.array([max(losses) for losses, _, _ in runs]) for name, runs in results.items()}
print("loss of the worst class, KL-DRO minus mean, by split:", np.round(worst["KL-DRO"] - worst["mean"], 3))
print("weight of each class, KL-DRO:", np.mean([weights for _, _, weights in results["KL-DRO"]], axis=0).round(2))
if file:
    draw(results, file)

"""The time of AutoAttack: `pyautoattack` called directly, and its attacks as an evaluation calls them.

All have the same network, images, seeds and chunk. For each attack the contestants run in turn, in rotating order, on
the images that are still correct; at the end their outcomes are compared image by image. A line is the median of the
rounds' ratios with the smallest and the largest.

    python benchmarks/autoattack.py --run runs/NAME --data-root DIR [--images 100] [--rounds 2]
    python benchmarks/autoattack.py     # no data: a narrow ResNet, trained for a minute on digits of 32x32
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lines import Outcome, Seconds, Settings, medians, ratio, shown
from pyautoattack import AutoAttack as Reference
from sklearn.datasets import load_digits
from torch import Tensor, nn

from doubly import AT, PGD, LinfBall, train
from doubly.attacks import attack_context
from doubly.attacks.autoattack import STANDARD, AutoAttack, Part
from doubly.attacks.folding import FoldedForward
from doubly.bilevel import SignStep
from doubly.checkpoints.load import load_model, load_run
from doubly.data import load_splits
from doubly.data.holdout import stratified_subset
from doubly.evaluation.autoattack.forward import CountedForward
from doubly.models import NarrowResNet

IMAGES = 32  # for the page
Contestant = Callable[[Part, Tensor, Tensor], Tensor]  # attack, images, labels -> which images are still correct


def load_problem(path: Path, root: Path | None) -> tuple[nn.Module, Tensor, Tensor, float]:
    """Return network, test images, labels and radius of a run directory."""
    run = load_run(path)
    test = load_splits(run.data, root).test
    return load_model(path), test.pixels(slice(None)), test.y, run.validation.attack.threat.radius


def digits_problem(epochs: int = 4) -> tuple[nn.Module, Tensor, Tensor, float]:
    """Train a narrow ResNet on enlarged digits; return it with test images, labels and radius."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.nn.functional.interpolate(torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8), size=32)
    x, y = x.expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels)
    model = NarrowResNet().build(3, 10, (0.3,) * 3, (0.35,) * 3)
    method = AT(PGD(LinfBall(0.1), 2, SignStep(0.075)))
    train(model, (x[:1000], y[:1000]), method, test=(x[1000:1200], y[1000:1200]), epochs=epochs, batch_size=50)
    return model, x[1200:], y[1200:], 0.1


def reference(model: nn.Module, radius: float) -> Contestant:
    """Return the reference, called with trainable parameters, as its users call it."""
    theirs = copy.deepcopy(model).requires_grad_()

    def run(part: Part, x: Tensor, y: Tensor) -> Tensor:
        attack = Reference(theirs, eps=radius, seed=0, version="custom", attacks=[part], device=x.device)
        attack.apgd.n_restarts, attack.fab.n_restarts = 1, 1  # as in its standard version
        _, predictions = attack.run_standard_evaluation(x, y, batch_size=len(x))
        return predictions == y

    return run


def ours(model: nn.Module, forward: Callable[[Tensor], Tensor], radius: float) -> Contestant:
    """Return the same attacks as an evaluation calls them."""
    attack = AutoAttack(LinfBall(radius))

    def run(part: Part, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            classes = model(x[:1]).shape[1]
        attacked = attack.perturb(part, forward, x, y, classes, lambda warning: None)
        with torch.no_grad():
            return model(attacked).argmax(1) == y

    return run


def make_contestants(model: nn.Module, x: Tensor, radius: float, unfolded: bool) -> dict[str, Contestant]:
    """Return the contestants. Call it inside `attack_context`."""
    contestants = {"reference": reference(model, radius)}
    if unfolded:
        contestants["unfolded"] = ours(model, CountedForward(model), radius)
    return {**contestants, "folded": ours(model, CountedForward(FoldedForward(model, x[:64])), radius)}


def race(
    contestants: dict[str, Contestant], model: nn.Module, x: Tensor, y: Tensor, parts: Sequence[Part], rounds: int
) -> tuple[dict[Part, Seconds], dict[str, int]]:
    """Return seconds by attack, and for how many images each outcome of the last round differs from the first's."""
    seconds: dict[Part, Seconds] = {part: {name: [] for name in contestants} for part in parts}
    names = list(contestants)
    with torch.no_grad():
        correct = model(x).argmax(1) == y
    robust: dict[str, Tensor] = {}
    for turn in range(rounds):
        robust = {name: correct.clone() for name in names}
        for part in parts:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                rows = robust[name].nonzero().squeeze(1)
                start = time.perf_counter()
                robust[name][rows] = contestants[name](part, x[rows], y[rows])  # which waits for the device
                seconds[part][name].append(time.perf_counter() - start)
            texts = (f"{name}: {seconds[part][name][-1]:.1f} s, {int(robust[name].sum())} robust" for name in names)
            print(f"  round {turn + 1}, {part:8}", ", ".join(texts), flush=True)
    return seconds, {name: int((robust[name] != robust[names[0]]).sum()) for name in names[1:]}


def total_seconds(seconds: dict[Part, Seconds]) -> Seconds:
    """Return the time of all attacks of each round."""
    return {
        name: [sum(spent) for spent in zip(*(part[name] for part in seconds.values()), strict=True)]
        for name in next(iter(seconds.values()))
    }


def measure(settings: Settings) -> Outcome:
    """Return this part of the page."""
    device = torch.device(settings.device)
    model, x, y, radius = digits_problem(epochs=1 if settings.quick else 4)
    rows = stratified_subset(y, 6 if settings.quick else IMAGES, seed=0)
    x, y, model = x[rows].to(device), y[rows].to(device), model.to(device).eval()
    parts: Sequence[Part] = STANDARD[:1] if settings.quick else STANDARD
    with attack_context(model, "eval"):
        contestants = make_contestants(model, x, radius, unfolded=False)
        seconds, differing = race(contestants, model, x, y, parts, settings.rounds)
    total = total_seconds(seconds)
    lines = [ratio(total, "folded", "reference", 0.5)]
    for part, spent in seconds.items():
        line = ratio(spent, "folded", "reference", None)
        lines.append(replace(line, what=f"{part} alone"))
    note = f"Of {len(y)} predictions, {differing.get('folded', 0)} differ."
    sizes = f"standard AutoAttack on {len(y)} digits of 3x32x32, narrow ResNet trained by AT, ε = {radius}"
    return Outcome(lines, sizes, medians(total), [note])


def main() -> None:
    """Time AutoAttack on a run directory, or on digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run directory with a trained network")
    parser.add_argument("--data-root", type=Path, help="folder with the dataset's files")
    parser.add_argument("--images", type=int, default=100, help="number of images")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds")
    parser.add_argument("--no-unfolded", action="store_true", help="leave that contestant out")
    parser.add_argument("--parts", nargs="+", default=list(STANDARD), choices=STANDARD, help="attacks")
    options = parser.parse_args()
    model, x, y, radius = load_problem(options.run, options.data_root) if options.run else digits_problem()
    rows = stratified_subset(y, options.images, seed=0)
    x, y, model = x[rows], y[rows], model.eval()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(y)} images, epsilon {radius:.4f}")
    with attack_context(model, "eval"):
        contestants = make_contestants(model, x, radius, not options.no_unfolded)
        seconds, differing = race(contestants, model, x, y, options.parts, options.rounds)
    for name, count in differing.items():
        median, spread, *_ = shown(ratio(total_seconds(seconds), name, "reference"))
        print(f"{name} / reference: {median} ({spread}); {count} of {len(y)} images differ")


if __name__ == "__main__":
    main()

"""What AutoAttack costs: `pyautoattack` called plainly, and its attacks under our driver, uncompiled and compiled.

The same network, images, seeds and chunk. Attack by attack the contestants take turns, each beginning in turn, on the
samples that still stand; who stands after each attack is compared sample by sample. A line is a ratio of sums with the
smallest and largest ratio of one attack in one round; the time to compile is told by itself and not in it.

    python benchmarks/autoattack.py --run runs/NAME --data-root DIR [--images 100] [--rounds 2]
    python benchmarks/autoattack.py     # no data: a narrow ResNet, trained a minute on digits of 32x32
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from pyautoattack import AutoAttack as Reference
from sklearn.datasets import load_digits
from torch import Tensor, nn

from doubly import AT, PGD, LinfBall, train
from doubly.attacks import attacked
from doubly.attacks.autoattack import STANDARD, AutoAttack, Part
from doubly.attacks.forward import Plain, compiled
from doubly.bilevel import SignStep
from doubly.data.holdout import probe
from doubly.models import NarrowResNet
from doubly.runs import load_model, load_run
from doubly.runs.build import load_splits

Contestant = Callable[[Part, Tensor, Tensor], Tensor]  # attack, images, labels -> who is still answered rightly


def from_run(path: Path, root: Path | None) -> tuple[nn.Module, Tensor, Tensor, float]:
    run = load_run(path)
    run = replace(run, data=replace(run.data, root=str(root))) if root else run
    test = load_splits(run).test
    return load_model(path), test.pixels(slice(None)), test.y, run.probe.attack.threat.radius  # type: ignore[attr-defined]


def on_digits() -> tuple[nn.Module, Tensor, Tensor, float]:
    pixels, labels = load_digits(return_X_y=True)
    x = torch.nn.functional.interpolate(torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8), size=32)
    x, y = x.expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels)
    model = NarrowResNet().build(3, 10, (0.3,) * 3, (0.35,) * 3)
    method = AT(PGD(LinfBall(0.1), 2, SignStep(0.075)))
    train(model, (x[:1000], y[:1000]), method, test=(x[1000:1200], y[1000:1200]), epochs=4, batch=50)
    return model, x[1200:], y[1200:], 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run directory with a trained network")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-uncompiled", action="store_true", help="leave that contestant out")
    parser.add_argument("--parts", nargs="+", default=list(STANDARD), choices=STANDARD)
    options = parser.parse_args()
    model, x, y, radius = from_run(options.run, options.data_root) if options.run else on_digits()
    chosen = probe(y, options.images, seed=0)
    x, y, model = x[chosen], y[chosen], model.eval()
    ours = AutoAttack(LinfBall(radius))
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    theirs = copy.deepcopy(model)  # with its parameters free, as it would be called

    def plainly(part: Part, x: Tensor, y: Tensor) -> Tensor:
        reference = Reference(theirs, eps=radius, seed=0, version="custom", attacks=[part])
        reference.apgd.n_restarts, reference.fab.n_restarts = 1, 1  # as in its standard version
        _, answers = reference.run_standard_evaluation(x, y, batch_size=len(x))
        return answers == y

    def driven(forward: Callable[[Tensor], Tensor]) -> Contestant:
        def run(part: Part, x: Tensor, y: Tensor) -> Tensor:
            found = ours.perturb(part, forward, x, y, classes, lambda said: None)
            with torch.no_grad():
                return model(found).argmax(1) == y

        return run

    with attacked(model, "eval"):
        fast, said = compiled(model, x[:64])
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(y)} images, epsilon {radius:.4f}")
        print(said)
        contestants: dict[str, Contestant] = {"plainly": plainly}
        if not options.no_uncompiled:
            contestants["uncompiled"] = driven(Plain(model))
        if fast is not None:
            contestants["compiled"] = driven(fast)
        race(contestants, model, x, y, options.parts, options.rounds)


def race(
    contestants: dict[str, Contestant], model: nn.Module, x: Tensor, y: Tensor, parts: list[Part], rounds: int
) -> None:
    seconds: dict[tuple[str, Part, int], float] = {}
    with torch.no_grad():
        right = model(x).argmax(1) == y
    standing = {name: right.clone() for name in contestants}
    for turn in range(rounds):
        standing = {name: right.clone() for name in contestants}
        for part in parts:
            order = list(contestants)[turn % len(contestants) :] + list(contestants)[: turn % len(contestants)]
            for name in order:
                rows = standing[name].nonzero().squeeze(1)
                begun = time.perf_counter()
                standing[name][rows] = contestants[name](part, x[rows], y[rows])
                seconds[name, part, turn] = time.perf_counter() - begun
            print(
                f"round {turn + 1}, {part:8}",
                ", ".join(f"{n}: {seconds[n, part, turn]:.1f} s, {int(standing[n].sum())} stand" for n in contestants),
                flush=True,
            )
    for name in list(contestants)[1:]:
        differing = int((standing[name] != standing["plainly"]).sum())
        sums = [sum(v for (n, _, _), v in seconds.items() if n == each) for each in (name, "plainly")]
        ratios = [seconds[name, p, t] / seconds["plainly", p, t] for p in parts for t in range(rounds)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name} / plainly: {sums[0] / sums[1]:.2f} {spread}; {differing} of {len(y)} samples differ")


if __name__ == "__main__":
    main()

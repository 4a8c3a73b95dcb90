"""What AutoAttack costs: `pyautoattack` called plainly, and its attacks under our driver, uncompiled and compiled.

The same network, images, seeds and chunk. Attack by attack the contestants take turns, each beginning in turn, on the
samples that still stand; who stands in the end is compared sample by sample. A line is the median of the rounds' ratios
with the smallest and the largest; the time to compile is told by itself and not in it.

    python benchmarks/autoattack.py --run runs/NAME --data-root DIR [--images 100] [--rounds 2]
    python benchmarks/autoattack.py     # no data: a narrow ResNet, trained a minute on digits of 32x32
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
from doubly.attacks.compiled import PlainForward, compile_forward
from doubly.bilevel import SignStep
from doubly.checkpoints.load import load_model, load_run
from doubly.data import load_splits
from doubly.data.holdout import stratified_subset
from doubly.models import NarrowResNet

IMAGES = 32  # of the page
Contestant = Callable[[Part, Tensor, Tensor], Tensor]  # attack, images, labels -> who is still answered rightly


def from_run(path: Path, root: Path | None) -> tuple[nn.Module, Tensor, Tensor, float]:
    run = load_run(path)
    run = replace(run, data=replace(run.data, root=str(root))) if root else run
    test = load_splits(run.data).test
    return load_model(path), test.pixels(slice(None)), test.y, run.validation.attack.threat.radius  # type: ignore[attr-defined]


def on_digits(epochs: int = 4) -> tuple[nn.Module, Tensor, Tensor, float]:
    pixels, labels = load_digits(return_X_y=True)
    x = torch.nn.functional.interpolate(torch.tensor(pixels / 16).float().reshape(-1, 1, 8, 8), size=32)
    x, y = x.expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels)
    model = NarrowResNet().build(3, 10, (0.3,) * 3, (0.35,) * 3)
    method = AT(PGD(LinfBall(0.1), 2, SignStep(0.075)))
    train(model, (x[:1000], y[:1000]), method, test=(x[1000:1200], y[1000:1200]), epochs=epochs, batch_size=50)
    return model, x[1200:], y[1200:], 0.1


def plainly(model: nn.Module, radius: float) -> Contestant:
    """The reference with the network as it would be called: parameters free."""
    theirs = copy.deepcopy(model).requires_grad_()

    def run(part: Part, x: Tensor, y: Tensor) -> Tensor:
        reference = Reference(theirs, eps=radius, seed=0, version="custom", attacks=[part], device=x.device)
        reference.apgd.n_restarts, reference.fab.n_restarts = 1, 1  # as in its standard version
        _, answers = reference.run_standard_evaluation(x, y, batch_size=len(x))
        return answers == y

    return run


def driven(model: nn.Module, forward: Callable[[Tensor], Tensor], radius: float) -> Contestant:
    """The same attacks under our driver."""
    ours = AutoAttack(LinfBall(radius))

    def run(part: Part, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            classes = model(x[:1]).shape[1]
        found = ours.perturb(part, forward, x, y, classes, lambda said: None)
        with torch.no_grad():
            return model(found).argmax(1) == y

    return run


def contestants(model: nn.Module, x: Tensor, radius: float, uncompiled: bool) -> tuple[dict[str, Contestant], str]:
    """Those who take part, and what is said about compiling. The model is attacked already."""
    found = {"plainly": plainly(model, radius)}
    if uncompiled:
        found["uncompiled"] = driven(model, PlainForward(model), radius)
    fast, said = compile_forward(model, x[:64])
    if fast is not None:
        found["compiled"] = driven(model, fast, radius)
    return found, said


def race(
    racing: dict[str, Contestant], model: nn.Module, x: Tensor, y: Tensor, parts: Sequence[Part], rounds: int
) -> tuple[dict[Part, Seconds], dict[str, int]]:
    """Seconds by attack, and of how many samples each is of another opinion than the first in the last round."""
    seconds: dict[Part, Seconds] = {part: {name: [] for name in racing} for part in parts}
    names = list(racing)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    standing: dict[str, Tensor] = {}
    for turn in range(rounds):
        standing = {name: right.clone() for name in names}
        for part in parts:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                rows = standing[name].nonzero().squeeze(1)
                begun = time.perf_counter()
                standing[name][rows] = racing[name](part, x[rows], y[rows])  # which waits for the device
                seconds[part][name].append(time.perf_counter() - begun)
            said = (f"{n}: {seconds[part][n][-1]:.1f} s, {int(standing[n].sum())} stand" for n in names)
            print(f"  round {turn + 1}, {part:8}", ", ".join(said), flush=True)
    return seconds, {name: int((standing[name] != standing[names[0]]).sum()) for name in names[1:]}


def together(seconds: dict[Part, Seconds]) -> Seconds:
    """All attacks of a round."""
    return {
        name: [sum(spent) for spent in zip(*(part[name] for part in seconds.values()), strict=True)]
        for name in next(iter(seconds.values()))
    }


def measure(settings: Settings) -> Outcome:
    """The part of the page."""
    device = torch.device(settings.device)
    model, x, y, radius = on_digits(epochs=1 if settings.quick else 4)
    chosen = stratified_subset(y, 6 if settings.quick else IMAGES, seed=0)
    x, y, model = x[chosen].to(device), y[chosen].to(device), model.to(device).eval()
    parts: Sequence[Part] = STANDARD[:1] if settings.quick else STANDARD
    with attack_context(model, "eval"):
        racing, said = contestants(model, x, radius, uncompiled=False)
        print(f"  {said}", flush=True)
        seconds, differing = race(racing, model, x, y, parts, settings.rounds)
    whole = together(seconds)
    lines = [ratio(whole, "compiled", "plainly", 0.5, {"compiled": said})]
    for part, spent in seconds.items():
        one = ratio(spent, "compiled", "plainly", None, {"compiled": said})
        lines.append(replace(one, what=f"{part} alone"))
    note = f"Compiling is not in it. Of {len(y)} answers, {differing.get('compiled', 0)} differ."
    sizes = f"standard AutoAttack on {len(y)} digits of 3x32x32, narrow ResNet trained by AT, ε = {radius}"
    return Outcome(lines, sizes, medians(whole), [note])


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
    chosen = stratified_subset(y, options.images, seed=0)
    x, y, model = x[chosen], y[chosen], model.eval()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(y)} images, epsilon {radius:.4f}")
    with attack_context(model, "eval"):
        racing, said = contestants(model, x, radius, not options.no_uncompiled)
        print(said)
        seconds, differing = race(racing, model, x, y, options.parts, options.rounds)
    for name, count in differing.items():
        median, spread, *_ = shown(ratio(together(seconds), name, "plainly"))
        print(f"{name} / plainly: {median} ({spread}); {count} of {len(y)} samples differ")


if __name__ == "__main__":
    main()

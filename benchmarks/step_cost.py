"""The cost of a training step: DONE against AT, our AT against a bare loop and against the official baselines' loop.

All contestants take turns within one run, so that a noisy machine disturbs them equally; a line is the median of the
ratios of the rounds with the smallest and the largest. Passes are counted, not timed. Peak memory is measured in a
process of its own per contestant.

    python benchmarks/step_cost.py [--models narrow_resnet resnet18] [--rounds 5] [--batch-size 128] [--steps 10]
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
import torch.nn.functional as F
from clock import peak_above, timed
from lines import Line, Outcome, Seconds, Settings, answer, medians, ratio, shown, taking_turns
from torch import Tensor, nn

from doubly import AT, DONE, PGD, Batch, TrainStep
from doubly.bilevel import SignStep
from doubly.methods import Method
from doubly.models import MODELS
from doubly.training.passes import counted_passes

EPSILON, SIZE = 8 / 255, 2 / 255
Step = Callable[[int], None]  # a training step whose attack has that many steps
CONTESTANTS = ["AT", "DONE first_order", "DONE exact", "bare loop", "official loop"]
AIMS: dict[tuple[str, str], dict[str, float]] = {  # above, below -> model -> aim
    ("AT", "bare loop"): {"narrow_resnet": 0.85, "resnet18": 0.85},
    ("AT", "official loop"): {"narrow_resnet": 0.47, "resnet18": 0.52},
    ("DONE first_order", "AT"): {"narrow_resnet": 1.12, "resnet18": 1.12},
    ("DONE exact", "AT"): {"narrow_resnet": 1.8, "resnet18": 1.4},
}


def start(x: Tensor) -> Tensor:
    """Return a uniform start in the ball, clipped to the image range."""
    noise = EPSILON * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1)
    return (x + noise.to(x.device)).clamp(0, 1) - x


def bare(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return the passes that AT needs and nothing else: frozen parameters, gradients of the input only."""
    parameters = list(model.parameters())

    def step(steps: int) -> None:
        delta = start(x)
        model.eval()
        for p in parameters:
            p.requires_grad_(False)
        for _ in range(steps):
            delta.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y, reduction="sum"), delta)
            with torch.no_grad():
                delta = (delta + SIZE * gradient.sign()).clamp(-EPSILON, EPSILON)
                delta = (x + delta).clamp(0, 1) - x
        for p in parameters:
            p.requires_grad_()
        model.train()
        F.cross_entropy(model(x + delta), y).backward()

    return step


def official(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return the loop of the published baselines: `backward()` through all parameters in every attack step."""

    def step(steps: int) -> None:
        adversarial = x + start(x)
        model.eval()
        for _ in range(steps):
            adversarial = adversarial.detach().requires_grad_()
            model.zero_grad()
            F.cross_entropy(model(adversarial), y).backward()
            moved = adversarial.detach() + SIZE * adversarial.grad.sign()
            adversarial = torch.min(torch.max(moved, x - EPSILON), x + EPSILON).clamp(0, 1)
        model.train()
        model.zero_grad()
        F.cross_entropy(model(adversarial), y).backward()

    return step


def method(label: str, steps: int) -> Method:
    """Return AT or DONE with so many attack steps."""
    attack = PGD(steps=steps, rule=SignStep(SIZE))
    return AT(attack) if label == "AT" else DONE(attack, implicit=label.removeprefix("DONE "))  # type: ignore[arg-type]


def ours(label: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step of our method."""
    batch, method_of = Batch(x, y, torch.arange(len(y), device=y.device)), cache(partial(method, label))

    def step(steps: int) -> None:
        model.train()
        method_of(steps).objective(model, batch, {}, TrainStep(progress=0.7)).loss.backward()

    return step


def network(name: str, layout: torch.memory_format, device: torch.device) -> nn.Module:
    """Return a new network, always with the same weights."""
    torch.manual_seed(0)
    return MODELS[name]().build(3, 10, [0.5] * 3, [0.25] * 3).to(device, memory_format=layout)


def contestants(name: str, batch_size: int, device: torch.device, labels: Iterable[str]) -> dict[str, Step]:
    """Return each on its own copy of the same network, all but the official loop in the faster memory format."""
    torch.manual_seed(0)
    x, y = torch.rand(batch_size, 3, 32, 32, device=device), torch.randint(10, (batch_size,), device=device)
    near = x.contiguous(memory_format=torch.channels_last)
    steps: dict[str, Step] = {}
    for label in labels:
        if label == "official loop":
            steps[label] = official(network(name, torch.contiguous_format, device), x, y)
            continue
        model = network(name, torch.channels_last, device)
        steps[label] = bare(model, near, y) if label == "bare loop" else ours(label, model, near, y)
    return steps


def passes(name: str, label: str, steps: int) -> tuple[int, int]:
    """Count the (forward, backward) passes of one step; a double backward counts as one more."""
    torch.manual_seed(0)
    model, x, y = network(name, torch.contiguous_format, torch.device("cpu")), torch.rand(4, 3, 32, 32), torch.arange(4)
    with counted_passes(model, 4) as counts:
        (bare(model, x, y) if label == "bare loop" else ours(label, model, x, y))(steps)
    return round(counts.forward), round(counts.backward)


def race(name: str, batch_size: int, steps: int, rounds: int, labels: Iterable[str], device: torch.device) -> Seconds:
    """Time all contestants, round by round."""
    racing = contestants(name, batch_size, device, labels)
    for step in racing.values():
        step(1)  # warm up, with one step of the attack
    clocks = {label: lambda s=step: timed(lambda: s(steps), device) for label, step in racing.items()}
    return taking_turns(clocks, rounds)


def lines(name: str, seconds: Seconds) -> list[Line]:
    """Return the ratios of contestants that took part."""
    pairs = [pair for pair in AIMS if all(label in seconds for label in pair)]
    return [ratio(seconds, *pair, AIMS[pair].get(name)) for pair in pairs]


def measure(settings: Settings) -> Outcome:
    """Measure the network that the part is named after."""
    name, device = settings.part, torch.device(settings.device)
    batch_size, steps = (8, 2) if settings.quick else (128, 10)
    seconds = race(name, batch_size, steps, settings.rounds, CONTESTANTS, device)
    counts = {label: passes(name, label, steps) for label in ("AT", "bare loop")}
    note = "; ".join(
        f"{label}: {forward} forward, {backward} backward" for label, (forward, backward) in counts.items()
    )
    equal = answer("AT takes the passes of the bare loop", counts["AT"] == counts["bare loop"], note)
    sizes = f"batch {batch_size}, K = {steps}, 3x32x32, 10 classes"
    return Outcome([equal, *lines(name, seconds)], sizes, medians(seconds))


def peak_memory(name: str, label: str, batch_size: int) -> float:
    """Return the MiB of one step in a process of its own; the peak is that of one pass, whatever K."""
    command = [sys.executable, __file__, "--models", name, "--batch-size", str(batch_size), "--peak-of", label]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["narrow_resnet", "resnet18"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        racing = contestants(options.models[0], options.batch_size, options.device, [options.peak_of])
        print(peak_above(lambda: racing[options.peak_of](1), options.device))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {options.batch_size}, K = {options.steps}"
    )
    print("\npasses per step, counted:")
    for label in CONTESTANTS[:-1]:
        forward, backward = passes("narrow_resnet", label, options.steps)
        print(f"  {label:18} {forward:3} forward, {backward:3} backward")
    for name in options.models:
        print(f"\n{name}:")
        seconds = race(name, options.batch_size, options.steps, options.rounds, options.contestants, options.device)
        for label, value in medians(seconds).items():
            print(f"  {label:20} {value:8.3f} s   {peak_memory(name, label, options.batch_size):7.0f} MiB")
        for line in lines(name, seconds):
            print("  " + f"{line.what}: {'  '.join(shown(line))} {line.note}".rstrip())


if __name__ == "__main__":
    main()

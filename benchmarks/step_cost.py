"""What a training step costs: DONE against AT, our AT against a bare loop and against the official baselines' loop.

All contestants take turns within one run, so that a noisy machine disturbs them alike; every line is a ratio of medians
with the smallest and largest ratio seen in one round. Passes are counted, not timed. Peak memory comes from a process
of its own per contestant.

    python benchmarks/step_cost.py [--models narrow_resnet resnet18] [--rounds 5] [--batch 128] [--steps 10]
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doubly import AT, DONE, PGD, Batch, Moment
from doubly.bilevel import SignStep
from doubly.models import MODELS
from doubly.types import Method

EPSILON, SIZE = 8 / 255, 2 / 255
Step = Callable[[], None]


def start(x: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in the ball, cut to the image range."""
    noise = EPSILON * (2 * torch.rand(x.shape, generator=generator) - 1)
    return (x + noise).clamp(0, 1) - x


def bare(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Step:
    """The passes that AT needs and nothing else: frozen parameters, gradients of the input alone."""
    parameters = list(model.parameters())

    def step() -> None:
        delta = start(x, torch.Generator().manual_seed(0))
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


def official(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Step:
    """As the published baselines do it: `backward()` through all parameters in every attack step."""

    def step() -> None:
        adversarial = x + start(x, torch.Generator().manual_seed(0))
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


def ours(method: Method, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    batch, state = Batch(x, y, torch.arange(len(y))), method.init()

    def step() -> None:
        model.train()
        method.objective(model, batch, state, Moment(progress=0.7)).scalar.backward()

    return step


def contestants(name: str, batch: int, steps: int) -> dict[str, Step]:
    """Each on its own copy of the same network, in the faster memory format, but for the official one."""
    torch.manual_seed(0)
    x, y = torch.rand(batch, 3, 32, 32), torch.randint(10, (batch,))
    weights = MODELS[name]().build(3, 10, [0.5] * 3, [0.25] * 3).state_dict()

    def network(layout: torch.memory_format) -> nn.Module:
        model = MODELS[name]().build(3, 10, [0.5] * 3, [0.25] * 3)
        model.load_state_dict(weights)
        return model.to(memory_format=layout)

    fast, plain = torch.channels_last, torch.contiguous_format
    attack, near = PGD(steps=steps, rule=SignStep(SIZE)), x.contiguous(memory_format=fast)
    return {
        "AT": ours(AT(attack), network(fast), near, y),
        "DONE none": ours(DONE(attack, implicit="none"), network(fast), near, y),
        "DONE first_order": ours(DONE(attack, implicit="first_order"), network(fast), near, y),
        "DONE exact": ours(DONE(attack, implicit="exact"), network(fast), near, y),
        "bare loop": bare(network(fast), near, y, steps),
        "official loop": official(network(plain), x, y, steps),
    }


LABELS = ["AT", "DONE none", "DONE first_order", "DONE exact", "bare loop", "official loop"]
RATIOS = (
    ("DONE first_order", "AT", 1.2),
    ("DONE exact", "AT", None),
    ("DONE none", "AT", None),
    ("AT", "bare loop", 1.05),
    ("AT", "official loop", 0.7),
)


def count_passes(name: str, steps: int) -> dict[str, tuple[int, int]]:
    """(forward, backward) passes of one step, by hooks on the logits; a double backward counts as one more."""
    found = {}
    torch.manual_seed(0)
    x, y = torch.rand(4, 3, 32, 32), torch.randint(10, (4,))
    attack = PGD(steps=steps, rule=SignStep(SIZE))
    for label, method in (
        ("AT", AT(attack)),
        *((f"DONE {implicit}", DONE(attack, implicit=implicit)) for implicit in ("none", "first_order", "exact")),
    ):
        model = MODELS[name]().build(3, 10, [0.5] * 3, [0.25] * 3)
        forward, backward = [], []

        def note(module: nn.Module, inputs: object, output: Tensor, forward=forward, backward=backward) -> None:
            forward.append(1)
            output.register_hook(lambda gradient: backward.append(1))

        model.register_forward_hook(note)
        ours(method, model, x, y)()
        found[label] = (len(forward), len(backward))
    return found


def peak_memory(name: str, label: str, batch: int) -> float:
    """MiB that one step takes above the idle process, in a process of its own; the peak is one pass's, whatever K."""
    asked = [sys.executable, __file__, "--models", name, "--batch", str(batch), "--peak-of", label]
    return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def report_peak(name: str, label: str, batch: int) -> None:
    step = contestants(name, batch, 1)[label]
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports (Linux)
    idle = resident("VmRSS")
    step()
    print(resident("VmHWM") - idle)


def resident(field: str) -> float:
    """MiB, now (VmRSS) or at the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure(name: str, batch: int, steps: int, rounds: int, chosen: list[str]) -> dict[str, list[float]]:
    for step in contestants(name, 8, 1).values():
        step()  # warm up, on little
    steps_of = {label: step for label, step in contestants(name, batch, steps).items() if label in chosen}
    seconds: dict[str, list[float]] = {label: [] for label in steps_of}
    labels = list(steps_of)
    for turn in range(rounds):  # each round begins with another one: what ran before leaves its mark on the heap
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            step = steps_of[label]
            begun = time.perf_counter()
            step()
            seconds[label].append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["narrow_resnet", "resnet18"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contestants", nargs="+", default=LABELS, choices=LABELS)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        report_peak(options.models[0], options.peak_of, options.batch)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {options.batch}, K = {options.steps}")
    print("\npasses per step (forward, backward), counted:")
    for label, (forward, backward) in count_passes("narrow_resnet", options.steps).items():
        print(f"  {label:18} {forward:3} forward, {backward:3} backward")
    for name in options.models:
        seconds = measure(name, options.batch, options.steps, options.rounds, options.contestants)
        print(f"\n{name}: seconds per step (median of {options.rounds}) and peak memory of a step")
        for label, values in seconds.items():
            memory = peak_memory(name, label, options.batch)
            print(f"  {label:18} {statistics.median(values):8.3f} s   {memory:7.0f} MiB")
        for above, below, aim in RATIOS:
            if above not in seconds or below not in seconds:
                continue
            rounds = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
            text = f"  {above} / {below}: {statistics.median(rounds):.3f}  ({min(rounds):.3f} to {max(rounds):.3f})"
            print(text + (f"   aim <= {aim}: {'met' if statistics.median(rounds) <= aim else 'MISSED'}" if aim else ""))


if __name__ == "__main__":
    main()

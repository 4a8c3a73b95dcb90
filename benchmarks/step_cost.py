"""What a training step costs: DONE against AT, our AT against a bare loop and against the official baselines' loop.

All contestants take turns within one run, so that a noisy machine disturbs them alike; a line is the median of the
ratios of the rounds with the smallest and the largest. Passes are counted, not timed. Peak memory comes from a process
of its own per contestant.

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
from doubly.attacks import attacked, forward
from doubly.bilevel import SignStep
from doubly.models import MODELS
from doubly.training.passes import counted
from doubly.types import Method

EPSILON, SIZE = 8 / 255, 2 / 255
Step = Callable[[int], None]  # a training step whose attack has that many steps
EAGER = ["AT", "DONE first_order", "DONE exact", "bare loop", "official loop"]
COMPILED = ["AT compiled", "DONE exact compiled"]
CHOSEN = {"narrow_resnet": EAGER + COMPILED, "resnet18": EAGER}  # compiling ResNet-18 takes longer than its rounds
AIMS: dict[tuple[str, str], dict[str, float]] = {  # above, below -> model -> aim
    ("AT", "bare loop"): {"narrow_resnet": 1.03, "resnet18": 1.03},
    ("AT compiled", "bare loop"): {"narrow_resnet": 0.5},
    ("AT", "official loop"): {"resnet18": 0.55},
    ("AT compiled", "official loop"): {"narrow_resnet": 0.4},
    ("DONE first_order", "AT"): {"narrow_resnet": 1.15, "resnet18": 1.15},
    ("DONE exact", "AT"): {"narrow_resnet": 1.8, "resnet18": 1.4},
    ("DONE exact compiled", "AT compiled"): {},
}


def start(x: Tensor) -> Tensor:
    """Uniform in the ball, cut to the image range."""
    noise = EPSILON * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1)
    return (x + noise.to(x.device)).clamp(0, 1) - x


def bare(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """The passes that AT needs and nothing else: frozen parameters, gradients of the input alone."""
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
    """As the published baselines do it: `backward()` through all parameters in every attack step."""

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
    attack = PGD(steps=steps, rule=SignStep(SIZE))
    return AT(attack) if label == "AT" else DONE(attack, implicit=label.removeprefix("DONE "))  # type: ignore[arg-type]


def ours(label: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    batch, made = Batch(x, y, torch.arange(len(y), device=y.device)), cache(partial(method, label))

    def step(steps: int) -> None:
        model.train()
        made(steps).objective(model, batch, {}, TrainStep(progress=0.7)).loss.backward()

    return step


def compiled_step(label: str, model: nn.Module, x: Tensor, y: Tensor) -> Step | str:
    """The same step with the attack's passes compiled, or the reason why there is none."""
    if not hasattr(forward, "fast"):
        return "this version has no compiled attack"
    with attacked(model, "eval"):
        evaluated, said = forward.compiled(model, x[:64])
    print(f"  {label}: {said}", flush=True)
    if evaluated is None:
        return said
    eager = ours(label, model, x, y)

    def step(steps: int) -> None:
        with forward.fast(model, {"eval": evaluated}):
            eager(steps)

    return step


def network(name: str, layout: torch.memory_format, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().build(3, 10, [0.5] * 3, [0.25] * 3).to(device, memory_format=layout)


def contestants(
    name: str, batch: int, device: torch.device, labels: Iterable[str]
) -> tuple[dict[str, Step], dict[str, str]]:
    """Each on its own copy of the same network, in the faster memory format, but for the official one; and reasons."""
    torch.manual_seed(0)
    x, y = torch.rand(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    near = x.contiguous(memory_format=torch.channels_last)
    found: dict[str, Step] = {}
    reasons: dict[str, str] = {}
    for label in labels:
        if label == "official loop":
            found[label] = official(network(name, torch.contiguous_format, device), x, y)
            continue
        model = network(name, torch.channels_last, device)
        if label == "bare loop":
            found[label] = bare(model, near, y)
        elif label in COMPILED:
            step = compiled_step(label.removesuffix(" compiled"), model, near, y)
            if isinstance(step, str):
                reasons[label] = step
            else:
                found[label] = step
        else:
            found[label] = ours(label, model, near, y)
    return found, reasons


def passes(name: str, label: str, steps: int) -> tuple[int, int]:
    """(forward, backward) of one step, counted at the logits; a double backward counts as one more."""
    torch.manual_seed(0)
    model, x, y = network(name, torch.contiguous_format, torch.device("cpu")), torch.rand(4, 3, 32, 32), torch.arange(4)
    with counted(model, 4) as found:
        (bare(model, x, y) if label == "bare loop" else ours(label, model, x, y))(steps)
    return round(found.forward), round(found.backward)


def race(
    name: str, batch: int, steps: int, rounds: int, labels: list[str], device: torch.device
) -> tuple[Seconds, dict[str, str]]:
    found, reasons = contestants(name, batch, device, labels)
    for step in found.values():
        step(1)  # warm up, with one step of the attack
    return taking_turns(
        {label: lambda s=step: timed(lambda: s(steps), device) for label, step in found.items()}, rounds
    ), reasons


def lines(name: str, seconds: Seconds, reasons: dict[str, str]) -> list[Line]:
    asked = [pair for pair in AIMS if all(label in seconds or label in reasons for label in pair)]
    return [ratio(seconds, *pair, AIMS[pair].get(name), reasons) for pair in asked]


def measure(settings: Settings) -> Outcome:
    """The part of the page for the network that the part is named after."""
    name, device = settings.part, torch.device(settings.device)
    batch, steps = (8, 2) if settings.quick else (128, 10)
    seconds, reasons = race(name, batch, steps, settings.rounds, CHOSEN[name], device)
    counts = {label: passes(name, label, steps) for label in ("AT", "bare loop")}
    told = "; ".join(
        f"{label}: {forward} forward, {backward} backward" for label, (forward, backward) in counts.items()
    )
    same = answer("AT takes the passes of the bare loop", counts["AT"] == counts["bare loop"], told)
    sizes = f"batch {batch}, K = {steps}, 3x32x32, 10 classes"
    return Outcome([same, *lines(name, seconds, reasons)], sizes, medians(seconds))


def peak_memory(name: str, label: str, batch: int) -> float:
    """MiB that one step takes above the idle process, in a process of its own; the peak is one pass's, whatever K."""
    asked = [sys.executable, __file__, "--models", name, "--batch", str(batch), "--peak-of", label]
    return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["narrow_resnet", "resnet18"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contestants", nargs="+", default=EAGER, choices=EAGER + COMPILED)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        found, _ = contestants(options.models[0], options.batch, options.device, [options.peak_of])
        print(peak_above(lambda: found[options.peak_of](1), options.device))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {options.batch}, K = {options.steps}")
    print("\npasses per step, counted:")
    for label in EAGER[:-1]:
        forward, backward = passes("narrow_resnet", label, options.steps)
        print(f"  {label:18} {forward:3} forward, {backward:3} backward")
    for name in options.models:
        print(f"\n{name}:")
        seconds, reasons = race(name, options.batch, options.steps, options.rounds, options.contestants, options.device)
        for label, value in medians(seconds).items():
            memory = "" if label in COMPILED else f"{peak_memory(name, label, options.batch):7.0f} MiB"
            print(f"  {label:20} {value:8.3f} s   {memory}")
        for line in lines(name, seconds, reasons):
            print("  " + f"{line.what}: {'  '.join(shown(line))} {line.note}".rstrip())


if __name__ == "__main__":
    main()

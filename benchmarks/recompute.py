"""Peak memory of one training step with and without `recompute_activations`, each in a process of its own (Linux).

MALLOC_MMAP_THRESHOLD_ makes the allocator return memory at once; else the peak would be that of the allocator.

    python benchmarks/recompute.py [--model resnet18] [--batch-size 64] [--methods AT "DONE first_order"]
"""

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from doubly import AT, DONE, PGD, Batch, TrainStep
from doubly.bilevel import SignStep
from doubly.methods import FastBAT
from doubly.models import MODELS
from doubly.training.recompute import recomputed_activations

ATTACK = PGD(steps=1, rule=SignStep(2 / 255))  # the peak is one pass's, whatever the number of steps
METHODS = {
    "AT": AT(ATTACK),
    "DONE first_order": DONE(ATTACK, implicit="first_order"),
    "DONE exact": DONE(ATTACK, implicit="exact"),
    "Fast-BAT": FastBAT(),
}


def resident(field: str) -> float:
    """Return MiB, now (VmRSS) or at the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def report_peak(name: str, label: str, batch_size: int, recompute: bool) -> None:
    """Print the MiB of a step beyond those of the idle process, which has its gradients and libraries already."""
    torch.manual_seed(0)
    model = MODELS[name]().build(3, 10, [0.5] * 3, [0.25] * 3).to(memory_format=torch.channels_last)
    x = torch.rand(batch_size, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (batch_size,))

    def step(n: int) -> None:
        with recomputed_activations(model) if recompute else nullcontext():
            batch = Batch(x[:n], y[:n], torch.arange(n))
            objective = METHODS[label].objective(model, batch, {}, TrainStep(progress=0.7))
        objective.loss.backward()

    step(2)
    Path("/proc/self/clear_refs").write_text("5")
    idle = resident("VmRSS")
    step(batch_size)
    print(resident("VmHWM") - idle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", choices=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        report_peak(options.model, options.peak_of, options.batch_size, options.recompute)
        return
    sizes = f"{options.model}, batch {options.batch_size}, 32 px"
    print(f"torch {torch.__version__}, {sizes}: MiB of a step, stored / recomputed")
    command = [sys.executable, __file__, "--model", options.model, "--batch-size", str(options.batch_size)]
    honest = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for label in options.methods:
        stored, recomputed = (
            float(
                subprocess.run(
                    [*command, "--peak-of", label, *more], env=honest, capture_output=True, check=True
                ).stdout
            )
            for more in ([], ["--recompute"])
        )
        print(f"  {label:18} {stored:6.0f}  {recomputed:6.0f}   {recomputed / stored:.2f}")


if __name__ == "__main__":
    main()

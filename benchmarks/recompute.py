"""Peak memory of one training step with and without `recompute_activations`, each in a process of its own (Linux).

The allocator is told to give memory back at once (MALLOC_MMAP_THRESHOLD_), or the peak would be its own.

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
from doubly.training.recompute import recomputing

ATTACK = PGD(steps=1, rule=SignStep(2 / 255))  # the peak is one pass's, whatever the number of steps
METHODS = {
    "AT": AT(ATTACK),
    "DONE first_order": DONE(ATTACK, implicit="first_order"),
    "DONE exact": DONE(ATTACK, implicit="exact"),
    "Fast-BAT": FastBAT(),
}


def resident(field: str) -> float:
    """MiB, now (VmRSS) or at the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def report_peak(name: str, label: str, batch: int, recompute: bool) -> None:
    """MiB above the idle process, whose gradients and libraries have their place already."""
    torch.manual_seed(0)
    model = MODELS[name]().build(3, 10, [0.5] * 3, [0.25] * 3).to(memory_format=torch.channels_last)
    x, y = torch.rand(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last), torch.randint(10, (batch,))

    def step(n: int) -> None:
        with recomputing(model) if recompute else nullcontext():
            given = Batch(x[:n], y[:n], torch.arange(n))
            objective = METHODS[label].objective(model, given, {}, TrainStep(progress=0.7))
        objective.loss.backward()

    step(2)
    Path("/proc/self/clear_refs").write_text("5")
    idle = resident("VmRSS")
    step(batch)
    print(resident("VmHWM") - idle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--recompute", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        report_peak(options.model, options.peak_of, options.batch, options.recompute)
        return
    print(f"torch {torch.__version__}, {options.model}, batch {options.batch}, 32 px: MiB of a step, kept / recomputed")
    asked = [sys.executable, __file__, "--model", options.model, "--batch", str(options.batch)]
    honest = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for label in options.methods:
        kept, again = (
            float(
                subprocess.run([*asked, "--peak-of", label, *more], env=honest, capture_output=True, check=True).stdout
            )
            for more in ([], ["--recompute"])
        )
        print(f"  {label:18} {kept:6.0f}  {again:6.0f}   {again / kept:.2f}")


if __name__ == "__main__":
    main()

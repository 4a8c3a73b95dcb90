"""Two processes of one thread each against one, under torchrun: images per second of training. A part of run.py."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from lines import Line, Outcome, Settings, medians, taking_turns

from doubly.rundir import read_metrics

AIM = 1.8
BATCH = 128


class TrainingError(Exception):
    """A run that ended with an error."""


def write_images(folder: Path, count: int) -> None:
    """Write random bytes of CIFAR-10's shape: a step takes as long on them as on photographs."""
    draw = np.random.default_rng(0)
    parts = {"train": count, "test": 20}
    arrays = {f"x_{part}": draw.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8) for part, n in parts.items()}
    np.savez(folder / "data.npz", **arrays, **{f"y_{part}": np.arange(n) % 10 for part, n in parts.items()})


def training(folder: Path, beginning: list[str], epochs: int, *more: str) -> Callable[[], float]:
    """Return a function that trains, and returns the seconds of the fastest epoch after the first."""

    def seconds() -> float:
        output = folder / f"run-{time.monotonic_ns()}"
        words = ["train", "cifar10.small.at", "--set", "data.source=dataset.arrays", "--data-root", str(folder)]
        words += [
            "--epochs",
            str(epochs),
            "--batch-size",
            str(BATCH),
            "--validation.every",
            "1000",
            "--validation.size",
            "20",
        ]
        words += ["--threads", "1", "--device", "cpu", "--output", str(output), *more]
        done = subprocess.run([*beginning, *words], capture_output=True, text=True, timeout=600, check=False)
        rows = read_metrics(output / "metrics.jsonl")
        if done.returncode or len(rows) != epochs:
            raise TrainingError(error_line(done.stderr or done.stdout))
        return min(row["seconds"] for row in rows[1:])

    return seconds


def error_line(output: str) -> str:
    """Return our own message if there is one, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip(" =-")]
    ours = [line for line in lines if line.startswith(("doubly: ", "error: "))]
    return (ours or lines[-1:] or ["it printed nothing"])[0][:200]


def measure(settings: Settings) -> Outcome:
    images, epochs = (2 * BATCH, 2) if settings.quick else (4 * BATCH, 3)
    what, sizes = "images per second, two processes / one", f"recipe cifar10.small.at on {images} images, batch {BATCH}"
    launcher = shutil.which("torchrun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None or (os.cpu_count() or 1) < 2:
        reason = "torchrun is not there" if launcher is None else "one core only"
        return Outcome([Line(what, aim=AIM, at_least=True, note=reason)], sizes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, images)
        two = [launcher, "--nproc-per-node", "2", "--standalone", "-m", "doubly"]
        contestants = {
            "one process": training(folder, [sys.executable, "-m", "doubly"], epochs),
            "two processes": training(folder, two, epochs),
            "two processes, batch norm local": training(folder, two, epochs, "--batch-norm", "local"),
        }
        try:
            seconds = taking_turns(contestants, settings.rounds)
        except TrainingError as problem:
            return Outcome([Line(what, aim=AIM, at_least=True, note=str(problem))], sizes)
    single, *others = seconds
    lines = [
        Line(
            f"images per second, {name} / one",
            tuple(a / b for a, b in zip(seconds[single], seconds[name], strict=True)),
            AIM,
            at_least=True,
        )
        for name in others
    ]
    return Outcome(lines, f"{sizes}, one thread each", medians(seconds))

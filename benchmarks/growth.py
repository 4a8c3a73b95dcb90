"""How seconds and peak memory of a step grow with batch, K, image size, width, classes and data. A part of run.py.

A point is the step of a small network in a new process, forked from one that has imported torch and done nothing, so
that it has neither the heap nor the peak of another point. All points take turns; the curves have their medians.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from clock import peak_above, timed
from lines import Outcome, Settings
from step_cost import ours

from doubly.data import Images, PadCropFlip
from doubly.data.loader import batches
from doubly.models import NarrowResNet

WHO = ("AT", "DONE exact")
LOADER = "loader"
PRELOADED = ["torch", "doubly.methods", "doubly.models", "doubly.data.loader", "doubly.training.memory"]


@dataclass(frozen=True)
class Point:
    """A step of the narrow ResNet with one block per stage."""

    batch: int = 32
    steps: int = 5  # K
    size: int = 32  # pixels along an edge
    width: int = 16  # channels of the first stage
    classes: int = 10


RANGES: dict[str, tuple[int, ...]] = {
    "batch": (16, 32, 64, 128, 256, 512),
    "steps": (1, 2, 4, 8, 16, 32, 64),
    "size": (8, 16, 32, 64, 128),
    "width": (16, 24, 32, 48, 64),  # torch 2.13 corrupts the heap below 16, with channels last on a CPU with AVX-512
    "classes": (10, 30, 100, 300, 1000),
}
DATA = (1_000, 4_000, 16_000, 64_000)


def step_point(who: str, point: Point, device_name: str) -> tuple[float, float]:
    """Return the (seconds, MiB) of one step, after a small one has warmed up the libraries."""
    device = torch.device(device_name)
    torch.manual_seed(0)
    model = NarrowResNet(point.width, 1).build(3, point.classes, [0.5] * 3, [0.25] * 3)
    model = model.to(device, memory_format=torch.channels_last)

    def step(rows: int) -> Any:
        x = torch.rand(rows, 3, point.size, point.size).to(device, memory_format=torch.channels_last)
        return ours(who, model, x, torch.arange(rows, device=device) % point.classes)

    step(2)(1)
    model.zero_grad()  # the gradients of the parameters are a part of the step's memory
    full_step = step(point.batch)
    seconds = []

    def twice() -> None:
        full_step(1)  # the libraries prepare themselves for each new shape
        seconds.append(timed(lambda: full_step(point.steps), device))

    memory = peak_above(twice, device)
    return seconds[0], memory


def loader_point(images: int) -> tuple[float, float]:
    """Return the seconds of one epoch of augmented batches, and the MiB of the data and the epoch."""
    device = torch.device("cpu")
    seconds = []

    def epoch(count: int) -> None:
        x = torch.empty(count, 3, 32, 32, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
        data = Images.of(x, torch.arange(count) % 10)
        seconds.append(timed(lambda: sum(len(b.y) for b in batches(data, 128, 0, 0, augment=PadCropFlip())), device))

    epoch(256)
    memory = peak_above(lambda: epoch(images), device)
    return seconds[-1], memory


def tasks(quick: bool, device: str) -> dict[tuple[str, str, int], tuple[Any, ...]]:
    """Return the function and arguments of each point, by (what varies, who is measured, value)."""
    some = slice(0, 3 if quick else None)
    points: dict[tuple[str, str, int], tuple[Any, ...]] = {}
    for along, values in RANGES.items():
        for value in values[some]:
            for who in WHO:
                points[along, who, value] = (step_point, who, replace(Point(), **{along: value}), device)
    points.update({("images", LOADER, count): (loader_point, count) for count in DATA[some]})
    return points


def in_processes(points: dict[tuple[str, str, int], tuple[Any, ...]], rounds: int) -> dict[tuple[str, str, int], Any]:
    """Do every task once per round, each in a new process, and return the results of each."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(PRELOADED)
    results: dict[tuple[str, str, int], list[tuple[float, float]]] = {task: [] for task in points}
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for turn in range(rounds):
            for along in dict.fromkeys(along for along, _, _ in points):
                start, current = time.perf_counter(), [task for task in points if task[0] == along]
                for task in current:
                    function, *arguments = points[task]
                    results[task].append(pool.submit(function, *arguments).result())
                message = f"{len(current)} points against {along} in {time.perf_counter() - start:.0f} s"
                print(f"  round {turn + 1} of {rounds}: {message}", flush=True)
    return results


def curves(results: dict[tuple[str, str, int], Any]) -> Iterable[dict[str, Any]]:
    for along, who in dict.fromkeys((along, who) for along, who, _ in results):
        values = {value: times for (a, w, value), times in results.items() if (a, w) == (along, who)}
        for place, quantity in enumerate(("seconds", "MiB")):
            y = [statistics.median(one[place] for one in times) for times in values.values()]
            yield {"along": along, "who": who, "quantity": quantity, "x": list(values), "y": y}


def measure(settings: Settings) -> Outcome:
    results = in_processes(tasks(settings.quick, settings.device), settings.rounds)
    base = ", ".join(f"{name} {value}" for name, value in asdict(Point()).items())
    sizes = f"narrow ResNet with one block per stage; where a curve does not vary it: {base.replace('steps', 'K =')}"
    return Outcome([], sizes, curves=list(curves(results)))

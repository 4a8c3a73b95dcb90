"""doubly train … --dry-run: estimate what a run costs on this machine. Nothing is trained, and nothing is written."""

import re
import time
from pathlib import Path

import torch
from rich.console import Console

from doubly.cli.tables import print_line
from doubly.config import Data, Run
from doubly.config.device import select_device
from doubly.data import DATASETS
from doubly.distributed import SINGLE_PROCESS
from doubly.errors import UsageError
from doubly.jobs.cost import DataSize, data_sizes, estimate_run, measure_passes, published_size
from doubly.jobs.job import Job
from doubly.text import duration, method_label


def dry_run(run: Run, resumed: Path | None, out: Console, err: Console) -> int:
    """Print the passes of a step and the time of the epochs that are left, in one line.

    Args:
        run: The run.
        resumed: The run directory, if the run in it is to be resumed.
        out: Where the estimate is printed.
        err: Where a message about missing data is printed.

    Returns:
        The exit code.
    """
    size = _data_size(run, err)
    start = time.perf_counter()
    times = measure_passes(run, size, torch.get_num_threads())
    job = Job(run, resumed or Path(), None)
    epochs = run.epochs - (job.epochs_done if resumed and job.is_started else 0)
    estimate = estimate_run(run, size, times, epochs, None, ())
    passes, measured = estimate.step_passes, time.perf_counter() - start
    device, threads = select_device(run.device, SINGLE_PROCESS), f"{times.threads} thread{'s' * (times.threads > 1)}"
    print_line(
        out,
        f"{run.label or method_label(run.name)}, {run.model.label}, {epochs} epochs of {_dataset_label(run.data)} "
        f"({size.train:,} images): about {max(passes.forward, passes.backward):.3g} passes per step "
        f"({passes.forward:.3g} forward, {passes.backward:.3g} backward), {duration(estimate.train_seconds)} on this "
        f"device ({device}, {threads}, {_seconds(times.step_seconds(passes))} per step; measured in {measured:.0f} s)",
    )
    return 0


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _data_size(run: Run, err: Console) -> DataSize:
    """Return the size of the data; that of the published files, with a message, if they are missing here."""
    sizes, errors = data_sizes([run])
    if run.data in sizes:
        return sizes[run.data]
    try:
        size = published_size(run.data)
    except UsageError:
        raise UsageError(errors[0]) from None
    print_line(err, f"{errors[0]} (estimated as if the published files were here)")
    return size


def _dataset_label(data: Data) -> str:
    """Return the name of the dataset as people write it, such as `CIFAR-10` for cifar10."""
    name = next((name for name, kind in DATASETS.items() if kind is type(data.source)), type(data.source).__name__)
    return name if name in ("digits", "folder", "arrays") else re.sub(r"(?<=[A-Z])(?=\d)", "-", name.upper())

"""doubly train … --dry-run: what a run would cost here. Nothing is trained, and nothing is written."""

import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from doubly.cli.tables import say
from doubly.errors import UsageError
from doubly.text import duration, method_label


def dry_run(run: Any, resumed: Path | None, out: Console, err: Console) -> int:
    """`resumed`: the run directory, if the run is to go on there."""
    import torch

    from doubly.jobs.cost import estimate_run, measure_passes
    from doubly.jobs.job import Job

    size = _size(run, err)
    begun = time.perf_counter()
    times = measure_passes(run, size, torch.get_num_threads())
    job = Job(run, resumed or Path(), None)
    left = run.epochs - (job.epochs_done if resumed and job.is_started else 0)
    found = estimate_run(run, size, times, left, None, ())
    cost, taken = found.step_passes, time.perf_counter() - begun
    where = run.device if run.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    threads = f"{times.threads} thread{'s' * (times.threads > 1)}"
    say(
        out,
        f"{run.label or method_label(run.name)}, {_model(run.model)}, {left} epochs of {_data(run.data)} "
        f"({size.train:,} images): about {max(cost.forward, cost.backward):.3g} passes per step "
        f"({cost.forward:.3g} forward, {cost.backward:.3g} backward), {duration(found.train_seconds)} on this device "
        f"({where}, {threads}, {_seconds(times.step_seconds(cost))} a step; measured in {taken:.0f} s)",
    )
    return 0


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _size(run: Any, err: Console) -> Any:
    """Of the data, or as they were published where they are not here."""
    from doubly.jobs.cost import data_sizes, published_size

    known, problems = data_sizes([run])
    if run.data in known:
        return known[run.data]
    try:
        found = published_size(run.data)
    except UsageError:
        raise UsageError(problems[0]) from None
    say(err, f"{problems[0]} (estimated as if the published files were here)")
    return found


def _model(model: Any) -> str:
    """`ResNet-18` of ResNet18; somebody's own by its function."""
    own = getattr(model, "function", None)
    return own or re.sub(r"(?<=[a-z])(?=\d)", "-", type(model).__name__)


def _data(data: Any) -> str:
    """`CIFAR-10` of cifar10."""
    from doubly.data import DATASETS

    name = next((name for name, kind in DATASETS.items() if kind is type(data.source)), type(data.source).__name__)
    return name if name in ("digits", "folder", "arrays") else re.sub(r"(?<=[A-Z])(?=\d)", "-", name.upper())

"""What `make demo` shows: AT and the three DONEs on imbalanced digits, the same seeds, one table, one page.

A short budget, at which AT has not converged: there reweighting pays most (docs/digits.md has both ends).
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from doubly.config.serialize import with_changes
from doubly.errors import UsageError
from doubly.jobs.pool import Job, run_jobs
from doubly.recipes.digits import digits
from doubly.studies.digits_study import COMPARED, SHORT_DONE, SHORT_PLAIN
from doubly.studies.plans import reported

EPOCHS = 20


def jobs(output: Path, seeds: int) -> list[Job]:
    return [
        Job(replace(run, epochs=EPOCHS, seed=seed), output / f"{method}-s{seed}")
        for method in COMPARED
        for run in [with_changes(digits(method, True), SHORT_PLAIN if method == "at" else SHORT_DONE)]
        for seed in range(seeds)
    ]


def demo(output: Path, processes: int, seeds: int, console: Console) -> Path:
    """Train, evaluate, print the table; returns the page."""
    runs = jobs(output, seeds)
    failures = run_jobs(runs, processes, console)
    if failures:
        raise UsageError("; ".join(f"{path}: {problem}" for path, problem in failures.items()))
    return reported([job.output for job in runs], output, console)

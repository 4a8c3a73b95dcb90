"""The demonstration of `make demo`: AT and three variants of DONE on imbalanced digits, one table, one page.

The budget is short, and AT has not converged then: there reweighting helps most (docs/digits.md has both ends).
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from doubly.config.serialize import with_changes
from doubly.errors import UsageError
from doubly.jobs.job import CallbackFactory, Job
from doubly.jobs.pool import run_jobs
from doubly.recipes.digits import digits
from doubly.studies.digits_study import METHODS, SHORT_AT, SHORT_DONE
from doubly.studies.plans import show_report

EPOCHS = 20


def demo_jobs(output: Path, seeds: int, callbacks: tuple[CallbackFactory, ...] = ()) -> list[Job]:
    """Return a job per method and seed, with directories below `output`."""
    return [
        Job(replace(run, epochs=EPOCHS, seed=seed), output / f"{method}-s{seed}", callbacks=callbacks)
        for method in METHODS
        for run in [with_changes(digits(method, True), SHORT_AT if method == "at" else SHORT_DONE)]
        for seed in range(seeds)
    ]


def run_demo(
    output: Path, processes: int, seeds: int, console: Console, callbacks: tuple[CallbackFactory, ...] = ()
) -> Path:
    """Train, evaluate, print the table and write the page.

    Args:
        output: Folder for the runs and the page.
        processes: How many runs are trained at a time.
        seeds: Runs per method.
        console: Where progress and the table are printed.
        callbacks: Factories of callbacks for every run; see `Job`.

    Returns:
        The page.

    Raises:
        UsageError: If a run failed.
    """
    jobs = demo_jobs(output, seeds, callbacks)
    failures = run_jobs(jobs, processes, console)
    if failures:
        raise UsageError("; ".join(f"{path}: {error}" for path, error in failures.items()))
    return show_report([job.output for job in jobs], output, console)

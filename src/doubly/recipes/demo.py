"""What `make demo` shows: AT and the three DONEs on imbalanced digits, the same seeds, one table, one page.

A short budget, at which AT has not converged: there reweighting pays most (docs/digits.md has both ends).
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from doubly.errors import UsageError
from doubly.recipes.digits import digits
from doubly.recipes.digits_study import COMPARED, SHORT_DONE, SHORT_PLAIN
from doubly.report import tables_of, write_report
from doubly.report.forms import show
from doubly.runs.pool import Job, run_jobs
from doubly.runs.search import with_changes

EPOCHS = 20


def demo(output: Path, processes: int, seeds: int, console: Console) -> Path:
    """Train, evaluate, print the table; returns the page."""
    jobs = [
        Job(replace(run, epochs=EPOCHS, seed=seed), output / f"{method}-s{seed}")
        for method in COMPARED
        for run in [with_changes(digits(method, True), SHORT_PLAIN if method == "at" else SHORT_DONE)]
        for seed in range(seeds)
    ]
    failures = run_jobs(jobs, processes, console)
    if failures:
        raise UsageError("; ".join(f"{path}: {problem}" for path, problem in failures.items()))
    runs = [job.output for job in jobs]
    show(tables_of(runs), console)
    return write_report(runs, output)

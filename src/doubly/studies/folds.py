"""Rows of a table on digits, each tested on every fold, so that together all 1,797 images are test images once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from doubly.config import Run
from doubly.data import Digits
from doubly.errors import UsageError
from doubly.evaluation.intervals import average_accuracy, bootstrap_difference, tail_accuracy
from doubly.jobs.job import CallbackFactory, Job
from doubly.jobs.pool import run_jobs
from doubly.jobs.search import Search, run_searches
from doubly.metric_names import METRICS
from doubly.reading import load_npz, read_json
from doubly.rundir import RunDir, read_metrics

FOLDS = 5
CLASSES = 10
METRIC_KEYS = ("sa", "ra_pgd", "ra_tail_30", "ra_margin", "ra_margin_tail_30")
COMPARED_METRICS = (
    ("sa", "clean", average_accuracy),
    ("ra_pgd", "pgd", average_accuracy),
    ("ra_tail_30", "pgd", tail_accuracy),
)


@dataclass(frozen=True)
class StudyRow:
    """One row of a table: a run that is trained and tested once per fold.

    Attributes:
        table: Name of the table.
        label: Name of the row.
        run: What is trained; each fold changes its data and seed.
    """

    table: str
    label: str
    run: Run

    def jobs(self, output: Path, callbacks: tuple[CallbackFactory, ...] = ()) -> list[Job]:
        """Return one job per fold, with directories below `output`; the seed is the number of the fold."""
        folder = output / f"{self.table}/{self.label}".replace(" ", "_")
        data = [replace(self.run.data, source=Digits(fold, FOLDS)) for fold in range(FOLDS)]
        return [
            Job(
                replace(self.run, data=part, seed=fold, save_seconds=600.0),
                folder / f"fold-{fold}",
                callbacks=callbacks,
            )
            for fold, part in enumerate(data)
        ]

    def errors(self, output: Path, failures: Mapping[Path, str]) -> list[str]:
        """Return why folds of this row failed, given the failures of all jobs."""
        return [failures[job.output] for job in self.jobs(output) if job.output in failures]


def run_named_searches(
    searches: Mapping[str, Search], processes: int, console: Console, callbacks: tuple[CallbackFactory, ...]
) -> dict[str, dict[str, Any]]:
    """Run the searches of a study, and return their results by the name of the recipe; see `run_searches`."""
    plans = [replace(search, callbacks=callbacks) for search in searches.values()]
    return dict(zip(searches, run_searches(plans, processes, console), strict=True))


def run_rows(
    rows: Sequence[StudyRow], output: Path, processes: int, console: Console, callbacks: tuple[CallbackFactory, ...]
) -> dict[Path, str]:
    """Train and test the rows of a study on every fold, and return the failures; see `run_jobs`."""
    console.print("2. the winners, retrained on all training images of each fold", highlight=False)
    return run_jobs([job for row in rows for job in row.jobs(output, callbacks)], processes, console)


def summarize_row(row: StudyRow, output: Path, failures: Mapping[Path, str]) -> dict[str, Any]:
    """Return the results of a row, as results.json keeps them: per fold, and pooled over all images.

    Args:
        row: The row.
        output: Folder of the study.
        failures: Directories of failed jobs with the reasons; a row with one of them has no numbers.
    """
    summary: dict[str, Any] = {"table": row.table, "label": row.label, "failed": row.errors(output, failures)}
    if summary["failed"]:
        return summary
    folders = [RunDir(job.output) for job in row.jobs(output)]
    tests = [read_json(folder.evaluation) for folder in folders]
    metrics = [read_metrics(folder.metrics) for folder in folders]
    y, correct = _pooled(row, output)
    return {
        **summary,
        # The hash of the data belongs to one fold.
        "protocol": {key: value for key, value in tests[0]["protocol"].items() if key != "data_sha256"},
        "n": len(y),
        "per_fold": {key: [test[key] for test in tests] for key in METRIC_KEYS},
        "worst_per_fold": [test["worst_class"]["ra_pgd"] for test in tests],
        "pooled_tail": tail_accuracy(correct["pgd"], y),
        "pooled_per_class": [float(correct["pgd"][y == k].mean()) for k in range(CLASSES)],
        "seconds": [sum(epoch["seconds"] for epoch in epochs) for epochs in metrics],
        "alarms": [epochs[-1].get("alarms", []) for epochs in metrics],
    }


def compare_rows(rows: Sequence[StudyRow], output: Path, failures: Mapping[Path, str]) -> list[dict[str, Any]]:
    """Compare each row with the first of its table, by a paired bootstrap over the same images, class by class.

    Args:
        rows: All rows of the study.
        output: Folder of the study.
        failures: Directories of failed jobs with the reasons; their rows are left out.

    Returns:
        The differences with their intervals, as results.json keeps them.
    """
    differences = []
    for table in dict.fromkeys(row.table for row in rows):
        baseline, *compared = [row for row in rows if row.table == table]
        if baseline.errors(output, failures):
            continue
        y, expected = _pooled(baseline, output)
        for row in compared:
            if row.errors(output, failures):
                continue
            _, correct = _pooled(row, output)
            for key, attack, statistic in COMPARED_METRICS:
                difference = bootstrap_difference(correct[attack], expected[attack], y, statistic)
                record = {"table": table, "label": row.label, "metric": METRICS[key].label}
                differences.append(record | difference._asdict())
    return differences


def _pooled(row: StudyRow, output: Path) -> tuple[NDArray[np.int64], dict[str, NDArray[np.bool_]]]:
    """Return the labels of all images in the order of their ids, and per attack whether the prediction was right."""
    parts = []
    for job in row.jobs(output):
        file = RunDir(job.output).predictions
        try:
            arrays = load_npz(file)
            parts.append([arrays[key] for key in ("ids", "y", "clean", "pgd")])
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{file} is damaged ({error!s:.80}): delete it and run the study again") from None
    ids, y, clean, pgd = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(ids)
    return y[order], {"clean": (clean == y)[order], "pgd": (pgd == y)[order]}

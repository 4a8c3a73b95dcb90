"""Hyper-parameter search on hold-outs: the same number of trials for every method, drawn from a grid by a seed.

The test images take no part. The score of a trial is the mean of RA-PGD and RA-Tail-30 on the hold-out after the last
epoch, averaged over several hold-outs.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from doubly.config.run import Run
from doubly.config.serialize import to_json, with_changes
from doubly.errors import UsageError
from doubly.jobs.job import CallbackFactory, Job
from doubly.jobs.pool import run_jobs
from doubly.rundir import RunDir, read_metrics, write_json
from doubly.text import printable_lines

Space = Mapping[str, Sequence[Any]]
"""Values to try by dotted path, as in {"optimizer.lr.peak": [0.1, 0.2]}."""

EPOCH_FACTORS = (2 / 3, 1, 3 / 2)
SETTING_FACTORS = {"optimizer.weight_decay": (0.25, 1, 4), "optimizer.lr.peak": (0.5, 1, 2)}
REPORTED = ("n", "sa", "ra_pgd", "ra_tail_30")  # of a validation, in search.json


@dataclass(frozen=True)
class Search:
    """A search around one run.

    Attributes:
        base: The run whose settings are changed.
        space: Values to try by dotted path.
        output: Folder for the trials and search.json.
        trials: Points of the grid to try.
        splits: Hold-outs that a score is averaged over.
        holdout: Share of the training images that is held out.
        callbacks: Factories of callbacks for every trial; see `Job`.

    Raises:
        UsageError: If there is no trial or no split.
    """

    base: Run
    space: Space
    output: Path
    trials: int = 12
    splits: int = 2
    holdout: float = 0.25
    callbacks: tuple[CallbackFactory, ...] = ()

    def __post_init__(self) -> None:
        if self.trials < 1 or self.splits < 1:
            raise UsageError(f"trials and splits must be at least 1, got {self.trials} and {self.splits}")

    def candidates(self) -> list[dict[str, Any]]:
        """Return the points of the grid to try, all different; equal spaces give the same points.

        Raises:
            UsageError: If the grid has fewer points than there are trials.
        """
        grid = {path: [v for i, v in enumerate(values) if v not in values[:i]] for path, values in self.space.items()}
        possible = math.prod(len(values) for values in grid.values())
        if self.trials > possible:
            raise UsageError(
                f"{self.trials} trials are more than the grid has points ({possible}): lower --trials, or add values"
            )
        draw = random.Random(0)  # noqa: S311 - no secret
        points: list[dict[str, Any]] = []
        while len(points) < self.trials:
            point = {path: draw.choice(values) for path, values in grid.items()}
            if point not in points:
                points.append(point)
        return points

    def jobs(self) -> list[list[Job]]:
        """Return the jobs of each candidate, one per hold-out.

        Raises:
            UsageError: If the space names a setting that the run does not have, or a value that it does not take.
        """
        return [
            [self._job(with_changes(self.base, point), trial, split) for split in range(self.splits)]
            for trial, point in enumerate(self.candidates())
        ]

    def _job(self, run: Run, trial: int, split: int) -> Job:
        data = replace(run.data, holdout=self.holdout, split=split)
        validation = replace(run.validation, every=run.epochs, size=10**6)
        run = replace(run, data=data, validation=validation, seed=split, save_seconds=600.0)
        output = self.output / f"trial-{trial:02d}-split-{split}"
        return Job(run, output, evaluate=None, callbacks=self.callbacks)

    def collect(self) -> dict[str, Any]:
        """Read the finished trials and write search.json.

        Returns:
            What search.json holds: the space, the score of every trial, and the settings of the winner. A trial that
            failed scores 0.
        """
        rows: list[dict[str, Any]] = []
        for point, jobs in zip(self.candidates(), self.jobs(), strict=True):
            validations = [_last_validation(job) for job in jobs]
            scores = [(v["ra_pgd"] + v["ra_tail_30"]) / 2 if v else 0.0 for v in validations]
            holdouts = [{key: v[key] for key in REPORTED} if v else None for v in validations]
            rows.append({"changes": point, "score": sum(scores) / len(scores), "holdouts": holdouts})
        winner = max(rows, key=lambda row: float(row["score"]))
        result = {
            "recipe": self.base.name,
            "space": {path: list(values) for path, values in self.space.items()},
            "holdout": self.holdout,
            "trials": rows,
            "winner": winner["changes"],
        }
        write_json(self.output / "search.json", result)
        return result


def default_space(run: Run) -> dict[str, list[Any]]:
    """Return a grid around the run's own epochs, weight decay and peak of the learning rate.

    Settings that the run's optimizer or schedule does not have, or that are 0, are left out.
    """
    space: dict[str, list[Any]] = {"epochs": [max(1, round(run.epochs * factor)) for factor in EPOCH_FACTORS]}
    settings = to_json(run)
    for path, factors in SETTING_FACTORS.items():
        value = setting_at(settings, path)
        if value:
            space[path] = [value * factor for factor in factors]
    return space


def run_searches(searches: Sequence[Search], processes: int, console: Console) -> list[dict[str, Any]]:
    """Run all trials of all searches in one pool.

    Args:
        searches: The searches.
        processes: How many trials run at a time.
        console: Where progress and failed trials are printed.

    Returns:
        The result of each search; see `Search.collect`.
    """
    jobs = [job for search in searches for trial in search.jobs() for job in trial]
    for output, error in run_jobs(jobs, processes, console).items():
        text = printable_lines(f"{output} failed and scores 0: {error}")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return [search.collect() for search in searches]


def setting_at(settings: Mapping[str, Any], path: str) -> Any:
    """Return the setting at a dotted path of a run's JSON form; None if there is none."""
    value: Any = settings
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _last_validation(job: Job) -> dict[str, Any] | None:
    rows = read_metrics(RunDir(job.output).metrics)
    return rows[-1].get("validation") if job.is_done else None

"""A small search on the hold-out: the same number of trials for every method, drawn from a grid by a seed.

The test images of the run take no part. The score is the mean of RA-PGD and
RA-Tail-30 on the hold-out after the last epoch, averaged over `splits` hold-outs.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from doubly.config.run import Run
from doubly.config.serialize import with_changes
from doubly.errors import UsageError
from doubly.jobs.pool import Job, run_jobs
from doubly.rundir import RunDir, read_metrics, write_json
from doubly.schedules import Cyclic

Space = Mapping[str, Sequence[Any]]  # dotted path -> values to try


@dataclass(frozen=True)
class Search:
    base: Run
    space: Space
    output: Path
    trials: int = 12
    splits: int = 2
    holdout: float = 0.25

    def __post_init__(self) -> None:
        if self.trials < 1 or self.splits < 1:
            raise UsageError(f"trials and splits must be at least 1, got {self.trials} and {self.splits}")

    def candidates(self) -> list[dict[str, Any]]:
        """Different points of the grid; the same for equal spaces."""
        grid = {path: [v for i, v in enumerate(values) if v not in values[:i]] for path, values in self.space.items()}
        possible = math.prod(len(values) for values in grid.values())
        if self.trials > possible:
            raise UsageError(f"{self.trials} trials asked for, but the grid has only {possible} points")
        draw = random.Random(0)
        found: list[dict[str, Any]] = []
        while len(found) < self.trials:
            point = {path: draw.choice(values) for path, values in grid.items()}
            if point not in found:
                found.append(point)
        return found

    def jobs(self) -> list[list[Job]]:
        """One list of jobs, over the hold-outs, per candidate."""
        return [
            [self._job(with_changes(self.base, point), trial, split) for split in range(self.splits)]
            for trial, point in enumerate(self.candidates())
        ]

    def _job(self, run: Run, trial: int, split: int) -> Job:
        data = replace(run.data, holdout=self.holdout, split=split)
        validation = replace(run.validation, every=run.epochs, size=10**6)
        run = replace(run, data=data, validation=validation, seed=split, save_seconds=600.0)
        return Job(run, self.output / f"trial-{trial:02d}-split-{split}", measure=None)

    def result(self) -> dict[str, Any]:
        """Read the trials and write search.json: the space, every score, and the winner."""
        rows: list[dict[str, Any]] = []
        for point, jobs in zip(self.candidates(), self.jobs(), strict=True):
            validations = [_last_probe(job) for job in jobs]
            scores = [
                (p["ra_pgd"] + p["ra_tail_30"]) / 2 if p else 0.0 for p in validations
            ]  # a run that failed scores 0
            kept = [{key: p[key] for key in ("n", "sa", "ra_pgd", "ra_tail_30")} if p else None for p in validations]
            rows.append({"changes": point, "score": sum(scores) / len(scores), "holdouts": kept})
        winner = max(rows, key=lambda row: float(row["score"]))
        found = {
            "recipe": self.base.name,
            "space": {path: list(values) for path, values in self.space.items()},
            "holdout": self.holdout,
            "trials": rows,
            "winner": winner["changes"],
        }
        write_json(self.output / "search.json", found)
        return found


def default_space(run: Run) -> dict[str, list[Any]]:
    """Around the recipe's own numbers: epochs, weight decay, and the peak of a cyclic learning rate."""
    space: dict[str, list[Any]] = {
        "epochs": [max(1, round(run.epochs * share)) for share in (2 / 3, 1, 3 / 2)],
        "optimizer.weight_decay": [run.optimizer.weight_decay * factor for factor in (0.25, 1, 4)],
    }
    if isinstance(run.optimizer.lr, Cyclic):
        space["optimizer.lr.peak"] = [run.optimizer.lr.peak * factor for factor in (0.5, 1, 2)]
    return space


def _last_probe(job: Job) -> dict[str, Any] | None:
    rows = read_metrics(RunDir(job.output).metrics)
    return rows[-1].get("validation") if job.done else None


def search_all(searches: Sequence[Search], processes: int, console: Console) -> list[dict[str, Any]]:
    """All trials of all searches in one pool, then the winners."""
    jobs = [job for search in searches for trial in search.jobs() for job in trial]
    for output, problem in run_jobs(jobs, processes, console).items():
        console.print(f"{output} failed and scores 0: {problem}", highlight=False, markup=False, soft_wrap=True)
    return [search.result() for search in searches]

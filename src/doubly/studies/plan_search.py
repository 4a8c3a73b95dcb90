"""The paper's choice of hyperparameters as a step of a planned study: a search on a hold-out of 10 % for every recipe.

Each recipe gets as many trials as any other, at the epochs of its runs, and the winner is trained on all training
images. Grids: half, once and twice the peak of the learning rate, times a quarter, once and four times the weight
decay, times settings of the method itself that the recipe sets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from doubly.config import Run
from doubly.config.serialize import to_json, with_changes
from doubly.errors import UsageError
from doubly.jobs.job import Job
from doubly.jobs.search import Search, Space, default_space, setting_at
from doubly.rundir import write_json
from doubly.studies.digits_comparison import METHOD_SPACES

HOLDOUT = 0.1  # the paper's
NOT_SEARCHED = (
    "epochs",  # the paper's budget
    "method.eta",  # of CFOL, which depends on the number of images
)


def search_space(run: Run) -> Space:
    """Return the grid of a recipe; settings of the method that the recipe leaves at None are no part of it."""
    settings = to_json(run)
    method_space = METHOD_SPACES.get(run.name.rpartition(".")[2], {})
    space = {**default_space(run), **method_space}
    return {
        path: values
        for path, values in space.items()
        if path not in NOT_SEARCHED and setting_at(settings, path) is not None
    }


def plan_searches(jobs: Sequence[Job], output: Path, trials: int) -> dict[str, Search]:
    """Return the search of every recipe that some jobs train, by its name.

    Args:
        jobs: The jobs of a plan, before a search.
        output: Folder of the study; trials are in its folder `search`.
        trials: Trials of each search.

    Raises:
        UsageError: If there are no trials, or more than the smallest grid has points.
    """
    bases = {job.run.name: job for job in reversed(jobs)}
    spaces = {name: search_space(job.run) for name, job in bases.items()}
    points = {name: math.prod(map(len, space.values())) for name, space in spaces.items()}
    if not 1 <= trials <= min(points.values()):
        smallest = min(points, key=lambda name: points[name])
        raise UsageError(
            f"--search takes 1 to {points[smallest]} trials, as many as the grid of {smallest} has points; got {trials}"
        )
    return {
        name: Search(
            job.run, spaces[name], output / "search" / name, trials, splits=1, holdout=HOLDOUT, callbacks=job.callbacks
        )
        for name, job in bases.items()
    }


def trial_jobs(searches: Mapping[str, Search]) -> list[Job]:
    """Return the trials of all searches."""
    return [job for search in searches.values() for trial in search.jobs() for job in trial]


def with_winners(jobs: Sequence[Job], searches: Mapping[str, Search], output: Path) -> list[Job]:
    """Return the jobs with the settings that the searches chose, which are also written to winners.json.

    Args:
        jobs: The jobs of the plan.
        searches: The searches, whose trials are done; a trial that failed scores 0.
        output: Folder of the study.
    """
    winners: dict[str, dict[str, Any]] = {name: search.collect()["winner"] for name, search in searches.items()}
    write_json(output / "winners.json", winners)
    return [replace(job, run=with_changes(job.run, winners[job.run.name])) for job in jobs]

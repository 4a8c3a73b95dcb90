"""Run directories become results, and results that may stand in one table become a comparison."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doubly.errors import UsageError
from doubly.report.protocol import brief, flatten
from doubly.report.run_result import RunResult, read_run
from doubly.rundir import runs_in

BASELINES = ("Standard", "AT")  # these head a table
# What makes two numbers under AutoAttack comparable.
ENSEMBLE = ("label", "n", "norm", "epsilon", "seed", "chunk", "parts", "reference")


@dataclass(frozen=True)
class Comparison:
    """Methods measured in the same way on the same number of images: one table."""

    setting: str
    protocol: dict[str, Any]
    n: int
    methods: dict[str, list[RunResult]] = field(default_factory=dict)  # label -> one result per seed
    apart: tuple[str, ...] = ()  # what keeps other runs of the same setting out of it

    @property
    def runs(self) -> list[RunResult]:
        return [run for runs in self.methods.values() for run in runs]

    @property
    def classes(self) -> list[str]:
        return list(self.runs[0].evaluation["per_class"])


def collect(paths: Iterable[Path | str]) -> list[RunResult]:
    """Each path is a run directory, or a folder of run directories; a run named twice counts once."""
    runs = {found.resolve(): found for path in paths for found in runs_in(Path(path))}
    if not runs:
        raise UsageError("a report needs at least one run: give run directories, or a folder that contains them")
    return [read_run(path) for path in runs.values()]


def compare(results: Iterable[RunResult]) -> list[Comparison]:
    """Numbers of other training data, protocol, images, classes or tail go to another table: they are never mixed.

    A run without AutoAttack stands with those that have it; two that were attacked by it differently do not.
    """
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(repr((result.setting, sorted(_way(result).items()))), []).append(result)
    found = [
        Comparison(runs[0].setting, runs[0].evaluation["protocol"], runs[0].evaluation["n"], _by_method(runs))
        for group in groups.values()
        for runs in _by_ensemble(group)
    ]
    return [replace(one, apart=_differing([c for c in found if c.setting == one.setting])) for one in found]


def _way(run: RunResult) -> dict[str, Any]:
    """What was learned from, and how it was measured, AutoAttack apart."""
    data = {key: value for key, value in run.choices.items() if key.startswith("data.")}
    classes = {"images": run.evaluation["n"], "classes": list(run.evaluation["per_class"])}
    return {**data, **flatten(run.evaluation["protocol"]), **classes, **run.tail}


def _differing(comparisons: list[Comparison]) -> tuple[str, ...]:
    """In what the ways of these are not alike."""
    ways = [
        {**_way(c.runs[0]), **flatten({"autoattack": next(filter(None, map(ensemble, c.runs)), {})})}
        for c in comparisons
    ]
    keys = dict.fromkeys(key for way in ways for key in way)
    return tuple(key for key in keys if len({repr(way.get(key)) for way in ways}) > 1)


def ensemble(run: RunResult) -> dict[str, Any]:
    """How RA-AA was measured; empty where it was not."""
    about = run.evaluation.get("autoattack", {})
    return {key: about.get(key) for key in ENSEMBLE} if "ra_aa" in run.evaluation else {}


def _by_ensemble(runs: list[RunResult]) -> list[list[RunResult]]:
    kinds: dict[str, list[RunResult]] = {}
    for run in runs:
        kinds.setdefault(repr(ensemble(run)), []).append(run)
    return list(kinds.values()) if len(kinds.keys() - {repr({})}) > 1 else [runs]


def mean_sd(values: Iterable[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation over seeds; one seed has no deviation."""
    array: npt.NDArray[np.float64] = np.asarray(list(values), dtype=float)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None


def _by_method(runs: list[RunResult]) -> dict[str, list[RunResult]]:
    """Seeds of one method share a row; a run of the same recipe with other settings gets a row that says which."""
    methods: dict[str, list[RunResult]] = {}
    first: dict[str, RunResult] = {}
    for run in sorted(runs, key=lambda run: BASELINES.index(run.method) if run.method in BASELINES else len(BASELINES)):
        usual, own = first.setdefault(run.method, run).choices, run.choices
        differing = [brief(key, own.get(key)) for key in {**usual, **own} if usual.get(key) != own.get(key)]
        label = f"{run.method}, {', '.join(differing)}" if differing else run.method
        methods.setdefault(label, []).append(run)
    return {label: sorted(group, key=lambda run: run.seed) for label, group in methods.items()}

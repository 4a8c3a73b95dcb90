"""Read run directories, and group the runs whose numbers may stand in one table."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doubly.errors import UsageError
from doubly.report.protocol import describe_setting, flatten
from doubly.report.run_result import RunResult, read_run
from doubly.rundir import is_result, runs_in

BASELINE = "AT"  # label of the method that others are compared with
FIRST_ROWS = ("Standard", BASELINE)  # labels at the top of a table
# Settings of AutoAttack that two numbers must share to be comparable.
AUTOATTACK_SETTINGS = ("label", "n", "norm", "epsilon", "seed", "chunk", "parts", "reference")


@dataclass(frozen=True)
class Comparison:
    """Methods that were measured in the same way on the same number of images: one table."""

    setting: str
    protocol: dict[str, Any]
    n: int
    methods: dict[str, list[RunResult]] = field(default_factory=dict)  # label -> one result per seed
    differences: tuple[str, ...] = ()  # settings that keep other runs of the same task out of this table

    @property
    def runs(self) -> list[RunResult]:
        """The runs of all methods."""
        return [run for runs in self.methods.values() for run in runs]

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return list(self.runs[0].evaluation["per_class"])


def collect(paths: Iterable[Path | str]) -> list[RunResult]:
    """Read runs.

    Args:
        paths: Run directories, folders with an evaluation of a network from elsewhere, or folders of these; what is
            named twice counts once.

    Raises:
        UsageError: If there is no run, or one cannot be read.
    """
    runs = {run.resolve(): run for path in paths for run in runs_in(Path(path), is_result)}
    if not runs:
        raise UsageError("a report needs at least one run: give run directories, or a folder that contains them")
    return [read_run(path) for path in runs.values()]


def compare(results: Iterable[RunResult]) -> list[Comparison]:
    """Group runs into comparisons.

    Runs that differ in training data, protocol, images, classes or tail never share a table. A run without AutoAttack
    may share a table with runs that have it; two runs with different settings of AutoAttack may not.
    """
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(repr((result.setting, sorted(_conditions(result).items()))), []).append(result)
    comparisons = [
        Comparison(runs[0].setting, runs[0].evaluation["protocol"], runs[0].evaluation["n"], _by_method(runs))
        for group in groups.values()
        for runs in _by_autoattack(group)
    ]
    return [
        replace(c, differences=_differences([other for other in comparisons if other.setting == c.setting]))
        for c in comparisons
    ]


def autoattack_settings(run: RunResult) -> dict[str, Any]:
    """Return how RA-AA was measured; empty for a run without RA-AA."""
    settings = run.evaluation.get("autoattack", {})
    return {key: settings.get(key) for key in AUTOATTACK_SETTINGS} if "ra_aa" in run.evaluation else {}


def mean_sd(values: Iterable[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation; of a single value the deviation is None."""
    array: npt.NDArray[np.float64] = np.asarray(list(values), dtype=float)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None


def _conditions(run: RunResult) -> dict[str, Any]:
    """Return the training data and the protocol of the evaluation, without AutoAttack."""
    # A setting of a later version is missing in older files, and None where it is not used.
    data = {key: value for key, value in run.choices.items() if key.startswith("data.") and value is not None}
    classes = {"images": run.evaluation["n"], "classes": list(run.evaluation["per_class"])}
    return {**data, **flatten(run.evaluation["protocol"]), **classes, **run.tail}


def _differences(comparisons: list[Comparison]) -> tuple[str, ...]:
    """Return the names of the settings in which the comparisons differ."""
    conditions = [
        {**_conditions(c.runs[0]), **flatten({"autoattack": next(filter(None, map(autoattack_settings, c.runs)), {})})}
        for c in comparisons
    ]
    keys = dict.fromkeys(key for settings in conditions for key in settings)
    return tuple(key for key in keys if len({repr(settings.get(key)) for settings in conditions}) > 1)


def _by_autoattack(runs: list[RunResult]) -> list[list[RunResult]]:
    kinds: dict[str, list[RunResult]] = {}
    for run in runs:
        kinds.setdefault(repr(autoattack_settings(run)), []).append(run)
    return list(kinds.values()) if len(kinds.keys() - {repr({})}) > 1 else [runs]


def _by_method(runs: list[RunResult]) -> dict[str, list[RunResult]]:
    """Group seeds by method, repaired networks behind those that they come from.

    A run of the same method with other settings gets a label that says which.
    """
    methods: dict[str, list[RunResult]] = {}
    first_runs: dict[str, RunResult] = {}
    order = list(dict.fromkeys([*FIRST_ROWS, *(run.origin for run in runs)]))
    for run in sorted(runs, key=lambda run: (order.index(run.origin), run.is_repaired)):
        usual, choices = first_runs.setdefault(run.method, run).choices, run.choices
        changes = [
            describe_setting(key, choices.get(key))
            for key in {**usual, **choices}
            if usual.get(key) != choices.get(key)
        ]
        label = f"{run.method}, {', '.join(changes)}" if changes else run.method
        methods.setdefault(label, []).append(run)
    return {label: sorted(group, key=lambda run: run.seed) for label, group in methods.items()}

"""Run directories become results, and results that may stand in one table become a comparison."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doubly.errors import UsageError
from doubly.report.protocol import brief, flatten
from doubly.rundir import RunDir, read_metrics, read_tree, runs_in

SCHEMAS = (1, 2)  # of evaluation.json; 2 says more
NEEDED = ("sa", "ra_pgd", "ra_tail_30", "ra_tail_30_classes", "worst_class", "per_class", "n", "protocol")
LABELS = {"standard": "Standard", "fast_at": "Fast-AT", "fast_at_ga": "Fast-AT-GA", "fast_bat": "Fast-BAT"}
BASELINES = ("Standard", "AT")  # these head a table
# Settings in which two seeds of one method may differ: they decide where and how fast it runs, not what is learnt.
PER_RUN = ("name", "seed", "output", "device", "channels_last", "save_seconds", "data.root")


@dataclass(frozen=True)
class RunResult:
    """What the files of one run say."""

    path: Path
    config: dict[str, Any]
    evaluation: dict[str, Any]
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]

    @property
    def setting(self) -> str:
        """What is learnt: `digits.imbalanced` of the recipe `digits.imbalanced.done_pgd`."""
        return str(self.config["name"]).rpartition(".")[0] or "runs"

    @property
    def method(self) -> str:
        name = str(self.config["name"]).rpartition(".")[2]
        return LABELS.get(name, name.upper().replace("_", "-"))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def seconds(self) -> float:
        """Of training; NaN when the run kept no metrics."""
        return math.fsum(row.get("seconds", 0.0) for row in self.metrics) if self.metrics else math.nan

    @property
    def choices(self) -> dict[str, Any]:
        """Every setting of the run that a second seed would share."""
        return {key: value for key, value in flatten(self.config).items() if key not in PER_RUN}


@dataclass(frozen=True)
class Comparison:
    """Methods measured in the same way on the same number of images: one table."""

    setting: str
    protocol: dict[str, Any]
    n: int
    methods: dict[str, list[RunResult]] = field(default_factory=dict)  # label -> one result per seed

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
    return [_read(path) for path in runs.values()]


def compare(results: Iterable[RunResult]) -> list[Comparison]:
    """Numbers of another setting, protocol, image count or set of classes go to another table: they are never mixed."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        kept = result.evaluation
        key = repr((result.setting, sorted(flatten(kept["protocol"]).items()), kept["n"], list(kept["per_class"])))
        groups.setdefault(key, []).append(result)
    return [
        Comparison(runs[0].setting, runs[0].evaluation["protocol"], runs[0].evaluation["n"], _by_method(runs))
        for runs in groups.values()
    ]


def mean_sd(values: Iterable[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation over seeds; one seed has no deviation."""
    array: npt.NDArray[np.float64] = np.asarray(list(values), dtype=float)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None


def _read(path: Path) -> RunResult:
    files = RunDir(path)
    if not files.evaluation.is_file():
        raise UsageError(f"{path} has not been evaluated: run `doubly evaluate {path}` first")
    config, evaluation = read_tree(files.config), read_tree(files.evaluation)
    lacking = [key for key in NEEDED if key not in evaluation]
    if lacking or evaluation.get("schema", SCHEMAS[0]) not in SCHEMAS:
        fault = f"lacks {', '.join(lacking)}" if lacking else f"has the unknown schema {evaluation['schema']}"
        raise UsageError(f"{files.evaluation} {fault}: run `doubly evaluate {path}` again")
    if "name" not in config:
        raise UsageError(f"{files.config} does not name its recipe: give a directory that `doubly train` wrote")
    environment = read_tree(files.environment) if files.environment.is_file() else {}
    return RunResult(path, config, evaluation, read_metrics(files.metrics), environment)


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

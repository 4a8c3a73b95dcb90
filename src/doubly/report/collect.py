"""Run directories become results, and results that may stand in one table become a comparison."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
FAST = ("fast_at", "fast_at_ga", "fast_bat", "n_fgsm", "done_fast")  # of few steps and epochs: a table of their own
# What makes two numbers under AutoAttack comparable.
ENSEMBLE = ("label", "n", "norm", "epsilon", "seed", "chunk", "parts", "reference")
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
        """What is learnt: `digits.imbalanced` of the recipe `digits.imbalanced.done_pgd`, and `digits.fast`."""
        setting, _, method = str(self.config["name"]).rpartition(".")
        return (setting or "runs") + ".fast" * (method in FAST)

    @property
    def method(self) -> str:
        name = str(self.config["name"]).rpartition(".")[2]
        return LABELS.get(name, name.upper().replace("_", "-"))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def seconds(self) -> float:
        """Of training: epochs times the median epoch, so that a pause does not count; NaN without metrics."""
        epochs = [row["seconds"] for row in self.metrics if "seconds" in row]
        return len(self.metrics) * statistics.median(epochs) if epochs else math.nan

    @property
    def passes(self) -> tuple[float, float]:
        """Forward and backward, per step, mean over the epochs; NaN where they were not counted."""
        return self._mean("passes_forward"), self._mean("passes_backward")

    @property
    def peak_memory(self) -> float:
        """In bytes."""
        return max((row["peak_memory"] for row in self.metrics if row.get("peak_memory")), default=math.nan)

    def _mean(self, key: str) -> float:
        found = [row[key] for row in self.metrics if key in row]
        return statistics.fmean(found) if found else math.nan

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
    return [_read(path) for path in runs.values()]


def compare(results: Iterable[RunResult]) -> list[Comparison]:
    """Numbers of another setting, protocol, image count or set of classes go to another table: they are never mixed.

    A run without AutoAttack stands with those that have it; two that were attacked by it differently do not.
    """
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        kept = result.evaluation
        key = repr((result.setting, sorted(flatten(kept["protocol"]).items()), kept["n"], list(kept["per_class"])))
        groups.setdefault(key, []).append(result)
    found = [
        Comparison(runs[0].setting, runs[0].evaluation["protocol"], runs[0].evaluation["n"], _by_method(runs))
        for group in groups.values()
        for runs in _by_ensemble(group)
    ]
    return [replace(one, apart=_differing([c for c in found if c.setting == one.setting])) for one in found]


def _differing(comparisons: list[Comparison]) -> tuple[str, ...]:
    """Fields of the measurement in which these are not alike."""
    ways = [
        {
            **flatten(c.protocol),
            "images": c.n,
            "classes": c.classes,
            **flatten({"autoattack": next(filter(None, map(ensemble, c.runs)), {})}),
        }
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

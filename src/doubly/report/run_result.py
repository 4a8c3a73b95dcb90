"""The files of one run, read and checked once, so that tables and figures can rely on their contents."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.errors import UsageError
from doubly.metric_names import METRICS, finite_number, is_number
from doubly.report.evaluation_fault import fault_of_evaluation
from doubly.report.protocol import flatten
from doubly.rundir import RunDir, read_metrics, read_tree
from doubly.text import method_label

REPAIRED = " repaired"  # end of the label of a repaired network
PASSES = ("passes_forward", "passes_backward")
# Numbers in a row of metrics.jsonl.
ROW = ("epoch", *(key for key, metric in METRICS.items() if not metric.field), *PASSES, "peak_memory")
DEFAULT_TAIL = {"share": 0.3, "rounding": "round"}
# Settings in which two seeds of one method may differ: they decide where and how fast a run trains and how it is named.
PER_RUN = (
    "name",
    "label",
    "table",
    "seed",
    "output",
    "device",
    "channels_last",
    "save_seconds",
    "data.root",
)


@dataclass(frozen=True)
class RunResult:
    """The contents of the files of one run."""

    path: Path
    config: dict[str, Any]
    evaluation: dict[str, Any]
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    remarks: tuple[str, ...] = ()  # what readers of its numbers must know

    @property
    def setting(self) -> str:
        """The task without the method: `digits.imbalanced` for the run `digits.imbalanced.done_pgd`.

        A run whose config names a table of its own belongs to that part of the setting: `cifar10.fast.small` for
        `cifar10.small.fast_at` with the table `fast`.
        """
        setting = str(self.config["name"]).rpartition(".")[0]
        table, scale = self.config.get("table", ""), ".small" * setting.endswith(".small")
        return (setting.removesuffix(".small") or "runs") + (f".{table}" if table else "") + scale

    @property
    def method(self) -> str:
        """The label of the method in tables: the one in the config, else one made from the name."""
        return str(self.config.get("label") or method_label(str(self.config["name"])))

    @property
    def is_repaired(self) -> bool:
        """Whether the network is one that `doubly repair` wrote."""
        return RunDir(self.path).repair.is_file()

    @property
    def origin(self) -> str:
        """The label of the method that trained the network, also of a repaired one."""
        return self.method.removesuffix(REPAIRED) if self.is_repaired else self.method

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.config.get("seed", 0))

    @property
    def epoch_seconds(self) -> list[float]:
        """The training time of each epoch that recorded it."""
        return [row["seconds"] for row in self.metrics if row.get("seconds") is not None]

    @property
    def seconds(self) -> float:
        """Training time as epochs times the median epoch, so that a pause does not count; NaN without metrics."""
        return len(self.metrics) * statistics.median(self.epoch_seconds) if self.epoch_seconds else math.nan

    @property
    def passes(self) -> tuple[float, float]:
        """Forward and backward passes per step, mean over the epochs; NaN where they were not counted."""
        forward, backward = (self._mean(key) for key in PASSES)
        return forward, backward

    @property
    def predicted_passes(self) -> tuple[float, float]:
        """Forward and backward passes per step predicted at the start of the run; NaN where they were not recorded."""
        predicted = self.environment.get("predicted")
        values = [predicted.get(key) if isinstance(predicted, dict) else None for key in PASSES]
        forward, backward = (math.nan if number is None else number for number in map(finite_number, values))
        return forward, backward

    @property
    def peak_memory(self) -> float:
        """Largest memory use in bytes; NaN where it was not recorded."""
        return max((row["peak_memory"] for row in self.metrics if row.get("peak_memory")), default=math.nan)

    @property
    def choices(self) -> dict[str, Any]:
        """The settings that all seeds of a method share, as dotted name -> value."""
        return {key: value for key, value in flatten(self.config).items() if key not in PER_RUN}

    @property
    def tail(self) -> dict[str, Any]:
        """The settings by which the classes of the tail were selected."""
        tail = self.evaluation.get("tail", {})
        return {f"tail.{key}": tail.get(key, default) for key, default in DEFAULT_TAIL.items()}

    @property
    def tail_attacks(self) -> list[str]:
        """Names of the attacks that the evaluation gives a tail for."""
        return [name for name in self.evaluation.get("tail", {}) if name not in DEFAULT_TAIL]

    def _mean(self, key: str) -> float:
        values = [row[key] for row in self.metrics if row.get(key) is not None]
        return statistics.fmean(values) if values else math.nan


def read_run(path: Path) -> RunResult:
    """Read a run directory that has been evaluated.

    Raises:
        UsageError: If it has not been evaluated, or a file is missing, damaged or of an unknown schema.
    """
    files = RunDir(path)
    if not files.evaluation.is_file():
        raise UsageError(f"{path} has not been evaluated: run `doubly evaluate {path}` first")
    evaluation = read_tree(files.evaluation)
    config = read_tree(files.config) if files.config.is_file() else _foreign_config(path, evaluation)
    if "name" not in config or not isinstance(config.get("seed", 0), int):
        raise UsageError(
            f"{files.config} does not name its recipe and seed: give a directory that `doubly train` wrote"
        )
    if fault := fault_of_evaluation(evaluation):
        raise UsageError(f"{files.evaluation} {fault}: run `doubly evaluate {path}` again")
    metrics = read_metrics(files.metrics)
    for number, row in enumerate(metrics, 1):
        if not _is_row(row):
            raise UsageError(f"{files.metrics}, line {number} is not a row of metrics: repair or remove that line")
    environment = read_tree(files.environment) if files.environment.is_file() else {}
    return RunResult(path, config, evaluation, metrics, environment, tuple(_remarks(files, config, evaluation)))


def _foreign_config(path: Path, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands for the configuration of a network that was not trained here: its data and its name."""
    protocol = evaluation.get("protocol")
    about = protocol if isinstance(protocol, dict) else {}
    data, weights, model = (str(about.get(key) or "") for key in ("data", "weights", "model"))
    label = Path(weights).stem or model or path.resolve().name
    return {"name": f"{Path(data).stem or 'evaluations'}.{label}", "label": label, "seed": 0}


def _is_row(row: Mapping[str, Any]) -> bool:
    validation = row.get("validation", {})
    if not isinstance(validation, dict) or type(row.get("epoch")) is not int:
        return False
    numbers = [*(row.get(key) for key in ROW), *(validation.get(key) for key in ("sa", "ra_pgd"))]
    return all(number is None or is_number(number) for number in numbers)


def _remarks(files: RunDir, config: Mapping[str, Any], evaluation: Mapping[str, Any]) -> list[str]:
    remarks = []
    epoch, epochs = evaluation.get("epoch"), config.get("epochs")
    if epoch is not None and epochs is not None and epoch != epochs:
        remarks.append(f"was measured after epoch {epoch} of {epochs}")
    if files.metrics.is_file() and not files.metrics.read_bytes().endswith(b"\n"):
        remarks.append("has an unfinished last line in metrics.jsonl, which is ignored")
    return remarks

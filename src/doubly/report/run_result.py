"""The files of one run, read and checked once, so that tables and figures can rely on their contents."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.errors import UsageError
from doubly.metric_names import METRICS
from doubly.report.protocol import flatten
from doubly.rundir import RunDir, read_metrics, read_tree
from doubly.text import method_label

SCHEMAS = (1, 2)  # of evaluation.json; 2 has more fields
NUMBER = (int, float)
# Fields of evaluation.json and their types; those in OPTIONAL may be missing.
NEEDED: dict[str, Any] = {
    **dict.fromkeys(("sa", "ra_pgd", "ra_tail_30", "n"), NUMBER),
    **dict.fromkeys(("worst_class", "per_class", "protocol"), dict),
    "ra_tail_30_classes": list,
}
OPTIONAL: dict[str, Any] = {
    **{key: NUMBER for key, metric in METRICS.items() if metric.is_accuracy and not metric.field},
    **dict.fromkeys(("autoattack", "curve", "trust", "tail", "confusion"), dict),
    "weights": list,
    "epoch": NUMBER,
}
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
        forward, backward = (float(value) if isinstance(value, NUMBER) else math.nan for value in values)
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
    if fault := _fault(evaluation):
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


def _fault(evaluation: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the contents of an evaluation.json; None if nothing is."""
    if evaluation.get("schema", SCHEMAS[0]) not in SCHEMAS:
        return f"has the unknown schema {evaluation['schema']}"
    if evaluation.get("tail", {}).get("share", 0.3) != 0.3 and "ra_tail_30" not in evaluation:
        return "was made with another --tail-share, and has no RA-Tail-30"
    if missing := [key for key in NEEDED if key not in evaluation]:
        return f"lacks {', '.join(missing)}"
    kinds = {**NEEDED, **{key: kind for key, kind in OPTIONAL.items() if key in evaluation}}
    if wrong := [key for key, kind in kinds.items() if not isinstance(evaluation[key], kind)]:
        return f"is damaged: {wrong[0]} is {evaluation[wrong[0]]!r:.40}"
    classes = evaluation["per_class"].values()
    if not classes or not all(isinstance(c, dict) and {"n", "ra_pgd"} <= c.keys() for c in classes):
        return "is damaged: per_class does not hold n and ra_pgd of each class"
    if not isinstance(evaluation["worst_class"].get("ra_pgd"), NUMBER) or "name" not in evaluation["worst_class"]:
        return "is damaged: worst_class does not hold name and ra_pgd"
    return None


def _is_row(row: Mapping[str, Any]) -> bool:
    numbers = all(row.get(key) is None or isinstance(row[key], NUMBER) for key in ROW)
    return isinstance(row.get("epoch"), int) and numbers and isinstance(row.get("validation", {}), dict)


def _remarks(files: RunDir, config: Mapping[str, Any], evaluation: Mapping[str, Any]) -> list[str]:
    remarks = []
    epoch, epochs = evaluation.get("epoch"), config.get("epochs")
    if epoch is not None and epochs is not None and epoch != epochs:
        remarks.append(f"was measured after epoch {epoch} of {epochs}")
    if files.metrics.is_file() and not files.metrics.read_bytes().endswith(b"\n"):
        remarks.append("has an unfinished last line in metrics.jsonl, which is ignored")
    return remarks

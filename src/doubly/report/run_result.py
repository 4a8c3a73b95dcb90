"""The files of one run, looked at once, so that tables and pictures can rely on their shape."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.errors import UsageError
from doubly.report.protocol import flatten
from doubly.rundir import RunDir, read_metrics, read_tree

SCHEMAS = (1, 2)  # of evaluation.json; 2 says more
NUMBER = (int, float)
# Of evaluation.json: field -> kind; those in OPTIONAL may be missing.
NEEDED: dict[str, Any] = {
    **dict.fromkeys(("sa", "ra_pgd", "ra_tail_30", "n"), NUMBER),
    **dict.fromkeys(("worst_class", "per_class", "protocol"), dict),
    "ra_tail_30_classes": list,
}
OPTIONAL: dict[str, Any] = {
    **dict.fromkeys(("ra_aa", "ra_margin", "ra_margin_tail_30", "epoch"), NUMBER),
    **dict.fromkeys(("autoattack", "curve", "trust", "tail", "confusion"), dict),
    "weights": list,
}
ROW = ("epoch", "loss", "lr", "r", "weight_ess", "seconds", "passes_forward", "passes_backward", "peak_memory")
LABELS = {"standard": "Standard", "fast_at": "Fast-AT", "fast_at_ga": "Fast-AT-GA", "fast_bat": "Fast-BAT"}
FAST = ("fast_at", "fast_at_ga", "fast_bat", "n_fgsm", "done_fast")  # of few steps and epochs: a table of their own
# Settings in which two seeds of one method may differ: they decide where and how fast it runs, not what is learned.
PER_RUN = ("name", "seed", "output", "device", "channels_last", "compile", "save_seconds", "data.root")


@dataclass(frozen=True)
class RunResult:
    """What the files of one run say."""

    path: Path
    config: dict[str, Any]
    evaluation: dict[str, Any]
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    remarks: tuple[str, ...] = ()  # what a reader of its numbers must know

    @property
    def setting(self) -> str:
        """What is learned: `digits.imbalanced` of `digits.imbalanced.done_pgd`, `cifar10.fast` of `cifar10.fast_at`."""
        setting, _, method = str(self.config["name"]).rpartition(".")
        scale = ".small" * setting.endswith(".small")
        return (setting.removesuffix(".small") or "runs") + ".fast" * (method in FAST) + scale

    @property
    def method(self) -> str:
        return method_label(str(self.config["name"]))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def epochs(self) -> list[float]:
        """Seconds of each."""
        return [row["seconds"] for row in self.metrics if row.get("seconds") is not None]

    @property
    def seconds(self) -> float:
        """Of training: epochs times the median epoch, so that a pause does not count; NaN without metrics."""
        return len(self.metrics) * statistics.median(self.epochs) if self.epochs else math.nan

    @property
    def passes(self) -> tuple[float, float]:
        """Forward and backward, per step, mean over the epochs; NaN where they were not counted."""
        return self._mean("passes_forward"), self._mean("passes_backward")

    @property
    def predicted_passes(self) -> tuple[float, float]:
        """As they were foreseen when the run began; NaN in a record of an earlier time."""
        found = self.environment.get("predicted")
        values = [found.get(key) if isinstance(found, dict) else None for key in ROW[6:8]]
        forward, backward = (float(value) if isinstance(value, NUMBER) else math.nan for value in values)
        return forward, backward

    @property
    def peak_memory(self) -> float:
        """In bytes."""
        return max((row["peak_memory"] for row in self.metrics if row.get("peak_memory")), default=math.nan)

    def _mean(self, key: str) -> float:
        found = [row[key] for row in self.metrics if row.get(key) is not None]
        return statistics.fmean(found) if found else math.nan

    @property
    def choices(self) -> dict[str, Any]:
        """Every setting of the run that a second seed would share."""
        return {key: value for key, value in flatten(self.config).items() if key not in PER_RUN}

    @property
    def tail(self) -> dict[str, Any]:
        """How the classes of the tail were picked."""
        return {f"tail.{key}": self.evaluation.get("tail", {}).get(key, usual) for key, usual in USUAL_TAIL.items()}


def method_label(name: str) -> str:
    """`DONE-PGD` of `cifar10.imbalanced.done_pgd`."""
    method = name.rpartition(".")[2]
    return LABELS.get(method, method.upper().replace("_", "-"))


USUAL_TAIL = {"share": 0.3, "rounding": "round"}


def read_run(path: Path) -> RunResult:
    files = RunDir(path)
    if not files.evaluation.is_file():
        raise UsageError(f"{path} has not been evaluated: run `doubly evaluate {path}` first")
    config, evaluation = read_tree(files.config), read_tree(files.evaluation)
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


def _fault(evaluation: Mapping[str, Any]) -> str | None:
    """What keeps evaluation.json from being one."""
    if evaluation.get("schema", SCHEMAS[0]) not in SCHEMAS:
        return f"has the unknown schema {evaluation['schema']}"
    if evaluation.get("tail", {}).get("share", 0.3) != 0.3 and "ra_tail_30" not in evaluation:
        return "was made with another --tail-share, and has no RA-Tail-30"
    if lacking := [key for key in NEEDED if key not in evaluation]:
        return f"lacks {', '.join(lacking)}"
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
    found = []
    epoch, epochs = evaluation.get("epoch"), config.get("epochs")
    if epoch is not None and epochs is not None and epoch != epochs:
        found.append(f"was measured after epoch {epoch} of {epochs}")
    if files.metrics.is_file() and not files.metrics.read_bytes().endswith(b"\n"):
        found.append("has an unfinished last line in metrics.jsonl, which is passed over")
    return found

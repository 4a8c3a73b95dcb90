"""Tables of methods: accuracies and costs, mean ± sd over seeds, the best value of each column marked."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from doubly.metric_names import METRICS, Metric, attack_metric
from doubly.report.collect import Comparison, mean_sd
from doubly.report.notes import notes
from doubly.report.paper import TABLES, printed
from doubly.report.run_result import RunResult
from doubly.text import format_mean_sd

MAIN = tuple(metric for metric in METRICS.values() if metric.is_main)
COSTS = {
    "seconds": "training time, as the number of epochs times the median epoch",
    "passes per step": "forward + backward passes through the network for one batch",
    "predicted": "passes per step as predicted at the start of training",
    "peak MB": "largest memory use of the process, or of the GPU",
}
FURTHER = tuple(metric for metric in METRICS.values() if metric.is_accuracy and not metric.is_main and not metric.field)


@dataclass(frozen=True)
class Cell:
    """A label, or a number with its deviation over seeds and a remark such as the class it belongs to."""

    label: str = ""
    mean: float | None = None
    sd: float | None = None
    digits: int = 1
    best: bool = False

    @property
    def text(self) -> str:
        """The cell as printed; a number that was not measured is a dash."""
        if self.mean is None:
            return self.label
        return f"{self.number} ({self.label})" if self.label and not math.isnan(self.mean) else self.number

    @property
    def number(self) -> str:
        """The mean with its deviation, without the remark."""
        return "-" if self.mean is None or math.isnan(self.mean) else format_mean_sd(self.mean, self.sd, self.digits)


@dataclass(frozen=True)
class Column:
    """The head of a column."""

    name: str
    best: Callable[[Sequence[float]], float] | None = max  # max, min, or None where no value is best
    group: str = ""  # the setting of the column, in a table of several settings
    optional: bool = False  # left out where there is no room

    @property
    def title(self) -> str:
        """The name with the setting in front."""
        return f"{self.group} {self.name}".strip()


@dataclass(frozen=True)
class Table:
    """Title, columns, rows and the notes below them."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Name and number of columns of each group of neighboring columns."""
        groups: list[tuple[str, int]] = []
        for column in self.columns:
            if groups and groups[-1][0] == column.group:
                groups[-1] = (column.group, groups[-1][1] + 1)
            else:
                groups.append((column.group, 1))
        return groups

    @property
    def without_costs(self) -> "Table":
        """The table without the columns of `COSTS`."""
        return self._only([column.name not in COSTS for column in self.columns])

    @property
    def costs(self) -> "Table":
        """The first column and the columns of `COSTS`."""
        return self._only([index == 0 or column.name in COSTS for index, column in enumerate(self.columns)])

    def _only(self, kept: Sequence[bool]) -> "Table":
        rows = tuple(tuple(compress(row, kept)) for row in self.rows)
        return replace(self, columns=tuple(compress(self.columns, kept)), rows=rows)


def table(comparison: Comparison) -> Table:
    """Return the table of one setting: accuracies, worst class and costs."""
    columns: dict[Column, list[Cell]] = {Column("method", None): [Cell(label) for label in comparison.methods]}
    columns |= _accuracies(comparison, MAIN)
    further = _accuracies(comparison, (*FURTHER, *other_attack_metrics(comparison)))
    columns |= {replace(column, optional=True): cells for column, cells in further.items()}
    runs = comparison.methods.values()
    columns[Column(METRICS["worst_class"].label)] = [_worst(group) for group in runs]
    columns[Column("seconds", None, optional=True)] = [mean_cell([run.seconds for run in group], 0) for group in runs]
    columns[Column("passes per step", None, optional=True)] = [_passes([r.passes for r in group]) for group in runs]
    if any(not math.isnan(run.predicted_passes[0]) for run in comparison.runs):
        predicted = [_passes([run.predicted_passes for run in group]) for group in runs]
        columns[Column("predicted", None, optional=True)] = predicted
    columns[Column("peak MB", min, optional=True)] = [
        mean_cell([run.peak_memory / 2**20 for run in group], 0) for group in runs
    ]
    columns[Column("seeds", None)] = [Cell("", len(group), digits=0) for group in runs]
    return _table(comparison.setting, columns, notes(comparison))


def layouts(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Comparison]]:
    """Return the settings to put side by side, as title of the table -> name of the columns -> comparison.

    These are the settings of each table of the paper, and for other datasets balanced beside imbalanced. A layout
    needs all of its settings or at least two. A setting that was measured in two ways is left out.
    """
    wanted = {f"Table {number}: {title}": parts for number, (title, parts) in TABLES.items()}
    in_paper = {setting for _, parts in TABLES.values() for setting in parts}
    for comparison in comparisons:
        balanced = comparison.setting.replace(".imbalanced", "")
        has_table = any(run.config.get("table") for run in comparison.runs)
        if balanced.removesuffix(".small") not in in_paper and not has_table:
            wanted[balanced] = {balanced: "balanced", _imbalanced(balanced): "imbalanced"}
    result = {}
    for title, parts in wanted.items():
        for scale in ("", ".small"):
            names = {f"{setting}{scale}": name for setting, name in parts.items()}
            by_name = {name: [c for c in comparisons if c.setting == setting] for setting, name in names.items()}
            sides = {name: matches[0] for name, matches in by_name.items() if len(matches) == 1}
            if len(sides) == len(parts) or len(sides) > 1:
                result[title + ", small scale" * bool(scale)] = sides
    return result


def side_by_side(title: str, sides: dict[str, Comparison]) -> Table:
    """Return a table with a row per method and the main accuracies of each setting in columns of their own."""
    labels = list(dict.fromkeys(label for side in sides.values() for label in side.methods))
    columns: dict[Column, list[Cell]] = {Column("method", None): [Cell(label) for label in labels]}
    for name, side in sides.items():
        for column, cells in _accuracies(side, MAIN).items():
            by_label = dict(zip(side.methods, cells, strict=True))
            columns[replace(column, group=name)] = [by_label.get(label, Cell("", math.nan)) for label in labels]
    captions = [f"{name[0].upper()}{name[1:]}: {note}" for name, side in sides.items() for note in notes(side)]
    return _table(title, columns, tuple(captions))


def mean_cell(values: Sequence[float], digits: int, remark: str = "") -> Cell:
    """Return mean and sd of the values that are not NaN."""
    numbers = [value for value in values if not math.isnan(value)]
    return Cell(remark, *(mean_sd(numbers) if numbers else (math.nan, None)), digits=digits)


def other_attack_metrics(comparison: Comparison) -> list[Metric]:
    """Return the metrics of attacks that only some evaluations run, and that METRICS therefore does not list."""
    attacks = dict.fromkeys(name for run in comparison.runs for name in run.tail_attacks)
    metrics = [metric for metric in map(attack_metric, attacks) if metric.key not in METRICS]
    return [
        m for m in metrics if all(m.value(r.evaluation) is not None for r in comparison.runs if m.key in r.evaluation)
    ]


def _accuracies(comparison: Comparison, metrics: Iterable[Metric]) -> dict[Column, list[Cell]]:
    """Return a column for each metric that at least one run has."""
    return {
        Column(metric.label): [_accuracy(metric, label, runs) for label, runs in comparison.methods.items()]
        for metric in metrics
        if any(metric.key in run.evaluation for run in comparison.runs)
    }


def _accuracy(metric: Metric, label: str, runs: list[RunResult]) -> Cell:
    values = [100 * run.evaluation[metric.key] for run in runs if metric.key in run.evaluation]
    in_paper = printed(label, runs).get(metric.key)
    return mean_cell(values, 1, "" if in_paper is None else f"paper {in_paper:.2f}")


def _worst(runs: list[RunResult]) -> Cell:
    worst = [run.evaluation["worst_class"] for run in runs]
    return Cell(" / ".join(dict.fromkeys(w["name"] for w in worst)), *mean_sd(100 * w["ra_pgd"] for w in worst))


def _passes(of_runs: Sequence[tuple[float, float]]) -> Cell:
    """Return forward + backward passes, averaged over the runs that recorded them."""
    counted = [passes for passes in of_runs if not math.isnan(passes[0])]
    if not counted:
        return Cell("-")
    forward, backward = (mean_sd(values)[0] for values in zip(*counted, strict=True))
    return Cell(f"{forward:.1f} + {backward:.1f}")


def _table(title: str, columns: dict[Column, list[Cell]], notes: tuple[str, ...]) -> Table:
    marked = [_mark_best(cells, column.best) for column, cells in columns.items()]
    return Table(title, tuple(columns), tuple(zip(*marked, strict=True)), notes)


def _mark_best(column: Sequence[Cell], best: Callable[[Sequence[float]], float] | None) -> Sequence[Cell]:
    """Mark the best cells of a column; values that print alike count as equal, and of equal values none is best."""
    rounded = [round(cell.mean, cell.digits) for cell in column if cell.mean is not None and not math.isnan(cell.mean)]
    if best is None or len(set(rounded)) < 2:
        return column
    value = best(rounded)
    return [replace(cell, best=cell.mean is not None and round(cell.mean, cell.digits) == value) for cell in column]


def _imbalanced(setting: str) -> str:
    """Return `digits.imbalanced.small` for `digits.small`."""
    dataset, _, scale = setting.partition(".")
    return f"{dataset}.imbalanced{'.' * bool(scale)}{scale}"

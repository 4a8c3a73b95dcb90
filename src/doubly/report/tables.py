"""Tables of methods: the paper's numbers and what they cost, mean ± sd over seeds, the best of each column marked."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from doubly.report.collect import Comparison, ensemble, mean_sd
from doubly.report.paper import TABLES, printed
from doubly.report.protocol import describe, show
from doubly.report.run_result import RunResult

ACCURACIES = {"sa": "SA", "ra_pgd": "RA-PGD", "ra_tail_30": "RA-Tail-30", "ra_aa": "RA-AA"}
BUDGET = ("epochs", "batch", "model.", "warm_up", "average", "precision")  # of fields of a run
FURTHER = {"ra_margin": "RA-margin", "ra_margin_tail_30": "margin tail"}  # not the paper's: a check on RA-PGD


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
        if self.mean is None:
            return self.label
        if math.isnan(self.mean):
            return "-"
        number = f"{self.mean:.{self.digits}f}"
        number += "" if self.sd is None else f" ± {self.sd:.{self.digits}f}"
        return f"{number} ({self.label})" if self.label else number


@dataclass(frozen=True)
class Column:
    name: str
    best: Callable[[Sequence[float]], float] | None = max  # None: nothing is best
    group: str = ""  # columns of one setting, where a table has several
    optional: bool = False  # left out where there is no room

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}".strip()


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Neighboring columns of one group: its name, and how many they are."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found


def table(comparison: Comparison) -> Table:
    """Everything about one setting: accuracies, worst class, cost."""
    columns: dict[Column, list[Cell]] = {Column("method", None): [Cell(label) for label in comparison.methods]}
    columns |= _accuracies(comparison)
    columns |= {replace(c, optional=True): cells for c, cells in _accuracies(comparison, FURTHER).items()}
    runs = comparison.methods.values()
    columns[Column("worst class")] = [_worst(group) for group in runs]
    columns[Column("seconds", None, optional=True)] = [known([run.seconds for run in group], 0) for group in runs]
    columns[Column("passes per step", None, optional=True)] = [_passes([r.passes for r in group]) for group in runs]
    if any(not math.isnan(run.predicted_passes[0]) for run in comparison.runs):
        foreseen = [_passes([run.predicted_passes for run in group]) for group in runs]
        columns[Column("predicted", None, optional=True)] = foreseen
    columns[Column("peak MB", min, optional=True)] = [
        known([run.peak_memory / 2**20 for run in group], 0) for group in runs
    ]
    columns[Column("seeds", None)] = [Cell("", len(group), digits=0) for group in runs]
    return _made(comparison.setting, columns, notes(comparison))


def layouts(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Comparison]]:
    """Settings to stand side by side, by title: those of each table of the paper, all of them or more than one; other
    datasets, balanced and imbalanced, alike. A setting that was measured in two ways stands in none of them."""
    wanted = {f"Table {number}: {title}": parts for number, (title, parts) in TABLES.items()}
    known = {setting for _, parts in TABLES.values() for setting in parts}
    for comparison in comparisons:
        plain = comparison.setting.replace(".imbalanced", "")
        if plain.removesuffix(".small") not in known and not plain.removesuffix(".small").endswith(".fast"):
            wanted[plain] = {plain: "balanced", _imbalanced(plain): "imbalanced"}
    found = {}
    for title, parts in wanted.items():
        for scale in ("", ".small"):
            named = {f"{setting}{scale}": name for setting, name in parts.items()}
            same = {name: [c for c in comparisons if c.setting == setting] for setting, name in named.items()}
            sides = {name: ways[0] for name, ways in same.items() if len(ways) == 1}
            if len(sides) == len(parts) or len(sides) > 1:
                found[title + ", small scale" * bool(scale)] = sides
    return found


def side_by_side(title: str, sides: dict[str, Comparison]) -> Table:
    """A row per method, the accuracies of each setting in their own columns."""
    labels = list(dict.fromkeys(label for side in sides.values() for label in side.methods))
    columns: dict[Column, list[Cell]] = {Column("method", None): [Cell(label) for label in labels]}
    for name, side in sides.items():
        for column, cells in _accuracies(side).items():
            by_label = dict(zip(side.methods, cells, strict=True))
            columns[replace(column, group=name)] = [by_label.get(label, Cell("", math.nan)) for label in labels]
    captions = [f"{name[0].upper()}{name[1:]}: {note}" for name, side in sides.items() for note in notes(side)]
    return _made(title, columns, tuple(captions))


def notes(comparison: Comparison) -> tuple[str, ...]:
    """The caption: how the numbers were measured, and what keeps the rows from being equals."""
    seeds = {label: ", ".join(str(run.seed) for run in runs) for label, runs in comparison.methods.items()}
    alike = len(set(seeds.values())) == 1
    which = next(iter(seeds.values())) if alike else "; ".join(f"{label}: {own}" for label, own in seeds.items())
    spread = "mean ± sd over seeds, " if any(len(runs) > 1 for runs in comparison.methods.values()) else ""
    caption = (
        f"Percent of n = {comparison.n} test images, {spread}attack {describe(comparison.protocol)}, "
        f"training seed{'s' if len(comparison.runs) > len(comparison.methods) else ''} {which}."
    )
    repeated = [label for label, runs in comparison.methods.items() if len({run.seed for run in runs}) < len(runs)]
    others = f"Other runs of {comparison.setting} were measured otherwise ({', '.join(comparison.apart)})"
    return (
        caption,
        *([f"{others}: they stand in another table."] if comparison.apart else []),
        *_about_autoattack(comparison),
        *_about_seeds(comparison),
        *([f"The rows do not share the same seeds: {which}."] if not alike else []),
        *(f"{label} counts a seed more than once." for label in repeated),
        *_about_budgets(comparison),
        *_about_machines(comparison),
        *(
            f"{label}, seed {r.seed}, {said}."
            for label, runs in comparison.methods.items()
            for r in runs
            for said in r.remarks
        ),
        *([f"{comparison.protocol['note']}."] if comparison.protocol.get("note") else []),
    )


def _about_autoattack(comparison: Comparison) -> list[str]:
    about = next(filter(None, map(ensemble, comparison.runs)), None)
    if about is None:
        return []
    return [f"RA-AA: all four attacks of AutoAttack on n = {about['n']} of the images ({about['reference']})."]


def _about_seeds(comparison: Comparison) -> list[str]:
    """Numbers that some seeds of a method have and others do not."""
    found = []
    for key, name in {**ACCURACIES, **FURTHER}.items():
        counts = {label: sum(key in run.evaluation for run in runs) for label, runs in comparison.methods.items()}
        parts = [f"{label} {n} of {len(comparison.methods[label])}" for label, n in counts.items()]
        if any(0 < counts[label] < len(runs) for label, runs in comparison.methods.items()):
            found.append(f"{name} is of some seeds only: {', '.join(parts)}.")
    return found


def _about_budgets(comparison: Comparison) -> list[str]:
    """Rows of unequal training are not about methods alone."""
    found = []
    for key in dict.fromkeys(key for run in comparison.runs for key in run.choices if key.startswith(BUDGET)):
        values = {label: show(runs[0].choices.get(key)) for label, runs in comparison.methods.items()}
        if len(set(values.values())) > 1:
            found.append(f"{key} ({', '.join(f'{label}: {value}' for label, value in values.items())})")
    return [f"The rows differ in {'; '.join(found)}."] if found else []


def _about_machines(comparison: Comparison) -> list[str]:
    """Seconds compare only between equals, on a machine that did nothing else."""
    differing = [
        f"{key} ({', '.join(sorted(values))})"
        for key in ("device", "threads", "platform")
        if len(values := {str(run.environment[key]) for run in comparison.runs if key in run.environment}) > 1
    ]
    busy = [run for run in comparison.runs if run.epochs and max(run.epochs) > 2 * statistics.median(run.epochs)]
    found = [f"The runs differ in {' and '.join(differing)}: their seconds do not compare."] if differing else []
    if busy:
        some = f"{len(busy)} of {len(comparison.runs)} runs"
        found.append(f"In {some} an epoch took over twice the median one: the machine was shared.")
    return found


def _accuracies(comparison: Comparison, metrics: Mapping[str, str] = ACCURACIES) -> dict[Column, list[Cell]]:
    return {
        Column(name): [_accuracy(key, label, runs) for label, runs in comparison.methods.items()]
        for key, name in metrics.items()
        if any(key in run.evaluation for run in comparison.runs)
    }


def _accuracy(key: str, label: str, runs: list[RunResult]) -> Cell:
    values = [100 * run.evaluation[key] for run in runs if key in run.evaluation]
    theirs = printed(label, runs).get(key)
    return known(values, 1, "" if theirs is None else f"paper {theirs:.2f}")


def known(values: Sequence[float], digits: int, remark: str = "") -> Cell:
    """Of the seeds that recorded it."""
    known = [value for value in values if not math.isnan(value)]
    return Cell(remark, *(mean_sd(known) if known else (math.nan, None)), digits=digits)


def _worst(runs: list[RunResult]) -> Cell:
    found = [run.evaluation["worst_class"] for run in runs]
    return Cell(" / ".join(dict.fromkeys(w["name"] for w in found)), *mean_sd(100 * w["ra_pgd"] for w in found))


def _passes(of_runs: Sequence[tuple[float, float]]) -> Cell:
    """Forward + backward, of the seeds that recorded them."""
    counted = [passes for passes in of_runs if not math.isnan(passes[0])]
    if not counted:
        return Cell("-")
    forward, backward = (mean_sd(values)[0] for values in zip(*counted, strict=True))
    return Cell(f"{forward:.1f} + {backward:.1f}")


def _made(title: str, columns: dict[Column, list[Cell]], notes: tuple[str, ...]) -> Table:
    marked = [_mark(cells, column.best) for column, cells in columns.items()]
    return Table(title, tuple(columns), tuple(zip(*marked, strict=True)), notes)


def _mark(column: Sequence[Cell], best: Callable[[Sequence[float]], float] | None) -> Sequence[Cell]:
    """Best is what reads as best: equal to the last printed digit is equal."""
    printed = [round(cell.mean, cell.digits) for cell in column if cell.mean is not None and not math.isnan(cell.mean)]
    if best is None or len(set(printed)) < 2:
        return column
    value = best(printed)
    return [replace(cell, best=cell.mean is not None and round(cell.mean, cell.digits) == value) for cell in column]


def _imbalanced(setting: str) -> str:
    """`digits.imbalanced.small` of `digits.small`."""
    dataset, _, scale = setting.partition(".")
    return f"{dataset}.imbalanced{'.' * bool(scale)}{scale}"

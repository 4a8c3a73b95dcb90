"""One model of a table, and its four forms: terminal, Markdown, CSV and LaTeX."""

import csv as csv_format
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import rich.markup
import rich.table

from doubly.report.collect import Comparison, RunResult, mean_sd
from doubly.report.protocol import describe

COLUMNS = ("method", "SA", "RA-PGD", "RA-Tail-30", "worst class", "seconds", "seeds")
LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "\n": " ",
}


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
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


def table(comparison: Comparison) -> Table:
    """Percentages per method, mean ± sd over seeds, the best of each column marked."""
    columns = list(zip(*(_row(label, runs) for label, runs in comparison.methods.items()), strict=True))
    marked = [
        column if name in ("method", "seeds") else _mark(column, lowest=name == "seconds")
        for name, column in zip(COLUMNS, columns, strict=True)
    ]
    return Table(comparison.setting, COLUMNS, tuple(zip(*marked, strict=True)), notes(comparison))


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
    warnings = [f"The rows do not share the same seeds: {which}."] * (not alike)
    return (caption, *warnings, *(f"{label} counts a seed more than once." for label in repeated))


def terminal(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=rich.markup.escape(table.title), caption=rich.markup.escape(" ".join(table.notes)))
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in table.rows:
        texts = [(rich.markup.escape(cell.text), cell.best) for cell in row]
        drawn.add_row(*(f"[bold]{text}[/bold]" if best else text for text, best in texts))
    return drawn


def markdown(table: Table) -> str:
    def escaped(text: str) -> str:
        return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))

    def line(texts: Sequence[str]) -> str:
        return f"| {' | '.join(texts)} |"

    body = [[f"**{escaped(c.text)}**" if c.best else escaped(c.text) for c in row] for row in table.rows]
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    lines = [line(table.columns), line(rule), *map(line, body)]
    return "\n".join([f"### {escaped(table.title)}", "", *lines, "", *map(escaped, table.notes), ""])


def csv(tables: Sequence[Table]) -> str:
    """All tables in one sheet, numbers unrounded; each row carries its table and the caption of that table."""
    stream = io.StringIO()
    writer = csv_format.writer(stream, lineterminator="\n")
    measured = COLUMNS[1:-1]
    writer.writerow(
        ["table", "method", *(f"{name}{part}" for name in measured for part in ("", " sd")), "seeds", "notes"]
    )
    for table in tables:
        for label, *numbers, seeds in table.rows:
            values = [value for cell in numbers for value in (cell.mean, cell.sd)]
            writer.writerow([table.title, label.text, *values, seeds.text, " ".join(table.notes)])
    return stream.getvalue()


def latex(table: Table) -> str:
    """A `table` environment; needs the package booktabs."""

    def escaped(text: str) -> str:
        return "".join(LATEX.get(mark, mark) for mark in text)

    body = [
        " & ".join(f"\\textbf{{{escaped(c.text)}}}" if c.best else escaped(c.text) for c in row) for row in table.rows
    ]
    return "\n".join(
        [
            r"\begin{table}",
            f"\\caption{{{escaped(' '.join((table.title + ':', *table.notes)))}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            rf"\toprule {' & '.join(map(escaped, table.columns))} \\ \midrule",
            *(rf"{line} \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _row(label: str, runs: Sequence[RunResult]) -> tuple[Cell, ...]:
    evaluations = [run.evaluation for run in runs]
    shares = [Cell("", *mean_sd(100 * e[key] for e in evaluations)) for key in ("sa", "ra_pgd", "ra_tail_30")]
    worst = dict.fromkeys(e["worst_class"]["name"] for e in evaluations)
    return (
        Cell(label),
        *shares,
        Cell(" / ".join(worst), *mean_sd(100 * e["worst_class"]["ra_pgd"] for e in evaluations)),
        Cell("", *mean_sd(run.seconds for run in runs), digits=0),
        Cell("", len(runs), digits=0),
    )


def _mark(column: Sequence[Cell], lowest: bool) -> Sequence[Cell]:
    """Best is what reads as best: equal to the last printed digit is equal."""
    printed = [round(cell.mean, cell.digits) for cell in column if cell.mean is not None and not math.isnan(cell.mean)]
    if len(set(printed)) < 2:
        return column
    best = min(printed) if lowest else max(printed)
    return [replace(cell, best=cell.mean is not None and round(cell.mean, cell.digits) == best) for cell in column]

"""The forms of a table: terminal, Markdown, CSV and LaTeX. What comes from data is escaped in each."""

import csv as csv_format
import io
import re
from collections.abc import Sequence
from dataclasses import replace

import rich.console
import rich.markup
import rich.table

from doubly.report.tables import Cell, Table
from doubly.rundir import printable

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would compute what begins so
LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "ε": r"$\varepsilon$",
    "ℓ": r"$\ell$",
    "∞": r"$_\infty$",
    "\n": " ",
}


def show(tables: Sequence[Table], console: rich.console.Console) -> None:
    """As much as there is room for: without costs, and without tables whose settings stand in tables of their own."""
    for table in tables:
        shown = table if _width(table) <= console.width else _without_optional(table)
        if len(shown.groups) == 1 or _width(shown) <= console.width:
            console.print(terminal(shown))


def _width(table: Table) -> int:
    words = [max(map(len, column.title.split())) for column in table.columns]
    cells = [max((len(row[place].text) for row in table.rows), default=0) for place in range(len(words))]
    return 1 + sum(3 + max(pair) for pair in zip(words, cells, strict=True))


def _without_optional(table: Table) -> Table:
    kept = [place for place, column in enumerate(table.columns) if not column.optional]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)


def terminal(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(title=_plain(table.title), caption=_plain(" ".join(table.notes)))
    for index, column in enumerate(table.columns):
        drawn.add_column(_plain(column.title), justify="right" if index else "left", no_wrap=not index)
    for row in table.rows:
        texts = [(_plain(cell.text), cell.best) for cell in row]
        drawn.add_row(*(f"[bold]{text}[/bold]" if best else text for text, best in texts))
    return drawn


def _plain(text: str) -> str:
    """Neither rich's markup, nor anything that steers a terminal."""
    return rich.markup.escape(printable(text))


def markdown(table: Table) -> str:
    def line(texts: Sequence[str]) -> str:
        return f"| {' | '.join(texts)} |"

    body = [[f"**{escaped(c.text)}**" if c.best else escaped(c.text) for c in row] for row in table.rows]
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    lines = [line([escaped(column.title) for column in table.columns]), line(rule), *map(line, body)]
    return "\n".join([f"### {escaped(table.title)}", "", *lines, "", *map(escaped, table.notes), ""])


def escaped(text: str) -> str:
    """For Markdown."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))


def csv(tables: Sequence[Table]) -> str:
    """All tables in one sheet, numbers unrounded; each row carries its table and the caption of that table."""
    rows = [
        {
            "table": table.title,
            **{
                name: value
                for column, cell in zip(table.columns, row, strict=True)
                for name, value in _values(column.title, cell)
            },
            "notes": " ".join(table.notes),
        }
        for table in tables
        for row in table.rows
    ]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "notes"]
    stream = io.StringIO()
    writer = csv_format.DictWriter(stream, [*names, "notes"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _values(name: str, cell: Cell) -> list[tuple[str, object]]:
    label = f"'{cell.label}" if cell.label.startswith(FORMULA) else cell.label
    if cell.mean is None:
        return [(name, label)]
    remark = [(f"{name} of", label)] if label else []
    return [(name, cell.mean), (f"{name} sd", cell.sd), *remark]


def latex(table: Table) -> str:
    """A `table` environment; needs the package booktabs."""

    def text(words: str) -> str:
        return "".join(LATEX.get(mark, mark) for mark in words)

    body = [" & ".join(f"\\textbf{{{text(c.text)}}}" if c.best else text(c.text) for c in row) for row in table.rows]
    groups = [f"\\multicolumn{{{count}}}{{c}}{{{text(name)}}}" for name, count in table.groups]
    return "\n".join(
        [
            r"\begin{table}",
            f"\\caption{{{text(' '.join((table.title + ':', *table.notes)))}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            *([rf"{' & '.join(groups)} \\"] if len(groups) > 1 else []),
            rf"{' & '.join(text(column.name) for column in table.columns)} \\ \midrule",
            *(rf"{line} \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )

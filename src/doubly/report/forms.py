"""The output formats of a table: terminal, Markdown, CSV and LaTeX. Text from data is escaped in each."""

import csv as csv_format
import io
from collections.abc import Sequence
from dataclasses import replace

import rich.console
import rich.table

from doubly.report.tables import Cell, Table
from doubly.text import escape_csv, escape_latex, escape_markdown, escape_terminal


def show(tables: Sequence[Table], console: rich.console.Console) -> None:
    """Print the tables as far as the console is wide enough.

    A table that is too wide loses its optional columns. If it is still too wide and has several settings side by side,
    it is left out, since each setting has a table of its own as well.
    """
    for table in tables:
        fitting = table if _width(table) <= console.width else _without_optional(table)
        if len(fitting.groups) == 1 or _width(fitting) <= console.width:
            console.print(terminal(fitting))


def terminal(table: Table) -> rich.table.Table:
    """Return the table for the terminal."""
    drawn = rich.table.Table(title=escape_terminal(table.title), caption=escape_terminal(" ".join(table.notes)))
    for index, column in enumerate(table.columns):
        drawn.add_column(escape_terminal(column.title), justify="right" if index else "left", no_wrap=not index)
    for row in table.rows:
        texts = [(escape_terminal(cell.text), cell.best) for cell in row]
        drawn.add_row(*(f"[bold]{text}[/bold]" if best else text for text, best in texts))
    return drawn


def markdown(table: Table) -> str:
    """Return the table as Markdown with a heading above and a list of the notes below."""

    def line(texts: Sequence[str]) -> str:
        return f"| {' | '.join(texts)} |"

    def cell_text(cell: Cell) -> str:
        return f"**{escape_markdown(cell.text)}**" if cell.best else escape_markdown(cell.text)

    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    head = line([escape_markdown(column.title) for column in table.columns])
    lines = [head, line(rule), *(line([cell_text(cell) for cell in row]) for row in table.rows)]
    notes = [f"- {escape_markdown(note)}" for note in table.notes]
    return "\n".join([f"### {escape_markdown(table.title)}", "", *lines, "", *notes, ""])


def csv(tables: Sequence[Table]) -> str:
    """Return all tables as one sheet with unrounded numbers; each row carries the title and the notes of its table."""
    rows = [
        {
            "table": escape_csv(table.title),
            **{
                name: value
                for column, cell in zip(table.columns, row, strict=True)
                for name, value in _values(escape_csv(column.title), cell)
            },
            "notes": escape_csv(" ".join(table.notes)),
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


def latex(table: Table) -> str:
    """Return a `table` environment, which needs the package booktabs."""

    def cell_text(cell: Cell) -> str:
        return f"\\textbf{{{escape_latex(cell.text)}}}" if cell.best else escape_latex(cell.text)

    body = [" & ".join(map(cell_text, row)) for row in table.rows]
    groups = [f"\\multicolumn{{{count}}}{{c}}{{{escape_latex(name)}}}" for name, count in table.groups]
    return "\n".join(
        [
            r"\begin{table}",
            f"\\caption{{{escape_latex(' '.join((table.title + ':', *table.notes)))}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            *([rf"{' & '.join(groups)} \\"] if len(groups) > 1 else []),
            rf"{' & '.join(escape_latex(column.name) for column in table.columns)} \\ \midrule",
            *(rf"{line} \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _width(table: Table) -> int:
    """Return the number of characters that the table needs in a row of the terminal."""
    words = [max(map(len, column.title.split()), default=0) for column in table.columns]
    cells = [max((len(row[index].text) for row in table.rows), default=0) for index in range(len(words))]
    return 1 + sum(3 + max(pair) for pair in zip(words, cells, strict=True))


def _without_optional(table: Table) -> Table:
    indices = [index for index, column in enumerate(table.columns) if not column.optional]
    rows = tuple(tuple(row[index] for index in indices) for row in table.rows)
    return replace(table, columns=tuple(table.columns[index] for index in indices), rows=rows)


def _values(name: str, cell: Cell) -> list[tuple[str, object]]:
    """Return the fields of a cell: a label alone, or mean, sd and remark."""
    label = escape_csv(cell.label)
    if cell.mean is None:
        return [(name, label)]
    remark = [(f"{name} of", label)] if label else []
    return [(name, cell.mean), (f"{name} sd", cell.sd), *remark]

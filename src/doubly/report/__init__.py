"""Reads run directories; writes tables, figures and one page. Never imports torch."""

import re
from collections.abc import Iterable
from pathlib import Path

from doubly.report import figures, forms, tables
from doubly.report.collect import Comparison, RunResult, collect, compare
from doubly.report.html import Overview, Section, render
from doubly.report.pictures import of_overview, of_section

__all__ = ["Comparison", "RunResult", "collect", "compare", "figures", "forms", "tables", "tables_of", "write_report"]


def tables_of(paths: Iterable[Path | str]) -> list[tables.Table]:
    """The paper's layouts first, then each setting with its costs."""
    comparisons = compare(collect(paths))
    beside = [tables.side_by_side(title, sides) for title, sides in tables.layouts(comparisons).items()]
    return [*beside, *map(tables.table, comparisons)]


def write_report(paths: Iterable[Path | str], output: Path | str) -> Path:
    """report.html, table.md, table.csv, table.tex and figures/ in `output`; returns the page."""
    comparisons = compare(collect(paths))
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    drawn = output / "figures"
    beside = [
        Overview(tables.side_by_side(title, sides), of_overview(sides, drawn / _file_name(title)))
        for title, sides in tables.layouts(comparisons).items()
    ]
    sections = [
        Section(comparison, tables.table(comparison), of_section(comparison, drawn / name))
        for comparison, name in zip(comparisons, _names(comparisons), strict=True)
    ]
    made = [*(part.table for part in beside), *(section.table for section in sections)]
    page = output / "report.html"
    for path, text in (
        (output / "table.md", "\n".join(map(forms.markdown, made))),
        (output / "table.csv", forms.csv(made)),
        (output / "table.tex", "\n".join(map(forms.latex, made))),
        (page, render(sections, beside)),
    ):
        path.write_text(text, encoding="utf-8")
    return page


def _names(comparisons: list[Comparison]) -> list[str]:
    """A file name per comparison: its setting, numbered where one setting was measured in several ways."""
    names: list[str] = []
    for comparison in comparisons:
        name = _file_name(comparison.setting)
        earlier = sum(name == re.sub(r"-\d+$", "", taken) for taken in names)
        names.append(f"{name}-{earlier + 1}" if earlier else name)
    return names


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)

"""Reads run directories; writes tables, figures and one page. Never imports torch."""

import re
from collections.abc import Iterable
from pathlib import Path

from doubly.report import figures, forms, tables
from doubly.report.collect import Comparison, RunResult, collect, compare
from doubly.report.html import Picture, Section, render

__all__ = ["Comparison", "RunResult", "collect", "compare", "figures", "forms", "tables", "tables_of", "write_report"]


def tables_of(paths: Iterable[Path | str]) -> list[tables.Table]:
    """The paper's layouts first, then each setting with its costs."""
    comparisons = compare(collect(paths))
    return [*tables.paper_tables(comparisons), *map(tables.table, comparisons)]


def write_report(paths: Iterable[Path | str], output: Path | str) -> Path:
    """report.html, table.md, table.csv, table.tex and figures/ in `output`; returns the page."""
    comparisons = compare(collect(paths))
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    sections = [
        _section(c, output / "figures" / name) for c, name in zip(comparisons, _names(comparisons), strict=True)
    ]
    overview = tables.paper_tables(comparisons)
    made = [*overview, *(section.table for section in sections)]
    page = output / "report.html"
    for path, text in (
        (output / "table.md", "\n".join(map(forms.markdown, made))),
        (output / "table.csv", forms.csv(made)),
        (output / "table.tex", "\n".join(map(forms.latex, made))),
        (page, render(sections, overview)),
    ):
        path.write_text(text, encoding="utf-8")
    return page


def _section(comparison: Comparison, stem: Path) -> Section:
    per_class, curves = stem.with_name(f"{stem.name}-per_class"), stem.with_name(f"{stem.name}-curves")
    figures.per_class(comparison.methods, per_class)
    figures.learning_curves(comparison.methods, curves)
    drawn = [
        Picture("Robust accuracy of each class", "Bars for each method.", per_class.with_name(f"{per_class.name}.svg")),
        Picture("Training", "Curves over the epochs.", curves.with_name(f"{curves.name}.svg")),
    ]
    return Section(comparison, tables.table(comparison), drawn)


def _names(comparisons: list[Comparison]) -> list[str]:
    """A file name per comparison: its setting, numbered where one setting was measured in several ways."""
    names: list[str] = []
    for comparison in comparisons:
        name = re.sub(r"[^\w.-]", "_", comparison.setting)
        earlier = sum(name == re.sub(r"-\d+$", "", taken) for taken in names)
        names.append(f"{name}-{earlier + 1}" if earlier else name)
    return names

"""Reads run directories; writes tables, figures and one page. Never imports torch."""

import re
from collections.abc import Iterable
from pathlib import Path

from doubly.report import figures, tables
from doubly.report.collect import Comparison, RunResult, collect, compare
from doubly.report.html import Section, render

__all__ = ["Comparison", "RunResult", "collect", "compare", "figures", "tables", "write_report"]


def write_report(paths: Iterable[Path | str], output: Path | str) -> Path:
    """report.html, table.md, table.csv, table.tex and figures/ in `output`; returns the page."""
    comparisons = compare(collect(paths))
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    sections = [
        _section(c, output / "figures" / name) for c, name in zip(comparisons, _names(comparisons), strict=True)
    ]
    made = [section.table for section in sections]
    page = output / "report.html"
    for path, text in (
        (output / "table.md", "\n".join(map(tables.markdown, made))),
        (output / "table.csv", tables.csv(made)),
        (output / "table.tex", "\n".join(map(tables.latex, made))),
        (page, render(sections)),
    ):
        path.write_text(text, encoding="utf-8")
    return page


def _section(comparison: Comparison, stem: Path) -> Section:
    per_class, curves = stem.with_name(f"{stem.name}-per_class"), stem.with_name(f"{stem.name}-curves")
    drawn = [
        path.with_name(f"{path.name}.svg") if draw(comparison.methods, path) else None
        for draw, path in ((figures.per_class, per_class), (figures.learning_curves, curves))
    ]
    return Section(comparison, tables.table(comparison), *drawn)


def _names(comparisons: list[Comparison]) -> list[str]:
    """A file name per comparison: its setting, numbered where one setting was measured in several ways."""
    names: list[str] = []
    for comparison in comparisons:
        name = re.sub(r"[^\w.-]", "_", comparison.setting)
        earlier = sum(name == re.sub(r"-\d+$", "", taken) for taken in names)
        names.append(f"{name}-{earlier + 1}" if earlier else name)
    return names

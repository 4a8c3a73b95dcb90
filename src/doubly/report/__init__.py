"""Reads run directories; writes tables, figures and one page. Never imports torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from doubly.report import figures, forms, tables
from doubly.report.collect import Comparison, collect, compare
from doubly.report.html import Overview, Section, render
from doubly.report.pictures import of_overview, of_section
from doubly.report.run_result import RunResult

__all__ = ["Comparison", "Report", "RunResult", "collect", "compare", "figures", "forms", "tables", "write_report"]


@dataclass(frozen=True)
class Report:
    """What a set of runs says together."""

    comparisons: list[Comparison]

    @staticmethod
    def of(paths: Iterable[Path | str]) -> "Report":
        return Report(compare(collect(paths)))

    @cached_property
    def layouts(self) -> dict[str, dict[str, Comparison]]:
        return tables.layouts(self.comparisons)

    @cached_property
    def tables(self) -> list[tables.Table]:
        """The paper's layouts first, then each setting with its costs."""
        beside = [tables.side_by_side(title, sides) for title, sides in self.layouts.items()]
        return [*beside, *map(tables.table, self.comparisons)]

    def write(self, output: Path | str) -> Path:
        """report.html, table.md, table.csv, table.tex and figures/ in `output`; returns the page."""
        output = Path(output)
        page, drawn = output / "report.html", output / "figures"
        if page.exists():  # an earlier report's pictures are not of these runs
            for old in (*drawn.glob("*.png"), *drawn.glob("*.svg")):
                old.unlink()
        output.mkdir(parents=True, exist_ok=True)
        count = len(self.layouts)
        beside = [
            Overview(table, of_overview(sides, drawn / _file_name(title)))
            for table, (title, sides) in zip(self.tables, self.layouts.items(), strict=False)
        ]
        sections = [
            Section(comparison, table, of_section(comparison, drawn / name))
            for comparison, table, name in zip(self.comparisons, self.tables[count:], self._names(), strict=True)
        ]
        for path, text in (
            (output / "table.md", "\n".join(map(forms.markdown, self.tables))),
            (output / "table.csv", forms.csv(self.tables)),
            (output / "table.tex", "\n".join(map(forms.latex, self.tables))),
            (page, render(sections, beside)),
        ):
            path.write_text(text, encoding="utf-8", errors="replace")  # half a character, from a file name
        return page

    def _names(self) -> list[str]:
        """A file name per comparison: its setting, numbered where another one has it."""
        names: list[str] = []
        for comparison in self.comparisons:
            name, number = _file_name(comparison.setting), 1
            while (numbered := name if number == 1 else f"{name}-{number}") in names:
                number += 1
            names.append(numbered)
        return names


def write_report(paths: Iterable[Path | str], output: Path | str) -> Path:
    """The tables, the figures and the page of these runs in `output`; returns the page."""
    return Report.of(paths).write(output)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)

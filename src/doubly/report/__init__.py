"""Reports: read run directories; write tables, figures and one page. Never imports torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from doubly.files import make_folder, remove_leftovers, write_text
from doubly.report import figures, forms, tables
from doubly.report.collect import Comparison, collect, compare
from doubly.report.html import Overview, Section, render
from doubly.report.next_steps import Step
from doubly.report.pictures import overview_pictures, section_pictures
from doubly.report.run_result import RunResult
from doubly.text import file_name

__all__ = ["Comparison", "Report", "RunResult", "collect", "compare", "figures", "forms", "tables", "write_report"]


@dataclass(frozen=True)
class Report:
    """The tables, figures and page of a set of runs."""

    comparisons: list[Comparison]

    @staticmethod
    def of(paths: Iterable[Path | str]) -> "Report":
        """Read run directories, or folders of run directories.

        Raises:
            UsageError: If there is no run, or one cannot be read.
        """
        return Report(compare(collect(paths)))

    @cached_property
    def layouts(self) -> dict[str, dict[str, Comparison]]:
        """Settings that stand side by side, as title -> name of the columns -> comparison."""
        return tables.layouts(self.comparisons)

    @cached_property
    def tables(self) -> list[tables.Table]:
        """The tables of settings side by side, then one table with costs for each setting."""
        combined = [tables.side_by_side(title, sides) for title, sides in self.layouts.items()]
        return [*combined, *map(tables.table, self.comparisons)]

    def write(self, output: Path | str, steps: Sequence[Step] = ()) -> Path:
        """Write report.html, table.md, table.csv, table.tex and figures/ into a folder.

        Args:
            output: The folder. Figures of an earlier report in it are deleted.
            steps: What to do next; by default what the files of the runs say.

        Returns:
            The path of report.html.
        """
        output = Path(output)
        page, figures_dir = output / "report.html", output / "figures"
        earlier = {path: path.stat().st_ino for end in ("png", "svg") for path in figures_dir.glob(f"*.{end}")}
        earlier = earlier if page.exists() else {}
        make_folder(output)
        for folder in (output, figures_dir):
            remove_leftovers(folder)
        count = len(self.layouts)
        overview = [
            Overview(table, overview_pictures(sides, figures_dir / _file_name(title)))
            for table, (title, sides) in zip(self.tables, self.layouts.items(), strict=False)
        ]
        sections = [
            Section(comparison, table, section_pictures(comparison, figures_dir / name), steps)
            for comparison, table, name in zip(self.comparisons, self.tables[count:], self._names(), strict=True)
        ]
        sheet = forms.csv(self.tables)
        for path, text in (
            (output / "table.md", "\n".join(map(forms.markdown, self.tables))),
            (output / "table.csv", sheet),
            (output / "table.tex", "\n".join(map(forms.latex, self.tables))),
            (page, render(sections, overview, sheet)),
        ):
            write_text(path, text)
        for path, number in earlier.items():  # figures of an earlier report are not of these runs
            if path.exists() and path.stat().st_ino == number:
                path.unlink()
        return page

    def _names(self) -> list[str]:
        """Return a file name for each comparison: its setting, with a number where another one has it already."""
        names: list[str] = []
        for comparison in self.comparisons:
            name, number = _file_name(comparison.setting), 1
            while (numbered := name if number == 1 else f"{name}-{number}") in names:
                number += 1
            names.append(numbered)
        return names


def write_report(paths: Iterable[Path | str], output: Path | str, steps: Sequence[Step] = ()) -> Path:
    """Write the report of run directories into a folder.

    Args:
        paths: Run directories, or folders of run directories.
        output: The folder to write.
        steps: What to do next; by default what the files of the runs say.

    Returns:
        The path of report.html.

    Raises:
        UsageError: If there is no run, or one cannot be read.
    """
    return Report.of(paths).write(output, steps)


def _file_name(text: str) -> str:
    return file_name(text)

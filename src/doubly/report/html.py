"""The page: one self-contained file that opens from a mail attachment. All text from data and configs is escaped."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from doubly.report.collect import Comparison
from doubly.report.figures import INK
from doubly.report.pictures import Picture
from doubly.report.protocol import attack_name, flatten, fraction, show
from doubly.report.run_result import RunResult
from doubly.report.summary import sentence
from doubly.report.tables import Cell, Column, Table, known

RADII = ("radius", "size", "epsilon")  # shown as people type them


@dataclass(frozen=True)
class Overview:
    """Settings side by side."""

    table: Table
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Section:
    """One comparison on the page."""

    comparison: Comparison
    table: Table
    pictures: Sequence[Picture] = ()

    @property
    def summary(self) -> str:
        return sentence(self.comparison)

    @property
    def attack(self) -> str:
        return attack_name(self.comparison.protocol)

    @property
    def classes(self) -> Table:
        """Robust accuracy of each class under each method, weakest on average first."""
        methods = self.comparison.methods
        names = self.comparison.classes
        cells = {label: [_of_class(runs, name) for name in names] for label, runs in methods.items()}
        columns = [Column("class", None), Column("n", None), *(Column(label) for label in methods)]
        images = [self.comparison.runs[0].evaluation["per_class"][name]["n"] for name in names]
        rows = [
            (Cell(name), Cell("", float(count), digits=0), *(column[index] for column in cells.values()))
            for index, (name, count) in enumerate(zip(names, images, strict=True))
        ]
        rows.sort(key=lambda row: sum(cell.mean or 0.0 for cell in row[2:]))
        return Table("Robust accuracy of each class", tuple(columns), tuple(rows))

    @property
    def protocol(self) -> dict[str, str]:
        return {**_shown(self.comparison.protocol), "images": str(self.comparison.n)}

    @property
    def trust(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(run, panel) of every run that was checked, the suspicious ones first."""
        panels = [
            (f"{label}, seed {run.seed}", run.evaluation["trust"])
            for label, runs in self.comparison.methods.items()
            for run in runs
            if run.evaluation.get("trust", {}).get("lines")
        ]
        return sorted(panels, key=lambda pair: pair[1]["verdict"] == "fine")

    @property
    def environment(self) -> dict[str, str]:
        """What the runs say of their machines; where they differ, the first few answers."""
        answers: dict[str, dict[str, None]] = {}
        for run in self.comparison.runs:
            for key, value in flatten(run.environment).items():
                if key != "command":
                    answers.setdefault(key, {})[show(value)] = None
        return {key: " / ".join([*values][:3]) + " / …" * (len(values) > 3) for key, values in answers.items()}

    @property
    def commands(self) -> list[str]:
        """How the runs were trained and measured, each command once."""
        runs = self.comparison.runs
        typed = [
            said for part in ("environment", "evaluation") for r in runs if (said := getattr(r, part).get("command"))
        ]
        folders = dict.fromkeys(str(run.path) for run in runs)
        return [*dict.fromkeys(map(_shell, typed)), shlex.join(["doubly", "report", *folders, "--output", "report"])]


def render(sections: Sequence[Section], overview: Sequence[Overview] = ()) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("doubly.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context: Mapping[str, Any] = {"sections": sections, "overview": overview, "picture": picture}
    return environment.get_template("page.html.j2").render(context)


def picture(path: Path, description: str) -> markupsafe.Markup:
    """The SVG, its text in the color of the page's text. matplotlib has escaped what it contains."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")  # without the XML prologue
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    label = markupsafe.escape(description)
    return markupsafe.Markup(svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))


def _of_class(runs: Sequence[RunResult], name: str) -> Cell:
    values = [run.evaluation["per_class"][name]["ra_pgd"] for run in runs]
    return known([100 * value for value in values if value is not None], 1)


def _shown(protocol: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: fraction(value) if isinstance(value, float) and key.endswith(RADII) else show(value)
        for key, value in flatten(protocol).items()
    }


def _shell(command: str | Sequence[str]) -> str:
    return command if isinstance(command, str) else shlex.join(command)

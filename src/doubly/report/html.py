"""The page: one self-contained file that can be sent by mail. All text from data and configs is escaped."""

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import markupsafe

from doubly.metric_names import METRICS
from doubly.report.collect import BASELINE, Comparison, mean_sd
from doubly.report.examples import Example, examples
from doubly.report.figures import INK
from doubly.report.frontier import MAX_LOSS, as_trained, compare_frontiers, frontiers_of
from doubly.report.next_steps import Step, next_steps
from doubly.report.pictures import Picture, example_run
from doubly.report.protocol import attack_name, describe, flatten
from doubly.report.run_result import RunResult
from doubly.report.summary import Headline, average_key, headline, summary_sentence
from doubly.report.tables import COSTS, Cell, Column, Table, mean_cell, other_attack_metrics
from doubly.report.templates import load_template
from doubly.report.terms import TERMS
from doubly.text import escape_html, format_radius, format_value

RADII = ("radius", "size", "epsilon")  # ends of names of settings that are printed as 8/255
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_ENVIRONMENTS = 3  # different values of a setting of the machine that are listed


@dataclass(frozen=True)
class Overview:
    """Settings side by side."""

    table: Table
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Section:
    """One comparison on the page; the properties are what the template shows."""

    comparison: Comparison
    table: Table
    pictures: Sequence[Picture] = ()

    steps: Sequence[Step] = ()
    """what to do next; empty: what the files of the runs say"""

    @property
    def headline(self) -> Headline:
        """Tail and average of the best method."""
        return headline(self.comparison)

    @property
    def summary(self) -> str:
        """The main result in a sentence."""
        return summary_sentence(self.comparison)

    @property
    def next_steps(self) -> Sequence[Step]:
        """Commands that are worth running next."""
        return self.steps or next_steps(self.comparison)

    @property
    def examples(self) -> list[Example]:
        """Images before and after the attack."""
        return examples(self.example_run)

    @property
    def example_run(self) -> RunResult:
        """The run whose single images are shown."""
        return example_run(self.comparison)

    @property
    def attack(self) -> str:
        """The attack with its ball, in words."""
        return describe(self.comparison.protocol).split(" (")[0]

    @property
    def explanations(self) -> dict[str, str]:
        """The explanation of each column of the table."""
        columns = [column.name for column in (self.table if self.costs else self.table.without_costs).columns]
        metrics = [*METRICS.values(), *other_attack_metrics(self.comparison)]
        explanations = {metric.label: metric.explanation for metric in metrics} | COSTS
        return {name: explanations[name] for name in columns if name in explanations}

    @property
    def costs(self) -> Table | None:
        """What training took; None where no run says, as for networks that were trained elsewhere."""
        costs = self.table.costs
        return costs if any(cell.text != "-" for row in costs.rows for cell in row[1:]) else None

    @property
    def classes(self) -> Table:
        """Robust accuracy of each class under the attack of the headline, weakest on average first."""
        methods, key = self.comparison.methods, average_key(self.comparison)
        if any(key not in entry for run in self.comparison.runs for entry in run.evaluation["per_class"].values()):
            key = "ra_pgd"  # older files have no other attack here
        names = self.comparison.classes
        cells = {label: [_class_cell(runs, name, key) for name in names] for label, runs in methods.items()}
        columns = [Column("class", None), Column("n", None), *(Column(label) for label in methods)]
        images = [self.comparison.runs[0].evaluation["per_class"][name]["n"] for name in names]
        rows = [
            (Cell(name), Cell("", float(count), digits=0), *(column[index] for column in cells.values()))
            for index, (name, count) in enumerate(zip(names, images, strict=True))
        ]
        rows.sort(key=lambda row: sum(cell.mean or 0.0 for cell in row[2:]))
        attack = attack_name(self.comparison.protocol) if key == "ra_pgd" else "the strong attack"
        return Table(f"Robust accuracy of each class under {attack}", tuple(columns), tuple(rows))

    @property
    def frontiers(self) -> Table | None:
        """Methods compared by their whole frontiers of average against tail; None if no run has one."""
        frontiers = frontiers_of(self.comparison.methods)
        if not frontiers:
            return None
        label = BASELINE if BASELINE in frontiers else next(iter(frontiers))
        firsts, rows = frontiers[label], []
        lowest = mean_sd(as_trained(one) for one in firsts)[0] - MAX_LOSS
        for name, group in frontiers.items():
            baselines = firsts if len(group) == len(firsts) else [firsts[0]] * len(group)  # seed by seed
            compared = [compare_frontiers(pair)[1] for pair in zip(baselines, group, strict=True)]
            values = [[100 * as_trained(one) for one in group]]
            values += [
                _defined(compared, key, factor) for key, factor in (("tail_at_average", 100), ("area_above_first", 1e4))
            ]
            rows.append((Cell(name), *(mean_cell(numbers, 1) for numbers in values)))
        columns = (
            Column("method", None),
            Column("average as trained"),
            Column(f"tail at an average of at least {100 * lowest:.1f}"),
            Column(f"area above {label}"),
        )
        return Table("Average against tail along class offsets", columns, tuple(rows))

    @property
    def protocol(self) -> dict[str, str]:
        """All settings of the evaluation."""
        settings = {
            key: format_radius(value) if isinstance(value, float) and key.endswith(RADII) else format_value(value)
            for key, value in flatten(self.comparison.protocol).items()
        }
        return {**settings, "images": str(self.comparison.n)}

    @property
    def trust(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Name and checks of every run that was checked, suspicious runs first."""
        panels = [
            (f"{label}, seed {run.seed}", run.evaluation["trust"])
            for label, runs in self.comparison.methods.items()
            for run in runs
            if run.evaluation.get("trust", {}).get("lines")
        ]
        return sorted(panels, key=lambda pair: pair[1]["verdict"] == "fine")

    @property
    def environment(self) -> dict[str, str]:
        """The machines of the runs; where they differ, the first few values of a setting."""
        settings: dict[str, dict[str, None]] = {}
        for run in self.comparison.runs:
            for key, value in flatten(run.environment).items():
                if key != "command":
                    settings.setdefault(key, {})[format_value(value)] = None
        return {
            key: " / ".join([*values][:MAX_ENVIRONMENTS]) + " / …" * (len(values) > MAX_ENVIRONMENTS)
            for key, values in settings.items()
        }

    @property
    def commands(self) -> list[str]:
        """The commands that trained and evaluated the runs and make this report, each once."""
        runs = self.comparison.runs
        records = [*(run.environment for run in runs), *(run.evaluation for run in runs)]
        typed = [command for record in records if (command := record.get("command"))]
        folders = dict.fromkeys(str(run.path) for run in runs)
        return [*dict.fromkeys(map(_shell, typed)), shlex.join(["doubly", "report", *folders, "--output", "report"])]


def render(sections: Sequence[Section], overview: Sequence[Overview] = (), csv: str = "") -> str:
    """Return the page as HTML.

    Args:
        sections: One for each comparison.
        overview: Settings side by side.
        csv: All tables as one sheet, which the page offers for download.
    """
    columns = {name: text for section in sections for name, text in section.explanations.items()}
    context: Mapping[str, Any] = {
        "sections": sections,
        "overview": overview,
        "picture": inline_picture,
        "terms": TERMS | columns,
        "csv": base64.b64encode(csv.encode("utf-8", errors="replace")).decode("ascii"),
    }
    page = load_template("page.html.j2").render(context)
    return _CONTROL.sub("?", page)  # jinja escapes markup, and leaves control characters of names as they are


def inline_picture(path: Path, description: str) -> markupsafe.Markup:
    """Return an SVG file as a part of the page, its text in the text color of the page.

    matplotlib has escaped the text inside the SVG.
    """
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")  # without the XML prologue
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    label = escape_html(description)
    return markupsafe.Markup(svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))  # noqa: S704 - label is escaped


def _defined(rows: Sequence[Mapping[str, Any]], key: str, factor: float) -> list[float]:
    return [factor * row[key] for row in rows if row[key] is not None]


def _class_cell(runs: Sequence[RunResult], name: str, key: str) -> Cell:
    values = [run.evaluation["per_class"][name][key] for run in runs]
    return mean_cell([100 * value for value in values if value is not None], 1)


def _shell(command: str | Sequence[str]) -> str:
    return shlex.join(map(str, command)) if isinstance(command, list) else str(command)

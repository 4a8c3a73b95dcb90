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
from doubly.report.protocol import attack_name, flatten, show
from doubly.report.summary import sentence
from doubly.report.tables import Table


@dataclass(frozen=True)
class Section:
    """One comparison on the page, with its pictures as SVG files; None where the runs do not hold one."""

    comparison: Comparison
    table: Table
    per_class: Path | None
    curves: Path | None

    @property
    def summary(self) -> str:
        return sentence(self.comparison)

    @property
    def attack(self) -> str:
        return attack_name(self.comparison.protocol)

    @property
    def protocol(self) -> dict[str, str]:
        shown = {key: show(value) for key, value in flatten(self.comparison.protocol).items()}
        return {**shown, "images": str(self.comparison.n)}

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
        return [_shell(run.environment["command"]) for run in self.comparison.runs if run.environment.get("command")]


def render(sections: Sequence[Section]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("doubly.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context: Mapping[str, Any] = {"sections": sections, "picture": picture}
    return environment.get_template("page.html.j2").render(context)


def picture(path: Path, description: str) -> markupsafe.Markup:
    """The SVG, its text in the colour of the page's text. matplotlib has escaped what it contains."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")  # without the XML prologue
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    label = markupsafe.escape(description)
    return markupsafe.Markup(svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))


def _shell(command: str | Sequence[str]) -> str:
    return command if isinstance(command, str) else shlex.join(command)

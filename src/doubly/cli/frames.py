"""What metrics.jsonl says of runs, drawn for the terminal. Names come from data, and are never read as markup."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from doubly.cli.curves import Point, bar, curve
from doubly.cli.tables import duration
from doubly.rundir import Row, RunDir, printable, read_metrics, read_tree

NARROW, WIDE = 40, 200  # columns that a frame is drawn for
MOST_CLASSES, MOST_ALARMS = 10, 3
LABEL = 17  # columns for the name of a curve


@dataclass(frozen=True)
class Measure:
    """What a curve shows: a field of a row, or of its validation."""

    label: str
    key: str
    color: str
    validation: bool = False
    lowest: bool = False  # marked, instead of the highest
    form: str = ".3g"

    def points(self, rows: Iterable[Row]) -> list[Point]:
        """(epoch, value); accuracies in percent."""
        scale = 100 if self.validation else 1
        found = [
            (epoch, _number(_part(row, "validation") if self.validation else row, self.key))
            for epoch, row in enumerate(rows)
        ]
        return [(epoch, scale * value) for epoch, value in found if value is not None]

    def text(self, points: list[Point]) -> str:
        """first → last, and the lowest or highest"""
        values = [value for _, value in points]
        marked = f"▼{min(values):{self.form}}" if self.lowest else f"▲{max(values):{self.form}}"
        return f"{values[0]:{self.form}} → {values[-1]:{self.form}}{' %' * self.validation} {marked}"


MEASURES = (
    Measure("training loss", "loss", "yellow", lowest=True),
    Measure("learning rate", "lr", "bright_black", form=".2g"),
    Measure("SA", "sa", "blue", validation=True, form=".1f"),
    Measure("RA-PGD", "ra_pgd", "cyan", validation=True, form=".1f"),
    Measure("RA-Tail-30", "ra_tail_30", "magenta", validation=True, form=".1f"),
    Measure("eff. sample size", "weight_ess", "green", lowest=True, form=".2f"),
)


@dataclass(frozen=True)
class Watched:
    """A run as far as it has come."""

    path: Path
    config: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> "Watched":
        return cls(path, read_tree(RunDir(path).config), read_metrics(RunDir(path).metrics))

    @property
    def epochs(self) -> int | None:
        found = _number(self.config, "epochs")
        return None if found is None else int(found)

    @property
    def complete(self) -> bool:
        return self.epochs is not None and len(self.rows) >= self.epochs


def frame(runs: list[Watched], width: int, height: int | None = None) -> Group:
    """One run at large, several in a few lines each; `height` lines are there, if it matters."""
    width = max(NARROW, min(WIDE, width))
    if len(runs) == 1:
        return _large(runs[0], width, height)
    blocks: list[RenderableType] = [part for run in runs for part in (*_small(run, width), Text())]
    return Group(*blocks, _legend())


def _large(run: Watched, width: int, height: int | None) -> Group:
    head, ends = _header(run, width), [_legend(), *_alarms(run.rows, MOST_ALARMS)]
    curves = [(measure, points) for measure in MEASURES if (points := measure.points(run.rows))]
    if not curves:
        return Group(*head)
    abreast = 1 if width < 76 else 2 if width < 120 else 3
    lines = 3 if height is None or height >= 32 else 2
    taken = (lines + 1) * -(-len(curves) // abreast) + sum(-(-len(part) // width) for part in (*head, *ends)) + 3
    classes = MOST_CLASSES if height is None else max(3, min(MOST_CLASSES, height - taken))
    grid, each = Table.grid(padding=(0, 2, 0, 0)), (width - 2 * (abreast - 1)) // abreast
    panels = [_panel(measure, points, len(run.rows), each, lines) for measure, points in curves]
    for start in range(0, len(panels), abreast):
        grid.add_row(*panels[start : start + abreast])
    return Group(*head, Text(), grid, *_classes(run.rows, width, classes), *ends)


def _small(run: Watched, width: int) -> list[Text]:
    """A line for each curve."""
    lines, last = _header(run, width), len(run.rows) - 1
    for measure in MEASURES:
        if points := measure.points(run.rows):
            text, room = measure.text(points), min(60, width - LABEL - 30)
            if room < 10:
                text, room = text.rpartition(" ")[0], width - LABEL - 16
            line = Text(set_cell_size(measure.label, LABEL)).append(curve(points, last, room, 1)[0], measure.color)
            line.append(f" {text}").truncate(width)
            lines.append(line)
    weakest = [f"{name} {100 * value:.0f} %" for name, value in _weakest(run.rows)[1][:3]]
    if weakest:
        lines.append(Text(set_cell_size("weakest classes", LABEL) + ", ".join(weakest)))
        lines[-1].truncate(width, overflow="ellipsis")
    return [*lines, *_alarms(run.rows, 1)]


def _header(run: Watched, width: int) -> list[Text]:
    name, seed = printable(run.config.get("name", run.path.name)), printable(run.config.get("seed", "?"))
    title = Text(name, "bold").append(f", seed {seed}", "not bold")
    if run.path.name != f"{name}-s{seed}":
        title.append(f" in {printable(run.path.name)}", "not bold dim")
    done, epochs = len(run.rows), run.epochs
    if not done:
        return [title, Text("waiting for the first epoch", "dim")]
    if not epochs:
        return [title, Text(f"epoch {done}")]
    text = f"epoch {done} of {epochs}, {_time_left(run.rows, epochs)}"
    room = min(40, width - len(text) - 1)
    if room < 5:
        return [title, Text(text)]
    filled = round(room * min(1.0, done / epochs))
    line = Text("━" * filled, "green" if run.complete else "cyan").append("─" * (room - filled), "bright_black")
    return [title, line.append(f" {text}", "default")]


def _time_left(rows: list[Row], epochs: int) -> str:
    """By the median epoch: the first, which compiles, and those of a busy hour mislead less."""
    seconds = [value for row in rows if (value := _number(row, "seconds")) is not None]
    if len(rows) >= epochs:
        return f"done in {duration(sum(seconds))}"
    return f"about {duration((epochs - len(rows)) * statistics.median(seconds))} left" if seconds else "going on"


def _panel(measure: Measure, points: list[Point], epochs: int, width: int, lines: int) -> Text:
    values = measure.text(points)
    panel = Text(set_cell_size(measure.label, max(1, width - len(values) - 1)) + " ", "bold").append(values, "not bold")
    for line in curve(points, epochs - 1, width, lines):
        panel.append(f"\n{line}", f"not bold {measure.color}")
    return panel


def _weakest(rows: list[Row]) -> tuple[Row, list[tuple[str, float]]]:
    """The latest validation, and the accuracies of its classes under attack, lowest first."""
    validation: Row = next((part for row in reversed(rows) if "per_class" in (part := _part(row, "validation"))), {})
    classes = _part(validation, "per_class")
    found = [(printable(name), value) for name in classes if (value := _number(classes, name)) is not None]
    return validation, sorted(found, key=lambda item: item[1])


def _classes(rows: list[Row], width: int, most: int) -> list[Text]:
    validation, found = _weakest(rows)
    if not found:
        return []
    kind = f", {most} weakest of {len(found):,} classes" if len(found) > most else " of classes, weakest first"
    about = f", {printable(validation.get('on', 'validation'))}, n = {printable(validation.get('n', '?'))}"
    shown = found[:most]
    longest = min(max(cell_len(name) for name, _ in shown), 24, width // 3)
    title = Text(f"RA-PGD{kind}", "bold")
    lines = [Text(), title.append(about if len(title) + len(about) <= width else "", "not bold dim")]
    for name, value in shown:
        label = name if cell_len(name) <= longest else set_cell_size(name, longest - 1) + "…"
        line = Text(f"{set_cell_size(label, longest)} {100 * value:5.1f} % ")
        lines.append(line.append(bar(value, min(60, width - cell_len(line.plain))).rstrip(), "magenta"))
    return lines


def _alarms(rows: list[Row], most: int) -> list[Text]:
    said = [(epoch, text) for epoch, row in enumerate(rows, start=1) for text in _list(row.get("alarms"))]
    earlier = [Text(f"! and {len(said) - most} earlier alarms", "red")] if len(said) > most else []
    return earlier + [Text(f"! epoch {epoch}: {printable(text)}", "red") for epoch, text in said[-most:]]


def _legend() -> Text:
    return Text("first → last, ▼ lowest, ▲ highest so far", "dim")


def _number(row: Row, key: str) -> float | None:
    """A finite number, or nothing: the file may have been written by anybody."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None


def _part(row: Row, key: str) -> Row:
    found = row.get(key)
    return found if isinstance(found, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []

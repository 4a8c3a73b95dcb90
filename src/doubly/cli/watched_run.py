"""A run as far as it has come, as a block for the terminal, read from its files. Names are never read as markup."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from doubly.metric_names import METRICS, Metric, finite_number
from doubly.rundir import Row, RunDir, read_metrics, read_tree
from doubly.text import duration, printable, shorten

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 40  # characters of a sparkline
OTHER_COLUMNS = 58  # characters of the other columns of the table
MAX_CLASSES, MAX_ALARMS = 5, 3


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as a line of at most `width` blocks; a block is the mean of neighboring values."""
    count = min(width, len(values))
    ends = [len(values) * index // count for index in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(ends)]
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[round(7 * (mean - low) / span) if span else 3] for mean in means)


@dataclass(frozen=True)
class WatchedRun:
    """The config of a run and its rows of metrics so far."""

    path: Path
    config: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> "WatchedRun":
        """Read a run directory.

        Raises:
            UsageError: If config.json, or any line of metrics.jsonl but the last, cannot be read.
        """
        return cls(path, read_tree(RunDir(path).config), read_metrics(RunDir(path).metrics))

    @property
    def epochs(self) -> int | None:
        """The number of epochs to train; None if the config does not say."""
        epochs = self.config.get("epochs")
        return epochs if isinstance(epochs, int) else None

    @property
    def complete(self) -> bool:
        """True if every epoch has its row."""
        return self.epochs is not None and len(self.rows) >= self.epochs

    def render(self, width: int) -> Group:
        """Return title, progress, the last alarms, a table of metrics and the weakest classes."""
        return Group(self._title(), self._progress(), *self._alarms(), *self._metrics(width), *self._weakest(), Text())

    def _title(self) -> Text:
        name, seed = printable(self.config.get("name", self.path.name)), printable(self.config.get("seed", "?"))
        title = Text(name, "bold").append(f", seed {seed}", "not bold")
        folder = "" if self.path.name == f"{name}-s{seed}" else f" in {printable(self.path.name)}"
        return title.append(folder, "not bold dim")

    def _progress(self) -> Text:
        done, epochs = len(self.rows), self.epochs
        if not done:
            return Text("waiting for the first epoch", "dim")
        if epochs is None:
            return Text(f"epoch {done}")
        seconds = _values(METRICS["seconds"], self.rows)
        if self.complete:
            return Text(f"epoch {done} of {epochs}, done in {duration(sum(seconds))}", "green")
        # The median: the first epoch, which compiles, and epochs on a busy machine mislead less.
        left = f", about {duration((epochs - done) * statistics.median(seconds))} left" if seconds else ""
        return Text(f"epoch {done} of {epochs}{left}", "cyan")

    def _alarms(self) -> list[Text]:
        alarms = [
            f"! epoch {epoch}: {printable(alarm)}"
            for epoch, row in enumerate(self.rows, start=1)
            for alarm in (row["alarms"] if isinstance(row.get("alarms"), list) else ())
        ]
        earlier = [f"! and {len(alarms) - MAX_ALARMS} earlier alarms"] if len(alarms) > MAX_ALARMS else []
        return [Text(line, "red") for line in (*earlier, *alarms[-MAX_ALARMS:])]

    def _metrics(self, width: int) -> list[Table]:
        table = Table("metric", "", "first → last", "best", box=box.SIMPLE_HEAD, pad_edge=False)
        table.columns[1].no_wrap = True
        sparks = max(5, min(MAX_SPARKS, width - OTHER_COLUMNS))
        for metric in METRICS.values():
            if values := _values(metric, self.rows):
                best = metric.best(values)
                change = f"{metric.text(values[0])} → {metric.text(values[-1])}"
                table.add_row(
                    metric.label, sparkline(values, sparks), change, "" if best is None else metric.text(best)
                )
        return [table] if table.row_count else []

    def _weakest(self) -> list[Text]:
        """Return the classes with the lowest accuracy under attack in the latest validation, as a line."""
        validation = next((part for row in reversed(self.rows) if "per_class" in (part := _validation(row))), {})
        per_class = validation.get("per_class")
        accuracies = per_class.items() if isinstance(per_class, dict) else ()
        classes = [(value, shorten(name)) for name, raw in accuracies if (value := finite_number(raw)) is not None]
        if not classes:
            return []
        names = ", ".join(f"{name} {value:.1%}" for value, name in sorted(classes)[:MAX_CLASSES])
        sample = f"{printable(validation.get('on', 'validation'))}, n = {printable(validation.get('n', '?'))}"
        return [Text(f"weakest of {len(classes):,} classes under PGD: {names} ({sample})")]


def _validation(row: Row) -> Row:
    part = row.get("validation")
    return part if isinstance(part, dict) else {}


def _values(metric: Metric, rows: list[Row]) -> list[float]:
    """Return the values of a metric in the rows and their validations, in the order of the epochs."""
    records = (record for row in rows for record in (row, _validation(row)))
    return [value for record in records if (value := metric.value(record)) is not None]

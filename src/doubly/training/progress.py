"""Progress of training as text: a line per validation and message, and a bar where a terminal shows one. No torch."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from doubly.callbacks import Callback
from doubly.metric_names import METRICS
from doubly.text import duration, printable_lines

WIDTH = 24
SECONDS_BETWEEN_DRAWS = 0.1


def describe_epoch(row: dict[str, Any]) -> str:
    """Return a row of metrics as one line: those of training, then those of the validation if there was one."""
    text = f"epoch {row['epoch'] + 1}: {describe_metrics(row)}"
    if validation := row.get("validation"):
        text += f" | {validation['on']} (n = {validation['n']}): {describe_metrics(validation)}"
    return text


def describe_metrics(record: Mapping[str, Any]) -> str:
    """Return the metrics that a row or a validation holds, each with its label."""
    values = [(metric, metric.value(record)) for metric in METRICS.values()]
    return ", ".join(f"{metric.label} {metric.text(value)}" for metric, value in values if value is not None)


class PrintProgress(Callback):
    """Prints messages, alarms and validations to the standard output, and a bar on terminals and in notebooks."""

    def __init__(self, epochs: int, stream: TextIO | None = None) -> None:
        """Print to a stream.

        Args:
            epochs: Epochs of the run.
            stream: Where to print; the standard output if None.
        """
        self.epochs, self.stream = epochs, stream or sys.stdout
        self.draws_bar = self.stream.isatty() or "ipykernel" in sys.modules
        self.start, self.last_draw, self.first_step = time.monotonic(), 0.0, -1

    def on_message(self, message: str) -> None:
        self._print(message)

    def on_epoch(self, row: dict[str, Any]) -> None:
        if "validation" in row:
            self._print(describe_epoch(row))

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        done, total, now = epoch * steps + step, self.epochs * steps, time.monotonic()
        self.first_step = done - 1 if self.first_step < 0 else self.first_step  # a resumed run begins later
        if not self.draws_bar or (now - self.last_draw < SECONDS_BETWEEN_DRAWS and done < total):
            return
        self.last_draw = now
        left = duration((now - self.start) / (done - self.first_step) * (total - done))
        bar = "=" * (WIDTH * done // total)
        self.stream.write(f"\r[{bar:<{WIDTH}}] epoch {epoch + 1} of {self.epochs}, about {left} left  ")
        self.stream.flush()

    def close(self) -> None:
        if self.last_draw:
            self.stream.write("\n")

    def _print(self, text: str) -> None:
        clear = f"\r{' ' * 79}\r" if self.last_draw else ""
        self.stream.write(f"{clear}{printable_lines(text)}\n")
        self.stream.flush()

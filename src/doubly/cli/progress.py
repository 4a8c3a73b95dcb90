"""Progress of one run or evaluation: bars on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from doubly.callbacks import Callback
from doubly.cli.tables import print_line
from doubly.jobs.progress import bar_columns
from doubly.text import duration
from doubly.training.progress import describe_epoch


class ProgressLines(Callback):
    """Prints a line for each validation, each attack of AutoAttack and each message; for files and pipes."""

    def __init__(self, console: Console) -> None:
        """Print on a console.

        Args:
            console: Where the lines go.
        """
        self.console = console

    def on_message(self, message: str) -> None:
        print_line(self.console, message)

    def on_epoch(self, row: dict[str, Any]) -> None:
        if "validation" in row:
            self.on_message(describe_epoch(row))

    def on_attack(self, chunk: int, chunks: int, part: str, robust: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f", about {duration(seconds_left)} left"
        self.on_message(f"chunk {chunk + 1} of {chunks}, {part}: {robust} robust{left}")


class ProgressBar(ProgressLines):
    """Shows bars below the lines: steps of training, images of PGD, time left of AutoAttack; for terminals."""

    def __init__(self, console: Console, progress: Progress, epochs: int = 0) -> None:
        """Add bars to a rich display when there is something to show.

        Args:
            console: Where the lines go.
            progress: The running display of the same console.
            epochs: Epochs of the training run.
        """
        super().__init__(console)
        self.progress, self.epochs = progress, epochs
        self.tasks: dict[str, TaskID] = {}

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        self.progress.update(self._task("training"), total=self.epochs * steps, completed=epoch * steps + step)

    def on_images(self, done: int, total: int) -> None:
        self.progress.update(self._task("attacking"), total=total, completed=done)

    def on_time_left(self, seconds: float | None) -> None:
        if seconds is not None:
            self.progress.update(self._task("AutoAttack"), description=f"AutoAttack, about {duration(seconds)} left")

    def _task(self, name: str) -> TaskID:
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=None)
        return self.tasks[name]


@contextmanager
def terminal_progress(console: Console, epochs: int = 0, *, bars: bool = True) -> Iterator[ProgressLines]:
    """Choose bars if the console is a terminal, and lines otherwise.

    Args:
        console: Where progress is shown.
        epochs: Epochs of the training run.
        bars: Whether there may be bars; of the processes of torchrun only the first shows them.

    Yields:
        The callback to hand to training or evaluation.
    """
    if not (bars and console.is_terminal):
        yield ProgressLines(console)
        return
    with Progress(*bar_columns(), console=console) as progress:
        yield ProgressBar(console, progress, epochs)

"""What a person sees while a run works: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def describe(row: dict[str, Any]) -> str:
    """One row of metrics in one line."""
    text = f"epoch {row['epoch'] + 1}: loss {row['loss']:.3f}, lr {row['lr']:.3g}"
    if "r" in row:
        text += f", r {row['r']:g}, effective share {row['weight_ess']:.2f}"
    if "validation" in row:
        validation = row["validation"]
        text += (
            f" | {validation['on']} (n={validation['n']}): SA {100 * validation['sa']:.1f}, RA-PGD {100 * validation['ra_pgd']:.1f}, "
            f"RA-Tail-30 {100 * validation['ra_tail_30']:.1f} %"
        )
    return text


class Lines:
    """For files and pipes: a line whenever the validation was measured."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def step(self, epoch: int, step: int, steps: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None:
        if "validation" in row:
            self.say(describe(row))

    def say(self, sentence: str) -> None:
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)


class Bar(Lines):
    def __init__(self, console: Console, progress: Progress, epochs: int) -> None:
        super().__init__(console)
        self.progress, self.epochs = progress, epochs
        self.task = progress.add_task("training", total=None)

    def step(self, epoch: int, step: int, steps: int) -> None:
        self.progress.update(self.task, total=self.epochs * steps, completed=epoch * steps + step)


def bar_columns() -> list[Any]:
    return [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]


@contextmanager
def shown(epochs: int, console: Console) -> Iterator[Lines]:
    """A watch for one run."""
    if not console.is_terminal:
        yield Lines(console)
        return
    with Progress(*bar_columns(), console=console) as progress:
        yield Bar(console, progress, epochs)

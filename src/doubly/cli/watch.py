"""doubly watch. No torch: it starts at once."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.live import Live

from doubly.cli.frames import Watched, frame
from doubly.cli.options import parsed
from doubly.errors import UsageError
from doubly.rundir import runs_in


def watch(arguments: list[str], out: Console) -> int:
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Show the curves of runs until all are complete, or Ctrl-C; the runs do not notice."""

        runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
        """run directories, or folders that contain them"""
        every: int = 2
        """seconds between two looks"""
        once: bool = False
        """show how things stand, and end; as where the output is no terminal"""

    options = parsed(Options, arguments, "watch")
    if not options.runs:
        raise UsageError("name what to watch: doubly watch DIR, a run directory or a folder of runs")
    if options.every < 1:
        raise UsageError(f"every must be at least 1 second, got {options.every}")
    seen = look(options.runs)
    if options.once or not out.is_terminal:
        out.print(frame(seen, out.width))
        return 0
    with Live(console=out, auto_refresh=False) as live:
        while True:
            live.update(frame(seen, out.width, out.height - 1), refresh=True)
            if all(run.complete for run in seen):
                return 0
            time.sleep(options.every)
            seen = look(options.runs)


def look(paths: Iterable[Path]) -> list[Watched]:
    """Every run once, those at work first: a screen may be too small for all."""
    found = {run.resolve(): run for path in paths for run in runs_in(path)}
    return sorted(map(Watched.read, found.values()), key=lambda run: run.complete)

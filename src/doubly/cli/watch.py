"""doubly watch: show the progress of runs. No torch, so that it starts at once."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console, Group
from rich.live import Live

from doubly.cli.options import parse_options
from doubly.cli.watched_run import WatchedRun
from doubly.errors import UsageError
from doubly.rundir import runs_in


@dataclass(frozen=True)
class WatchOptions:
    """Show the metrics of runs until all are complete, or until Ctrl-C. The runs are only read."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR…", help_behavior_hint="")] = ()
    """run directories, folders that contain them, or names of runs in the folder runs, such as digits.at"""
    every: int = 2
    """seconds between two updates"""
    once: bool = False
    """print the current state and end, as happens where the output is not a terminal"""


def watch(arguments: list[str], out: Console, err: Console) -> int:
    """Show the metrics of runs until all are complete."""
    options = parse_options(WatchOptions, arguments, "watch")
    if not options.runs:
        raise UsageError("name the runs to watch: doubly watch DIR, a run directory or a folder of runs")
    if options.every < 1:
        raise UsageError(f"every must be at least 1 second, got {options.every}")
    runs = read_runs(options.runs)
    if options.once or not out.is_terminal:
        out.print(render(runs, out.width))
        return 0
    with Live(console=out, auto_refresh=False) as live:
        while True:
            live.update(render(runs, out.width), refresh=True)
            if all(run.complete for run in runs):
                return 0
            time.sleep(options.every)
            runs = read_runs(options.runs)


def read_runs(paths: Iterable[Path]) -> list[WatchedRun]:
    """Read each run once; runs that are not complete come first, since a screen may be too small for all."""
    runs = {run.resolve(): run for path in paths for run in runs_in(path)}
    return sorted(map(WatchedRun.read, runs.values()), key=lambda run: run.complete)


def render(runs: Iterable[WatchedRun], width: int) -> Group:
    """Return the blocks of all runs."""
    return Group(*(run.render(width) for run in runs))

"""The options of doubly search."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from doubly.cli.run_options import RunOptions, parse_run_options, run_help

HELP = run_help(
    "usage: doubly search RECIPE [OPTIONS]\n\nSearch hyperparameters: train points of a grid around these settings, "
    "and score them on hold-outs.",
    "trials splits jobs space",
)


@dataclass(frozen=True)
class SearchOptions(RunOptions):
    """Search hyperparameters: train points of a grid, and score them on hold-outs of the training images. The test
    images take no part. The same command skips trials that are done and resumes one that was stopped. The grid is
    built around the settings of the run, every one of which has a flag, as in doubly train."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/search/RECIPE)")] = (
        None
    )
    """folder for the trials, search.json and winner.json"""
    trials: int = 12
    """number of points of the grid to train"""
    splits: int = 2
    """number of hold-outs that a score is averaged over"""
    jobs: int = 2
    """number of trials that run at a time; they share the cores"""
    space: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: epochs, learning rate and weight decay)"),
    ] = None
    """JSON file with the grid: an object from dotted fields to lists of values, as in {"epochs": [40, 60]}"""


def parse_search_options(arguments: Sequence[str]) -> SearchOptions:
    """Parse the arguments of doubly search.

    Raises:
        UsageError: If there is no such recipe or file, or a value does not fit.
        SystemExit: After --help, or after a message about a flag.
    """
    return parse_run_options(SearchOptions, arguments, "search", HELP)

"""doubly compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_differences
from doubly.errors import UsageError
from doubly.rundir import named_runs


@dataclass(frozen=True)
class CompareOptions:
    """Compare two evaluations of the same images: differences with 95 % intervals, and McNemar's test."""

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory, folder with an evaluation, or name of a run in the folder runs"""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory or folder to compare it with"""
    resamples: int = 2000
    """number of resamples of the bootstrap"""
    seed: int = 0
    """seed of the bootstrap"""


def _only_run(path: Path) -> Path:
    """Return the run of a name; refuse a name of several, since a comparison is of two networks."""
    runs = named_runs(path)
    if len(runs) > 1:
        raise UsageError(f"{path} has {len(runs)} seeds: name one of them, such as {runs[0]}")
    return runs[0]


def compare(arguments: list[str], out: Console, err: Console) -> int:
    """Print the differences of two evaluations of the same images."""
    options = parse_options(CompareOptions, arguments, "compare")
    from doubly.evaluation.comparison import compare as compare_results
    from doubly.evaluation.result import EvalResult

    first, second = (EvalResult.load(_only_run(path)) for path in (options.first, options.second))
    rows = compare_results(first, second, options.resamples, options.seed)
    print_differences(rows, first, f"{options.first} minus {options.second}", out)
    return 0

"""doubly compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_differences


@dataclass(frozen=True)
class CompareOptions:
    """Compare two evaluations of the same images: differences with 95 % intervals, and McNemar's test."""

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory, or folder with an evaluation"""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory or folder to compare it with"""
    resamples: int = 2000
    """number of resamples of the bootstrap"""
    seed: int = 0
    """seed of the bootstrap"""


def compare(arguments: list[str], out: Console, err: Console) -> int:
    """Print the differences of two evaluations of the same images."""
    options = parse_options(CompareOptions, arguments, "compare")
    from doubly.evaluation.comparison import compare as compare_results
    from doubly.evaluation.result import EvalResult

    first, second = EvalResult.load(options.first), EvalResult.load(options.second)
    rows = compare_results(first, second, options.resamples, options.seed)
    print_differences(rows, first, f"{options.first} minus {options.second}", out)
    return 0

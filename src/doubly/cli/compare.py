"""doubly compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from doubly.cli.options import parsed
from doubly.cli.tables import show_differences


def compare(arguments: list[str], out: Console) -> int:
    """Print the differences of two evaluations of the same images."""
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Compare two evaluations of the same images: differences with 95 % intervals, and McNemar's test."""

        first: Annotated[Path, tyro.conf.Positional]
        """run directory, or folder with an evaluation"""
        second: Annotated[Path, tyro.conf.Positional]
        """run directory or folder to compare it with"""
        resamples: int = 2000
        """number of resamples of the bootstrap"""
        seed: int = 0
        """seed of the bootstrap"""

    options = parsed(Options, arguments, "compare")
    from doubly.evaluation.comparison import compare as compare_results
    from doubly.evaluation.result import EvalResult

    first, second = EvalResult.load(options.first), EvalResult.load(options.second)
    rows = compare_results(first, second, options.resamples, options.seed)
    show_differences(rows, first, f"{options.first} minus {options.second}", out)
    return 0

"""doubly compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from doubly.cli.options import parsed
from doubly.cli.tables import show_differences


def compare(arguments: list[str], out: Console) -> int:
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Two evaluations of the same images: differences with 95 % intervals, and McNemar's test."""

        first: Annotated[Path, tyro.conf.Positional]
        """run directory, or folder with an evaluation"""
        second: Annotated[Path, tyro.conf.Positional]
        """the other"""
        resamples: int = 2000
        """of the bootstrap"""
        seed: int = 0
        """of the bootstrap"""

    options = parsed(Options, arguments, "compare")
    from doubly.evaluation.comparison import compare as differences
    from doubly.evaluation.result import EvalResult

    ours, theirs = EvalResult.load(options.first), EvalResult.load(options.second)
    rows = differences(ours, theirs, options.resamples, options.seed)
    show_differences(rows, ours, f"{options.first} minus {options.second}", out)
    return 0

"""doubly report. No torch, so that it starts at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_line


@dataclass(frozen=True)
class ReportOptions:
    """Write tables, figures and one self-contained page about run directories, and about evaluations of networks from
    elsewhere, as `doubly evaluate --model` and `doubly check` write them. They are only read."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR…", help_behavior_hint="")] = ()
    """run directories, names of runs in the folder runs, evaluations, or folders that contain these"""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("report")
    """folder for report.html, table.md, table.csv, table.tex and figures/"""


def report(arguments: list[str], out: Console, err: Console) -> int:
    """Print the tables of some runs and write their report."""
    options = parse_options(ReportOptions, arguments, "report")
    from doubly.report import Report
    from doubly.report.forms import show

    result = Report.of(options.runs)
    page = result.write(options.output)
    show(result.tables, out)
    print_line(out, f"wrote {page}")
    return 0

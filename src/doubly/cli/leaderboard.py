"""doubly leaderboard. No torch, so that it starts at once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_line
from doubly.errors import UsageError


@dataclass(frozen=True)
class LeaderboardOptions:
    """Write one self-contained page that ranks evaluated networks of any origin, with a sortable table per protocol:
    average and weakest classes side by side, and what training cost. --entry prints the JSON of one network, which can
    be sent to others; such files are checked and take part like run directories."""

    entries: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR…", help_behavior_hint="")
    ] = ()
    """run directories, evaluations, entry files (.json), or folders that contain these"""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("leaderboard.html")
    """page to write"""
    entry: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """print the entry of this run directory or evaluation, and write no page"""
    name: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: that of the run)")] = ""
    """name of the network, with --entry"""
    link: Annotated[str, tyro.conf.arg(metavar="URL", help_behavior_hint="(default: none)")] = ""
    """page about the network, with --entry"""
    one_protocol: bool = False
    """refuse entries of several protocols, instead of a table for each"""
    schema: bool = False
    """print the JSON Schema of an entry"""


def leaderboard(arguments: list[str], out: Console, err: Console) -> int:
    """Write a leaderboard, or print an entry."""
    options = parse_options(LeaderboardOptions, arguments, "leaderboard")
    from doubly.files import make_folder, write_text
    from doubly.report import leaderboard as board
    from doubly.report.leaderboard_entry import SCHEMA, make_entry
    from doubly.report.run_result import read_run

    if options.entry is None and (options.name or options.link):
        raise UsageError("--name and --link are of one network: add --entry DIR")
    if options.schema or options.entry is not None:
        shown = SCHEMA if options.entry is None else make_entry(read_run(options.entry), options.name, options.link)
        out.print(json.dumps(shown, indent=1), markup=False, highlight=False, soft_wrap=True, emoji=False)
        return 0
    boards = board.group(board.read_entries(options.entries))
    if options.one_protocol:
        board.require_one_protocol(boards)
    make_folder(options.output.parent)
    write_text(options.output, board.render(boards))
    count = sum(len(table.entries) for table in boards)
    entries, protocols = "entry" if count == 1 else "entries", "protocol" + "s" * (len(boards) > 1)
    print_line(out, f"wrote {options.output}: {count} {entries}, {len(boards)} {protocols}")
    return 0

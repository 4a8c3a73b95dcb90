"""doubly card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_line


@dataclass(frozen=True)
class CardOptions:
    """Write a model card about an evaluated network: its robustness on every class, protocol, data, intended use and
    limits, as README.md with the header that the Hugging Face Hub reads."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory, or folder with the evaluation of a network from elsewhere"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: DIR/README.md)")] = None
    """file to write"""
    name: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: that of the run)")] = ""
    """name of the network"""


def card(arguments: list[str], out: Console, err: Console) -> int:
    """Write a model card."""
    options = parse_options(CardOptions, arguments, "card")
    from doubly.files import make_folder, write_text
    from doubly.report.card import model_card
    from doubly.report.run_result import read_run

    output = options.output or options.directory / "README.md"
    text = model_card(read_run(options.directory), options.name)
    make_folder(output.parent)
    write_text(output, text)
    print_line(out, f"wrote {output}")
    return 0

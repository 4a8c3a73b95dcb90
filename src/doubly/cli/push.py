"""doubly push."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_line
from doubly.errors import UsageError


@dataclass(frozen=True)
class PushOptions:
    """Upload an evaluated network to the Hugging Face Hub: model.safetensors, config.json and README.md, nothing else.
    --dry-run shows what would be uploaded. A new repository is private unless --public is given."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory"""
    repo: Annotated[str | None, tyro.conf.arg(metavar="OWNER/NAME", help_behavior_hint="(required to upload)")] = None
    """repository on the Hub"""
    dry_run: bool = False
    """upload nothing, show what would be"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: none is kept)")] = None
    """folder that keeps the files, to look at or to upload by hand"""
    checkpoint: Literal["last", "best"] = "last"
    """checkpoint of the last epoch, or of the best on the hold-out"""
    public: bool = False
    """make a new repository public"""


def push(arguments: list[str], out: Console, err: Console) -> int:
    """Write a folder for the Hub, and upload it."""
    options = parse_options(PushOptions, arguments, "push")
    from doubly.bridges.hub import check_repository, upload, write_hub_folder
    from doubly.evaluation.io import check_folder

    if options.repo is not None:
        check_repository(options.repo)
    elif not options.dry_run:
        raise UsageError("push needs a repository: add --repo OWNER/NAME, or --dry-run to see what would be uploaded")
    if options.output is not None:
        check_folder(options.output)
    with TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        name = (options.repo or "").rpartition("/")[2]
        files = write_hub_folder(options.directory, folder, options.checkpoint, name)
        if options.dry_run or options.repo is None:
            print_line(
                out, f"would upload to {options.repo or 'OWNER/NAME'} ({'public' if options.public else 'private'}):"
            )
            for file in files:
                print_line(out, f"  {file.name}  {file.stat().st_size:,} bytes")
            print_line(out, f"the files are in {folder}" if options.output else "add --output DIR to keep these files")
            return 0
        print_line(out, f"uploaded to {upload(folder, options.repo, private=not options.public)}")
    return 0

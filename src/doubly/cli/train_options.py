"""The options of doubly train."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from doubly.cli.run_options import RunOptions, parse_run_options, run_help

HELP = run_help(
    "usage: doubly train RECIPE [OPTIONS]\n\nTrain a run, and write a run directory. Defaults are in brackets.",
    "resume dry-run threads",
)


@dataclass(frozen=True)
class TrainOptions(RunOptions):
    """Train a run. --set PATH=KIND or PATH=JSON replaces a whole part, as in --set data.augment=augment.pad_crop_flip;
    `doubly list kinds` lists the kinds. --variant literal takes the paper's literal values at once, in recipes of DONE;
    further flags change single ones."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/NAME-sSEED)")] = None
    """run directory"""
    resume: bool = False
    """continue from the last checkpoint of the run directory; without one, say so and start from the beginning"""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all cores)")] = None
    """number of CPU threads"""
    dry_run: bool = False
    """estimate how long training would take on this machine, from a few seconds of timing; train nothing"""
    no_lock: bool = False
    """do not lock the run directory: for a file system without locks, where you start no second run in DIR"""

    @property
    def output_dir(self) -> Path:
        """The run directory, also if none was given."""
        return self.output or Path("runs") / f"{self.run.name}-s{self.run.seed}"


def parse_train_options(arguments: Sequence[str]) -> TrainOptions:
    """Parse the arguments of doubly train.

    Raises:
        UsageError: If there is no such recipe, file or run, or a value does not fit.
        SystemExit: After --help, or after a message about a flag.
    """
    return parse_run_options(TrainOptions, arguments, "train", HELP)

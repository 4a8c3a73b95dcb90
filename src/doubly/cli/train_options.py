"""The options of doubly train: a run from a recipe or a file, parts replaced by --set, then a flag for every field."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from doubly.checkpoints.load import load_run
from doubly.cli.options import parse_options, pop_flag
from doubly.cli.sources import apply_changes, with_data_root
from doubly.config import Run
from doubly.config.serialize import from_json, trust_code
from doubly.config.user_code import UserModel
from doubly.errors import UsageError
from doubly.recipes import recipe
from doubly.rundir import read_json


@dataclass(frozen=True)
class TrainOptions:
    """Train a run. --set PATH=KIND or PATH=JSON replaces a whole part, as in --set data.augment=augment.pad_crop_flip;
    `doubly list kinds` lists the kinds. --variant literal takes the paper's literal values at once, in recipes of DONE;
    further flags change single ones."""

    run: Annotated[Run, tyro.conf.arg(name="")]
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/NAME-sSEED)")] = None
    """run directory"""
    resume: bool = False
    """continue from the last checkpoint of the run directory, if it has one"""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all cores)")] = None
    """number of CPU threads"""
    dry_run: bool = False
    """estimate how long training would take on this machine, from a few seconds of timing; train nothing"""
    tensorboard: bool = False
    """also write curves for TensorBoard to DIR/tensorboard; needs the extra doubly[tensorboard]"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: --data.root)")] = None
    """folder with the dataset's files"""
    model: Annotated[
        str | None,
        tyro.conf.arg(name="model", metavar="M:F", help_behavior_hint="(default: the network of the recipe)"),
    ] = None
    """package.module:function that returns your own network"""
    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: as M:F returns it)")] = (
        None
    )
    """weights that your own network begins with"""

    trust_code: bool = False
    """run the code that --config FILE or the run directory names; without it, a file cannot execute anything"""

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
    words = list(arguments)
    configs, changes, variants = (pop_flag(words, flag) for flag in ("--config", "--set", "--variant"))
    run = apply_changes(_first_run(words, configs, variants), changes)
    options = parse_options(TrainOptions, words, "train RECIPE", TrainOptions(run))
    run = with_data_root(options.run, options.data_root)
    if options.model is not None:
        run = replace(run, model=UserModel(options.model, options.weights))
    elif options.weights is not None:
        raise UsageError("--weights goes with --model package.module:function")
    elif options.trust_code:
        run = trust_code(run)
    return replace(options, run=run)


def _first_run(words: list[str], configs: list[str], variants: list[str]) -> Run:
    """Return the run before any change, and remove the name of a recipe from the words."""
    if words and not words[0].startswith("-"):
        if configs:
            raise UsageError("give a recipe or --config FILE, not both")
        return recipe(words.pop(0), variants[-1] if variants else None)
    if variants:
        raise UsageError("--variant is of a recipe: name one (`doubly list recipes` shows them), or leave it out")
    if configs:
        run = from_json(read_json(Path(configs[-1])))
        if not isinstance(run, Run):
            raise UsageError(f"{configs[-1]} does not describe a run: give the config.json of a run directory")
        return run
    if "--resume" in words and (outputs := pop_flag(list(words), "--output")):
        return load_run(Path(outputs[-1]))
    raise UsageError("name a recipe (`doubly list recipes` shows them), or give --config FILE")

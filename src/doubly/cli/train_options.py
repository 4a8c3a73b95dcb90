"""The options of doubly train: a run from a recipe or a file, parts replaced by --set, then a flag for every field."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from doubly.checkpoints.load import load_run
from doubly.cli.options import parse_options, pop_flag
from doubly.cli.short_flags import apply_short_flags, check_one_epsilon
from doubly.cli.sources import apply_changes, named_run, with_data_root
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
    """continue from the last checkpoint of the run directory; without one, say so and start from the beginning"""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all cores)")] = None
    """number of CPU threads"""
    dry_run: bool = False
    """estimate how long training would take on this machine, from a few seconds of timing; train nothing"""
    no_lock: bool = False
    """do not lock the run directory: for a file system without locks, where you start no second run in DIR"""
    tensorboard: bool = False
    """also write curves for TensorBoard to DIR/tensorboard; needs the extra doubly[tensorboard]"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: --data.root)")] = None
    """folder with the dataset's files"""
    model: Annotated[
        str | None,
        tyro.conf.arg(name="model", metavar="M:F", help_behavior_hint="(default: the network of the recipe)"),
    ] = None
    """package.module:function that returns your own network"""
    data: Annotated[
        str | None, tyro.conf.arg(name="data", metavar="DATA", help_behavior_hint="(default: that of the recipe)")
    ] = None
    """in place of a recipe, with --method: folder of class folders, .npz file, dataset, or Hugging Face folder"""
    method: Annotated[
        str | None, tyro.conf.arg(name="method", metavar="NAME", help_behavior_hint="(default: that of the recipe)")
    ] = None
    """training method for --data: at, cfol, done_pgd, …, the last part of the names of recipes"""
    epsilon: Annotated[str | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="(default: as below)")] = None
    """largest perturbation of training, validation and evaluation alike; their steps keep their ratio to it"""
    norm: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: as below)")] = None
    """norm of the perturbations: linf or l2"""
    lr: Annotated[str | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="(default: as below)")] = None
    """highest learning rate of the schedule"""
    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: as M:F returns it)")] = (
        None
    )
    """weights that your own network begins with"""

    note: Annotated[str, tyro.conf.Suppress] = ""
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
    first, note = _first_run(words, configs, variants)
    run = apply_short_flags(apply_changes(first, changes), words)
    options = parse_options(TrainOptions, words, "train RECIPE", TrainOptions(run))
    check_one_epsilon(first, options.run, arguments)
    run = with_data_root(options.run, options.data_root)
    if options.model is not None:
        run = replace(run, model=UserModel(options.model, options.weights))
    elif options.weights is not None:
        raise UsageError("--weights goes with --model package.module:function")
    elif options.trust_code:
        run = trust_code(run)
    run.model.require_trusted()
    return replace(options, run=run, note=note)


def _first_run(words: list[str], configs: list[str], variants: list[str]) -> tuple[Run, str]:
    """Return the run before any change and a note about its data; remove what names it from the words."""
    name = words.pop(0) if words and not words[0].startswith("-") else None
    if variants and name is not None:
        return recipe(name, variants[-1]), ""
    if variants:
        raise UsageError("--variant is of a recipe: name one (`doubly list recipes` shows them), or leave it out")
    data, method, roots = (pop_flag(words, "--data"), pop_flag(words, "--method"), pop_flag([*words], "--data-root"))
    if configs and (name or data or method):
        raise UsageError("give a recipe, --config FILE, or --data with --method, not several of them")
    if configs:
        return _read_config(Path(configs[-1])), ""
    if not (name or data or method) and "--resume" in words and (outputs := pop_flag(list(words), "--output")):
        return load_run(Path(outputs[-1])), ""
    return named_run(name, *(values[-1] if values else None for values in (data, method, roots)))


def _read_config(path: Path) -> Run:
    if path.suffix == ".py":
        raise UsageError(
            f"{path} is Python, and --config takes the config.json of a run: name a function of it that returns a "
            f"network with --model {path.stem}:FUNCTION"
        )
    run = from_json(read_json(path))
    if not isinstance(run, Run):
        raise UsageError(f"{path} does not describe a run: give the config.json of a run directory")
    return run

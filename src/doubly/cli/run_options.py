"""The options of the verbs that train: a run from a recipe or file, parts replaced by --set, a flag for every field."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from doubly.checkpoints.load import load_run
from doubly.cli.help import Flag, ShortHelp
from doubly.cli.options import Numbers, OwnWeights, parse_options, pop_flag
from doubly.cli.short_flags import apply_short_flags, check_one_epsilon
from doubly.cli.sources import apply_changes, named_run, with_data_root
from doubly.config import Run
from doubly.config.serialize import from_json, trust_code
from doubly.config.threats import measured_threat
from doubly.config.user_code import UserModel
from doubly.errors import UsageError
from doubly.recipes import recipe
from doubly.rundir import read_json
from doubly.text import format_radius, format_value

AsBelow = tyro.conf.arg(metavar="NUMBER", help_behavior_hint="(default: as below)")
OfTheRecipe = "(default: that of the recipe)"


@dataclass(frozen=True)
class RunOptions:
    """Options of doubly train and doubly search."""

    run: Annotated[Run, tyro.conf.arg(name="")]
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """folder for what is written"""
    tensorboard: bool = False
    """also write curves for TensorBoard; needs the extra doubly[tensorboard]"""
    log: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: none)")] = ()
    """loggers beside metrics.jsonl: csv, mlflow, tensorboard, wandb; all but csv need the extra of that name"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: --data.root)")] = None
    """folder with the dataset's files"""
    model: Annotated[
        str | None,
        tyro.conf.arg(name="model", metavar="M:F", help_behavior_hint="(default: the network of the recipe)"),
    ] = None
    """package.module:function that returns your own network, or hf:ORG/NAME, hf:./folder, timm:NAME, torchvision:NAME,
    robustbench:NAME"""
    weights: OwnWeights = None
    """weights that your own network begins with"""
    mean: Numbers = ()
    """mean of the channels, of pixels in [0, 1], if your own network expects normalized images"""
    std: Numbers = ()
    """standard deviation of the channels, with --mean"""
    data: Annotated[str | None, tyro.conf.arg(name="data", metavar="DATA", help_behavior_hint=OfTheRecipe)] = None
    """in place of a recipe, with --method: folder of class folders, .npz file, dataset, or Hugging Face folder"""
    method: Annotated[str | None, tyro.conf.arg(name="method", metavar="NAME", help_behavior_hint=OfTheRecipe)] = None
    """training method for --data: at, cfol, done_pgd, …, the last part of the names of recipes"""
    epsilon: Annotated[str | None, AsBelow] = None
    """largest perturbation of training, validation and evaluation alike; their steps keep their ratio to it"""
    norm: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: as below)")] = None
    """norm of the perturbations: linf or l2"""
    lr: Annotated[str | None, AsBelow] = None
    """highest learning rate of the schedule"""

    note: Annotated[str, tyro.conf.Suppress] = ""
    trust_code: bool = False
    """run the code that --config FILE or the run directory names; without it, a file cannot execute anything"""


R = TypeVar("R", bound=RunOptions)


def run_help(usage: str, own: str) -> ShortHelp:
    """Return what the help of a verb with these options shows.

    Args:
        usage: Usage and what the verb does.
        own: Pattern of the flags of the verb itself.
    """
    return ShortHelp(
        usage,
        {
            "what to train": "data method model weights mean std data-root config set variant trust-code",
            "perturbations": "epsilon norm method.attack.steps method.attack.rule.size *.method.attack.steps",
            "training": "epochs lr batch-size seed optimizer.weight-decay sampling",
            "the method": "method.* -*attack.*",
            "network, data and validation": "model.* data.holdout validation.every",
            "the run": f"output {own} device precision tensorboard log",
        },
        (
            Flag("--config", "FILE", "config.json of a run, in place of a recipe", ""),
            Flag("--set", "PATH=KIND", "replace a whole part, whose fields then have flags", ""),
            Flag("--variant", "literal", "the paper's literal values at once, in recipes of DONE", ""),
        ),
        dict.fromkeys(("--data", "--method", "--model", "--weights", "--mean", "--std", "--data-root"), ""),
    )


def parse_run_options(kind: type[R], arguments: Sequence[str], verb: str, short_help: ShortHelp) -> R:
    """Parse the arguments of a verb that trains.

    Args:
        kind: The options of the verb.
        arguments: The words after the verb.
        verb: Its name.
        short_help: What --help shows.

    Raises:
        UsageError: If there is no such recipe, file or run, or a value does not fit.
        SystemExit: After --help, or after a message about a flag.
    """
    words = list(arguments)
    configs, changes, variants = (pop_flag(words, flag) for flag in ("--config", "--set", "--variant"))
    first, note = _first_run(words, configs, variants)
    run = apply_short_flags(apply_changes(first, changes), words)
    options = parse_options(kind, words, f"{verb} RECIPE", kind(run), _with_values(short_help, run))
    check_one_epsilon(first, options.run, arguments)
    run = with_data_root(options.run, options.data_root)
    if options.model is not None:
        run = replace(run, model=UserModel(options.model, options.weights, options.mean or None, options.std or None))
    elif options.weights is not None or options.mean or options.std:
        raise UsageError("--weights, --mean and --std go with --model package.module:function")
    elif options.trust_code:
        run = trust_code(run)
    run.model.require_trusted()
    return replace(options, run=run, note=note)


def _with_values(short_help: ShortHelp, run: Run) -> ShortHelp:
    """Return the help with the values that the short flags have in a run."""
    threat, schedule = measured_threat(run), run.optimizer.lr
    values = {"--epsilon": format_radius(threat.radius), "--norm": threat.norm.lower()}
    values["--lr"] = "that of the optimizer" if schedule is None else format_value(max(schedule.values_taken()))
    return replace(short_help, defaults={**short_help.defaults, **values})


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

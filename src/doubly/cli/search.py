"""doubly search."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from doubly.cli.options import DataRoot, parse_options
from doubly.cli.tables import print_line
from doubly.errors import UsageError
from doubly.metric_names import METRICS
from doubly.rundir import read_json, write_json

if TYPE_CHECKING:
    from doubly.config import Run


@dataclass(frozen=True)
class SearchOptions:
    """Search hyperparameters: train points of a grid, and score them on hold-outs of the training images. The test
    images take no part. The same command skips trials that are done and resumes one that was stopped."""

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]", help_behavior_hint="")] = None
    """recipe whose settings are changed"""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA", help_behavior_hint="")] = None
    """in place of a recipe, with --method: folder of class folders, .npz file, dataset, or Hugging Face folder"""
    method: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """training method for --data: at, cfol, done_pgd, …"""
    model: Annotated[str | None, tyro.conf.arg(metavar="M:F", help_behavior_hint="")] = None
    """package.module:function that returns your own network"""
    epochs: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """epochs that the grid is built around"""
    lr: Annotated[float | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="")] = None
    """highest learning rate that the grid is built around"""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """images per step"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/search/RECIPE)")] = (
        None
    )
    """folder for the trials, search.json and winner.json"""
    trials: int = 12
    """number of points of the grid to train"""
    splits: int = 2
    """number of hold-outs that a score is averaged over"""
    jobs: int = 2
    """number of trials that run at a time; they share the cores"""
    space: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: epochs, learning rate and weight decay)"),
    ] = None
    """JSON file with the grid: an object from dotted fields to lists of values, as in {"epochs": [40, 60]}"""
    epsilon: Annotated[
        str | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="(default: that of the recipe)")
    ] = None
    """largest perturbation in training and on the hold-outs; steps keep their ratio to it"""
    norm: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: that of the recipe)")] = (
        None
    )
    """norm of the perturbations: linf or l2"""
    data_root: DataRoot = None
    """folder with the dataset's files"""
    tensorboard: bool = False
    """also write curves for TensorBoard into each trial; needs the extra doubly[tensorboard]"""


def search(arguments: list[str], out: Console, err: Console) -> int:
    """Run the trials, print them, and write the winner as a configuration to train."""
    options = parse_options(SearchOptions, arguments, "search")
    from doubly.cli.tensorboard import tensorboard_factories
    from doubly.config.serialize import to_json, with_changes
    from doubly.evaluation.io import check_folder
    from doubly.jobs.search import Search, default_space, run_searches

    run = _base_run(options, out)
    output = options.output or Path("runs") / "search" / run.name
    space = default_space(run) if options.space is None else _read_space(options.space)
    callbacks = tensorboard_factories(options.tensorboard)
    plan = Search(run, space, output, options.trials, options.splits, callbacks=callbacks)
    check_folder(output)
    (result,) = run_searches([plan], options.jobs, out)
    out.print(trials_table(result, f"{run.name}: hold-out, best first"))
    if not any(part for trial in result["trials"] for part in trial["holdouts"]):
        print_line(err, "doubly: every trial failed, for the reasons above: change the space or the recipe")
        return 1
    write_json(output / "winner.json", to_json(with_changes(run, result["winner"])))
    print_line(out, f"now: doubly train --config {output / 'winner.json'}")
    return 0


def _base_run(options: SearchOptions, out: Console) -> "Run":
    """Return the run whose settings are searched."""
    from doubly.cli.short_flags import with_epsilon
    from doubly.cli.sources import named_run, with_data_root
    from doubly.config.user_code import UserModel

    run, note = named_run(options.recipe, options.data, options.method, options.data_root)
    if note:
        print_line(out, note)
    run = with_epsilon(with_data_root(run, options.data_root), options.norm, options.epsilon)
    if options.lr is not None:
        run = replace(run, optimizer=run.optimizer.with_peak(options.lr))
    if options.model is not None:
        run = replace(run, model=UserModel(options.model))
    return replace(run, epochs=options.epochs or run.epochs, batch_size=options.batch_size or run.batch_size)


def _read_space(path: Path) -> dict[str, list[Any]]:
    space = read_json(path)
    if not isinstance(space, dict) or not all(isinstance(values, list) and values for values in space.values()):
        raise UsageError(f'{path} must map dotted fields to lists of values, as {{"epochs": [40, 60]}}')
    return space


def trials_table(result: Mapping[str, Any], title: str) -> Table:
    """Return the trials of a search, best first: score, mean of each metric over the hold-outs, and settings.

    Args:
        result: What search.json holds.
        title: Title of the table.
    """
    trials = sorted(result["trials"], key=lambda trial: -trial["score"])
    holdouts = [[part for part in trial["holdouts"] if part] for trial in trials]  # a hold-out that failed is None
    metrics = [m for m in METRICS.values() if any(m.value(part) is not None for parts in holdouts for part in parts)]
    table = Table("score", *(metric.label for metric in metrics), *result["space"], title=title)
    for trial, parts in zip(trials, holdouts, strict=True):
        values = [[value for part in parts if (value := metric.value(part)) is not None] for metric in metrics]
        cells = [metric.text(fmean(of)) if of else "failed" for metric, of in zip(metrics, values, strict=True)]
        table.add_row(f"{trial['score']:.1%}", *cells, *map(str, trial["changes"].values()))
    return table

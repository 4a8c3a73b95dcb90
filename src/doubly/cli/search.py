"""doubly search."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from doubly.cli.tables import print_line
from doubly.errors import UsageError
from doubly.metric_names import METRICS
from doubly.rundir import read_json, write_json

HELP = """\
usage: doubly search RECIPE [--trials 12] [--splits 2] [--jobs 2] [--space FILE] [OPTIONS]
       doubly search --data DATA --method METHOD [--model M:F] [OPTIONS]
       doubly search --config FILE [OPTIONS]

Search hyperparameters: train points of a grid, and score them on hold-outs of the training images. The test images
take no part. The same command skips trials that are done and resumes one that was stopped.

--trials is the number of points of the grid to train, --splits that of the hold-outs that a score is averaged over,
--jobs that of the trials that run at a time. The grid has epochs, learning rate and weight decay around those of the
run; --space FILE is another, a JSON object from dotted fields to lists of values: {"epochs": [40, 60]}.
The other options are those of doubly train, as --epsilon 8/255, --epochs 40, --lr 0.05 or --method.beta 3;
`doubly search RECIPE --help` lists the usual ones with their values, `doubly search RECIPE --help-all` all.
--output DIR is the folder for the trials, search.json and winner.json, by default runs/search/RECIPE."""


def search(arguments: list[str], out: Console, err: Console) -> int:
    """Run the trials, print them, and write the winner as a configuration to train."""
    if arguments in (["--help"], ["-h"], ["--help-all"]):
        print_line(out, HELP)
        return 0
    from doubly.cli.loggers import logger_factories
    from doubly.cli.search_options import parse_search_options
    from doubly.config.serialize import to_json, with_changes
    from doubly.evaluation.io import check_folder
    from doubly.jobs.search import Search, default_space, run_searches

    options = parse_search_options(arguments)
    run = options.run
    if options.note:
        print_line(out, options.note)
    output = options.output or Path("runs") / "search" / run.name
    space = default_space(run) if options.space is None else _read_space(options.space)
    callbacks = logger_factories(options.log, options.tensorboard)
    plan = Search(run, space, output, options.trials, options.splits, callbacks=callbacks)
    check_folder(output)
    (result,) = run_searches([plan], options.jobs, out)
    out.print(trials_table(result, f"{run.name}: hold-out, best first"))
    if not any(part for trial in result["trials"] for part in trial["holdouts"]):
        print_line(
            err, "doubly: every trial failed, for the reasons above: mend them, or change the space or the recipe"
        )
        return 1
    write_json(output / "winner.json", to_json(with_changes(run, result["winner"])))
    print_line(out, f"now: doubly train --config {output / 'winner.json'}")
    return 0


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

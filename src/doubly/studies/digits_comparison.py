"""Comparison of all methods on digits under one protocol: the same small search, five folds and table.

`doubly reproduce digits` runs it and can be stopped and resumed; it ends in results.json and a page of tables.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from doubly.config.serialize import with_changes
from doubly.jobs.job import CallbackFactory
from doubly.jobs.search import Search, Space
from doubly.recipes.digits import FAST, METHODS, unsearched
from doubly.rundir import write_json
from doubly.studies.folds import FOLDS, StudyRow, compare_rows, run_named_searches, run_rows, summarize_row
from doubly.studies.passes import counted_step_passes

TRIALS, SEARCH_EPOCHS = 6, 20
COMMON_SPACE: Space = {"optimizer.lr.peak": [0.05, 0.1, 0.2], "optimizer.weight_decay": [5e-4, 2e-3]}
METHOD_SPACES: dict[str, Space] = {  # settings of a method beside learning rate and weight decay
    "gairat": {"method.shift.value": [-1.0, 0.0, 1.0]},
    "wmmr": {"method.alpha": [0.5, 1.0, 2.0]},
    "mail": {"method.bias": [-0.5, 0.0], "method.slope": [2.0, 10.0]},
    "mail_trades": {"method.beta": [3.0, 6.0]},
    "trades": {"method.beta": [3.0, 6.0]},
    "mart": {"method.beta": [3.0, 6.0]},
    "awp": {"method.gamma": [0.002, 0.005, 0.01]},
    "awp_done": {"method.gamma": [0.002, 0.005, 0.01]},
    "cfol": {"method.eta": [2e-4, 1e-3]},
    "cfol_reweighting": {"method.eta": [2e-4, 1e-3]},
    "frl": {"method.beta": [1.5, 3.0]},
    "at_bsl": {"method.tau": [0.5, 1.0, 1.5]},
    "dafa": {"method.beta": [3.0, 6.0], "method.strength": [1.0, 1.5]},
    "cfa": {"method.beta": [3.0, 6.0], "method.radius_offset": [0.3, 0.5]},
    "faal": {"method.rho": [0.1, 0.5], "method.start": [0.5, 0.75]},
    "robust_lt": {"method.alpha": [0.1, 0.3]},
    "group_dro": {"method.eta": [0.01, 0.05], "method.adjustment": [0.0, 1.0]},
    "done_pgd": {"method.cap": [2.0, 3.0, 5.0]},
    "done_gd": {"method.cap": [2.0, 3.0, 5.0]},
    "done_adam": {"method.cap": [2.0, 3.0, 5.0]},
    "done_chi2": {"method.cap": [2.0, 3.0, 5.0]},
    "done_cvar": {"method.cap": [1.25, 1.5, 2.0]},
    "fast_at_ga": {"method.strength": [0.05, 0.2, 0.5]},
    "fast_bat": {"method.curvature": [10.0, 100.0]},
    "done_fast": {"method.cap": [2.0, 5.0]},
}


def table_name(method: str, imbalanced: bool) -> str:
    """Return the table that a method belongs to: the fast ones have tables of their own."""
    return ("fast, " if method in FAST else "") + ("imbalanced" if imbalanced else "balanced")


def plan_searches(output: Path) -> dict[str, Search]:
    """Return the search of each recipe by its name, with as many trials for each."""
    searches = {}
    for imbalanced in (True, False):
        for method in (*METHODS, *FAST):
            run = unsearched(method, imbalanced)
            short = replace(run, epochs=min(run.epochs, SEARCH_EPOCHS))
            space = {**COMMON_SPACE, **METHOD_SPACES.get(method, {})}
            searches[run.name] = Search(short, space, output / "search" / run.name, TRIALS, splits=1)
    return searches


def plan_rows(winners: Mapping[str, Mapping[str, Any]]) -> list[StudyRow]:
    """Return a row for every method, balanced and imbalanced; the fast ones come last.

    Args:
        winners: For each recipe the settings that its search chose.
    """
    rows = []
    for imbalanced in (True, False):
        for method in (*METHODS, *FAST):
            run = unsearched(method, imbalanced)
            rows.append(StudyRow(table_name(method, imbalanced), method, with_changes(run, winners[run.name])))
    return sorted(rows, key=lambda row: row.table.startswith("fast"))


def run_comparison(
    output: Path, processes: int, console: Console, callbacks: tuple[CallbackFactory, ...] = ()
) -> dict[str, Any]:
    """Search, train, test and compare; what is done already is not done again.

    Args:
        output: Folder of the study.
        processes: How many runs are trained at a time.
        console: Where progress is printed.
        callbacks: Factories of callbacks for every run; see `Job`.

    Returns:
        The results, which are also written to results.json; winners.json has the chosen settings for the recipes.
    """
    console.print(f"1. search: {TRIALS} trials of {SEARCH_EPOCHS} epochs for every method", highlight=False)
    results = run_named_searches(plan_searches(output), processes, console, callbacks)
    winners = {name: result["winner"] for name, result in results.items()}
    write_json(output / "winners.json", winners)
    rows = plan_rows(winners)
    failures = run_rows(rows, output, processes, console, callbacks)
    with torch.random.fork_rng():
        comparison = {
            "folds": FOLDS,
            "search_epochs": SEARCH_EPOCHS,
            "searches": list(results.values()),
            "rows": [
                {
                    **summarize_row(row, output, failures),
                    "passes": asdict(counted_step_passes(row.run)),
                    "epochs": row.run.epochs,
                }
                for row in rows
            ],
            "differences": compare_rows(rows, output, failures),
        }
    write_json(output / "results.json", comparison)
    return comparison

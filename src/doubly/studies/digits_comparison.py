"""Every method on digits under one protocol: the same small search, the same five folds, one table.

`doubly reproduce digits` runs it whole, and can be stopped and resumed; it ends in results.json and a page of tables.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from doubly.config import Run
from doubly.data import load_splits
from doubly.jobs.pool import run_jobs
from doubly.jobs.search import Search, Space, search_all, with_changes
from doubly.recipes.digits import FAST, METHODS, unsearched
from doubly.rundir import write_json
from doubly.studies.digits_study import FOLDS, Arm, differences, row
from doubly.training.passes import passes
from doubly.training.setup import build_model

TRIALS, SEARCH_EPOCHS = 6, 20
COMMON: Space = {"optimizer.lr.peak": [0.05, 0.1, 0.2], "optimizer.weight_decay": [5e-4, 2e-3]}
OWN: dict[str, Space] = {  # what a method has of its own, beside learning rate and weight decay
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
    "done_pgd": {"method.cap": [2.0, 3.0, 5.0]},
    "done_gd": {"method.cap": [2.0, 3.0, 5.0]},
    "done_adam": {"method.cap": [2.0, 3.0, 5.0]},
    "done_chi2": {"method.cap": [2.0, 3.0, 5.0]},
    "done_cvar": {"method.cap": [1.25, 1.5, 2.0]},
    "fast_at_ga": {"method.strength": [0.05, 0.2, 0.5]},
    "fast_bat": {"method.curvature": [10.0, 100.0]},
    "done_fast": {"method.cap": [2.0, 5.0]},
}


def table_of(method: str, imbalanced: bool) -> str:
    return ("fast, " if method in FAST else "") + ("imbalanced" if imbalanced else "balanced")


def searches(output: Path) -> dict[str, Search]:
    found = {}
    for imbalanced in (True, False):
        for method in (*METHODS, *FAST):
            run = unsearched(method, imbalanced)
            short = replace(run, epochs=min(run.epochs, SEARCH_EPOCHS))
            space = {**COMMON, **OWN.get(method, {})}
            found[run.name] = Search(short, space, output / "search" / run.name, TRIALS, splits=1)
    return found


def arms(winners: Mapping[str, Mapping[str, Any]]) -> list[Arm]:
    """A row for every method, balanced and imbalanced; the fast ones in tables of their own."""
    found = []
    for imbalanced in (True, False):
        for method in (*METHODS, *FAST):
            run = unsearched(method, imbalanced)
            found.append(Arm(table_of(method, imbalanced), method, with_changes(run, winners[run.name])))
    return sorted(found, key=lambda arm: arm.table.startswith("fast"))


def cost(run: Run) -> dict[str, float]:
    """Passes of the network that one step takes, counted on one batch."""
    splits = load_splits(run.data)
    return asdict(passes(run.method, build_model(run, splits.train), splits.train, run.batch_size))


def comparison(output: Path, processes: int, console: Console) -> dict[str, Any]:
    """Search, train, test, compare; returns and writes results.json, and winners.json for the recipes."""
    console.print(f"1. search: {TRIALS} trials of {SEARCH_EPOCHS} epochs for every method", highlight=False)
    wanted = searches(output)
    found = dict(zip(wanted, search_all(list(wanted.values()), processes, console), strict=True))
    winners = {name: result["winner"] for name, result in found.items()}
    write_json(output / "winners.json", winners)
    console.print("2. the winners, retrained on all training images of each fold", highlight=False)
    rows = arms(winners)
    failures = run_jobs([job for arm in rows for job in arm.jobs(output)], processes, console)
    with torch.random.fork_rng():
        results = {
            "folds": FOLDS,
            "search_epochs": SEARCH_EPOCHS,
            "searches": list(found.values()),
            "rows": [{**row(arm, output, failures), "passes": cost(arm.run), "epochs": arm.run.epochs} for arm in rows],
            "differences": differences(rows, output, failures),
        }
    write_json(output / "results.json", results)
    return results

"""DONE against AT on digits: equal searches, five folds that test all 1,797 images, an ablation, a short budget.

`doubly reproduce digits_done` runs it; every number in docs/digits.md comes from the results.json that it writes.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from doubly.config import Run
from doubly.config.serialize import with_changes
from doubly.jobs.job import CallbackFactory
from doubly.jobs.search import Search, Space
from doubly.recipes.digits import digits
from doubly.rundir import write_json
from doubly.studies.folds import FOLDS, StudyRow, compare_rows, run_named_searches, run_rows, summarize_row

SHORT_EPOCHS = 12  # at which AT is far from converged
SHORT_AT = {"epochs": SHORT_EPOCHS, "optimizer.lr.peak": 0.1, "optimizer.weight_decay": 5e-4}
SHORT_DONE = {**SHORT_AT, "method.cap": 5.0, "method.temperature.values": [10.0, 1.0, 0.1]}
METHODS = ("at", "done_pgd", "done_gd", "done_adam")
AT_SPACE: Space = {
    "optimizer.lr.peak": [0.05, 0.1, 0.2],
    "epochs": [40, 60],
    "optimizer.weight_decay": [5e-4, 2e-3, 5e-3],
}
DONE_SPACE: Space = {
    **AT_SPACE,
    "method.cap": [2.0, 3.0, 5.0],
    "method.temperature.values": [[10.0, 1.0, 0.1], [10.0, 1.0, 0.3], [1.0, 0.5, 0.3]],
}
EQUAL = (("done_pgd", 2.0), ("done_pgd", 3.0), ("done_pgd", 5.0), ("done_gd", 3.0), ("done_adam", 3.0))  # with caps
UNCAPPED: dict[str, Any] = {"method.cap": None, "method.implicit": "none"}
ABLATION: dict[str, dict[str, Any]] = {  # label -> changes of the best DONE-PGD
    "batch softmax": {**UNCAPPED, "method.eta": 1.0},
    "tracked u": UNCAPPED,
    "tracked u + cap": {"method.implicit": "none"},
    "tracked u + cap + implicit term": {"method.implicit": "exact"},
    "tracked u + cap + first-order term": {"method.implicit": "first_order"},
}


def plan_searches(output: Path) -> dict[str, Search]:
    """Return the search of each recipe by its name, with as many trials for each."""
    runs = [digits(method, imbalanced) for imbalanced in (True, False) for method in METHODS]
    spaces = {run.name: AT_SPACE if run.name.endswith(".at") else DONE_SPACE for run in runs}
    return {run.name: Search(run, spaces[run.name], output / "search" / run.name) for run in runs}


def plan_rows(winners: Mapping[str, Mapping[str, Any]]) -> list[StudyRow]:
    """Return every row of every table.

    Args:
        winners: For each recipe the settings that its search chose.
    """

    def best(method: str, imbalanced: bool) -> Run:
        run = digits(method, imbalanced)
        result: Run = with_changes(run, winners[run.name])
        return result

    rows = []
    for table, imbalanced in (("imbalanced", True), ("balanced", False)):
        rows += [StudyRow(table, method, best(method, imbalanced)) for method in METHODS]
        literal = with_changes(best("done_pgd", imbalanced), {"method.cap": None})
        rows.append(StudyRow(table, "done_pgd cap None", literal))
    for method in METHODS:
        settings = SHORT_AT if method == "at" else SHORT_DONE
        rows.append(StudyRow("short", method, with_changes(digits(method, True), settings)))
    rows += _equal_rows(best("at", True))
    rows += _ablation_rows(best("done_pgd", True))
    return rows


def _equal_rows(at: Run) -> list[StudyRow]:
    """Return AT, and DONE with the optimizer and epochs that were chosen for AT."""
    rows = [StudyRow("equal", "at", at)]
    for method, cap in EQUAL:
        run = with_changes(digits(method, True), {"method.cap": cap, "method.temperature.values": [10.0, 1.0, 0.1]})
        equal = replace(run, optimizer=at.optimizer, epochs=at.epochs)
        rows.append(StudyRow("equal", f"{method} cap {cap:g}", equal))
    return rows


def _ablation_rows(done: Run) -> list[StudyRow]:
    """Return DONE-PGD built up part by part, beginning with AT, all with the same optimizer and epochs."""
    rows = [StudyRow("ablation", "AT with these numbers", replace(done, method=digits("at", True).method))]
    return rows + [StudyRow("ablation", label, with_changes(done, changes)) for label, changes in ABLATION.items()]


def run_study(
    output: Path, processes: int, console: Console, callbacks: tuple[CallbackFactory, ...] = ()
) -> dict[str, Any]:
    """Search, train, test and compare; what is done already is not done again.

    Args:
        output: Folder of the study.
        processes: How many runs are trained at a time.
        console: Where progress is printed.
        callbacks: Factories of callbacks for every run; see `Job`.

    Returns:
        The results, which are also written to results.json.
    """
    console.print(
        "1. search: equally many trials per method, on hold-outs of fold 0's training images", highlight=False
    )
    results = run_named_searches(plan_searches(output), processes, console, callbacks)
    rows = plan_rows({name: result["winner"] for name, result in results.items()})
    failures = run_rows(rows, output, processes, console, callbacks)
    study = {
        "folds": FOLDS,
        "short_epochs": SHORT_EPOCHS,
        "searches": list(results.values()),
        "rows": [summarize_row(row, output, failures) for row in rows],
        "differences": compare_rows(rows, output, failures),
    }
    write_json(output / "results.json", study)
    return study

"""DONE against AT on digits: equal searches, five folds that test all 1,797 images, an ablation, a short budget.

`doubly reproduce digits_done` runs it whole; every number in docs/digits.md comes from the results.json that it writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from doubly.config import Run
from doubly.data import Digits
from doubly.evaluation.intervals import average_accuracy, bootstrap_difference, tail_accuracy
from doubly.jobs.pool import Job, run_jobs
from doubly.jobs.search import Search, Space, search_all, with_changes
from doubly.recipes.digits import digits
from doubly.rundir import RunDir, read_json, read_metrics, write_json

FOLDS = 5
SHORT = 12  # epochs, at which AT is far from converged
SHORT_PLAIN = {"epochs": SHORT, "optimizer.lr.peak": 0.1, "optimizer.weight_decay": 5e-4}
SHORT_DONE = {**SHORT_PLAIN, "method.cap": 5.0, "method.temperature.values": [10.0, 1.0, 0.1]}
METRICS = ("sa", "ra_pgd", "ra_tail_30", "ra_margin", "ra_margin_tail_30")
COMPARED = ("at", "done_pgd", "done_gd", "done_adam")
PLAIN_SPACE: Space = {
    "optimizer.lr.peak": [0.05, 0.1, 0.2],
    "epochs": [40, 60],
    "optimizer.weight_decay": [5e-4, 2e-3, 5e-3],
}
DONE_SPACE: Space = {
    **PLAIN_SPACE,
    "method.cap": [2.0, 3.0, 5.0],
    "method.temperature.values": [[10.0, 1.0, 0.1], [10.0, 1.0, 0.3], [1.0, 0.5, 0.3]],
}


@dataclass(frozen=True)
class Arm:
    """One row of a table: a run, tested on every fold."""

    table: str
    label: str
    run: Run

    def jobs(self, output: Path) -> list[Job]:
        name = f"{self.table}/{self.label}".replace(" ", "_")
        data = [replace(self.run.data, source=Digits(fold, FOLDS)) for fold in range(FOLDS)]
        return [
            Job(replace(self.run, data=part, seed=fold, save_seconds=600.0), output / name / f"fold-{fold}")
            for fold, part in enumerate(data)
        ]


def searches(output: Path) -> dict[str, Search]:
    found = {}
    for imbalanced in (True, False):
        for method in COMPARED:
            run = digits(method, imbalanced)
            found[run.name] = Search(run, PLAIN_SPACE if method == "at" else DONE_SPACE, output / "search" / run.name)
    return found


def arms(winners: Mapping[str, Mapping[str, Any]]) -> list[Arm]:
    """Every row of every table, given what the searches chose."""

    def chosen(method: str, imbalanced: bool) -> Run:
        run = digits(method, imbalanced)
        return with_changes(run, winners[run.name])

    rows = []
    for imbalanced in (True, False):
        table = "imbalanced" if imbalanced else "balanced"
        rows += [Arm(table, method, chosen(method, imbalanced)) for method in COMPARED]
        literal = with_changes(chosen("done_pgd", imbalanced), {"method.cap": None})
        rows.append(Arm(table, "done_pgd cap None", literal))
    for method in COMPARED:
        numbers = SHORT_PLAIN if method == "at" else SHORT_DONE
        rows.append(Arm("short", method, with_changes(digits(method, True), numbers)))
    at = chosen("at", True)
    rows.append(Arm("equal", "at", at))
    for label, cap in (("done_pgd", 2.0), ("done_pgd", 3.0), ("done_pgd", 5.0), ("done_gd", 3.0), ("done_adam", 3.0)):
        run = with_changes(digits(label, True), {"method.cap": cap, "method.temperature.values": [10.0, 1.0, 0.1]})
        equal = replace(run, optimizer=at.optimizer, epochs=at.epochs)
        rows.append(Arm("equal", f"{label} cap {cap:g}", equal))
    best = chosen("done_pgd", True)
    plain = {"method.cap": None, "method.implicit": "none"}
    rows.append(Arm("ablation", "AT with these numbers", replace(best, method=digits("at", True).method)))
    for label, changes in (
        ("batch softmax", {**plain, "method.eta": 1.0}),
        ("tracked u", plain),
        ("tracked u + cap", {"method.implicit": "none"}),
        ("tracked u + cap + implicit term", {"method.implicit": "exact"}),
        ("tracked u + cap + first-order term", {"method.implicit": "first_order"}),
    ):
        rows.append(Arm("ablation", label, with_changes(best, changes)))
    return rows


def study(output: Path, processes: int, console: Console) -> dict[str, Any]:
    """Search, train, test, compare; returns and writes results.json."""
    console.print(
        "1. search: equally many trials per method, on hold-outs of fold 0's training images", highlight=False
    )
    wanted = searches(output)
    found = dict(zip(wanted, search_all(list(wanted.values()), processes, console), strict=True))
    console.print("2. the winners, retrained on all training images of each fold", highlight=False)
    rows = arms({name: result["winner"] for name, result in found.items()})
    failures = run_jobs([job for arm in rows for job in arm.jobs(output)], processes, console)
    results = {
        "folds": FOLDS,
        "short_epochs": SHORT,
        "searches": list(found.values()),
        "rows": [row(arm, output, failures) for arm in rows],
        "differences": differences(rows, output, failures),
    }
    write_json(output / "results.json", results)
    return results


def row(arm: Arm, output: Path, failures: Mapping[Path, str]) -> dict[str, Any]:
    """What the folds of an arm say together."""
    jobs = arm.jobs(output)
    failed = [failures[job.output] for job in jobs if job.output in failures]
    about: dict[str, Any] = {"table": arm.table, "label": arm.label, "failed": failed}
    if failed:
        return about
    tests = [read_json(RunDir(job.output).evaluation) for job in jobs]
    metrics = [read_metrics(RunDir(job.output).metrics) for job in jobs]
    y, correct = _pooled(arm, output)
    return {
        **about,
        "protocol": {key: value for key, value in tests[0]["protocol"].items() if key != "data_sha256"},  # a fold's
        "n": len(y),
        "per_fold": {key: [test[key] for test in tests] for key in METRICS},
        "worst_per_fold": [test["worst_class"]["ra_pgd"] for test in tests],
        "pooled_tail": tail_accuracy(correct["pgd"], y),
        "pooled_per_class": [float(correct["pgd"][y == k].mean()) for k in range(10)],
        "seconds": [sum(epoch["seconds"] for epoch in epochs) for epochs in metrics],
        "alarms": [epochs[-1].get("alarms", []) for epochs in metrics],
    }


def _pooled(arm: Arm, output: Path) -> tuple[NDArray[np.int64], dict[str, NDArray[np.bool_]]]:
    """Labels, and per attack whether the answer was right, for all images in the order of their ids."""
    parts = [np.load(RunDir(job.output).predictions) for job in arm.jobs(output)]
    ids, y, clean, pgd = (np.concatenate([part[key] for part in parts]) for key in ("ids", "y", "clean", "pgd"))
    order = np.argsort(ids)
    return y[order], {"clean": (clean == y)[order], "pgd": (pgd == y)[order]}


def differences(rows: list[Arm], output: Path, failures: Mapping[Path, str]) -> list[dict[str, Any]]:
    """Each row against the AT of its table: paired bootstrap over the same images, resampled class by class."""
    found = []
    for table in dict.fromkeys(arm.table for arm in rows):
        inside = [arm for arm in rows if arm.table == table]
        if any(job.output in failures for job in inside[0].jobs(output)):
            continue
        y, baseline = _pooled(inside[0], output)
        for arm in inside[1:]:
            if any(job.output in failures for job in arm.jobs(output)):
                continue
            _, other = _pooled(arm, output)
            for name, attack, statistic in (
                ("SA", "clean", average_accuracy),
                ("RA-PGD", "pgd", average_accuracy),
                ("RA-Tail-30", "pgd", tail_accuracy),
            ):
                difference = bootstrap_difference(other[attack], baseline[attack], y, statistic)
                found.append({"table": table, "label": arm.label, "metric": name, **difference._asdict()})
    return found

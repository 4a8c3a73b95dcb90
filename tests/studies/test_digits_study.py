"""DONE against AT on digits: what is planned, and the whole study in miniature."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from doubly.checkpoints.load import load_run
from doubly.config.serialize import with_changes
from doubly.data import Digits
from doubly.evaluation.intervals import bootstrap_difference
from doubly.jobs.search import Search
from doubly.methods import AT
from doubly.recipes.digits import digits
from doubly.report.study import study_markdown
from doubly.rundir import RunDir, read_json, read_metrics
from doubly.studies import digits_study, folds
from doubly.studies.digits import run_digits_study
from doubly.studies.digits_study import METHODS, SHORT_AT, SHORT_DONE, SHORT_EPOCHS, plan_rows, plan_searches, run_study
from doubly.training.setup import prepare_data

RECIPES = [f"digits.{prefix}{method}" for prefix in ("imbalanced.", "") for method in METHODS]
WINNERS = {name: {"epochs": 40, "optimizer.weight_decay": 2e-3} for name in RECIPES}


def test_every_method_gets_as_many_trials_on_the_same_holdouts():
    plans = {name: search.jobs() for name, search in plan_searches(Path("study")).items()}
    assert list(plans) == RECIPES and {len(trials) for trials in plans.values()} == {12}
    jobs = [job for trials in plans.values() for trial in trials for job in trial]
    assert len({job.output for job in jobs}) == len(jobs) == 8 * 12 * 2
    assert len({job.run.validation.attack for job in jobs}) == 1 and not any(job.evaluate for job in jobs)
    splits, held_out = Digits(0, 5).load(), defaultdict(set)
    for name, trials in plans.items():
        for split, job in enumerate(trials[0]):
            data = prepare_data(job.run, splits, torch.device("cpu"))
            held, trained = (frozenset(part.ids.tolist()) for part in (data.validation, data.train))
            assert (job.run.name, job.run.data.source, job.run.seed) == (name, Digits(0, 5), split)
            assert data.held_out and len(held) == 359 and not held & trained
            assert held | trained <= set(splits.train.ids.tolist())
            held_out[split].add(held)
    assert len(held_out[0]) == len(held_out[1]) == 1 and held_out[0] != held_out[1]


def test_methods_of_one_space_are_searched_at_the_same_points(tmp_path):
    searches = plan_searches(tmp_path)
    points = {name: search.candidates() for name, search in searches.items()}
    for prefix in ("digits.", "digits.imbalanced."):
        assert points[f"{prefix}done_pgd"] == points[f"{prefix}done_gd"] == points[f"{prefix}done_adam"]
    assert points["digits.at"] == points["digits.imbalanced.at"]
    at, done = searches["digits.at"].space, searches["digits.done_pgd"].space
    assert at.items() <= done.items() and set(done) - set(at) == {"method.cap", "method.temperature.values"}


def test_each_row_is_what_its_label_says(tmp_path):
    planned = plan_rows(WINNERS)
    rows = {(row.table, row.label): row.run for row in planned}
    assert len(rows) == len(planned) == 5 + 5 + 4 + 6 + 6
    assert len({job.output for row in planned for job in row.jobs(tmp_path)}) == 5 * len(rows)
    assert {run.data.holdout for run in rows.values()} == {0.0}
    for table in ("imbalanced", "balanced"):
        for method in METHODS:
            run = digits(method, table == "imbalanced")
            assert rows[table, method] == with_changes(run, WINNERS[run.name])
        assert rows[table, "done_pgd cap None"] == with_changes(rows[table, "done_pgd"], {"method.cap": None})
    for method in METHODS:  # with settings that were not searched
        run, settings = rows["short", method], SHORT_AT if method == "at" else SHORT_DONE
        assert run == with_changes(digits(method, True), settings)
        assert (run.epochs, run.optimizer.lr.peak, run.optimizer.weight_decay) == (SHORT_EPOCHS, 0.1, 5e-4)
    for label in ("done_pgd cap 2", "done_pgd cap 3", "done_pgd cap 5", "done_gd cap 3", "done_adam cap 3"):
        run, at = rows["equal", label], rows["equal", "at"]
        assert (run.optimizer, run.epochs) == (at.optimizer, at.epochs) and at == rows["imbalanced", "at"]
        assert label.startswith(run.name.rpartition(".")[2]) and label.endswith(f" {run.method.cap:g}")
    best = rows["imbalanced", "done_pgd"]
    ablation = {label: run for (table, label), run in rows.items() if table == "ablation"}
    assert all(replace(run, method=best.method) == best for run in ablation.values())  # only the method differs
    assert ablation.pop("AT with these numbers").method == AT(best.method.attack)
    assert {label: (run.method.eta, run.method.cap, run.method.implicit) for label, run in ablation.items()} == {
        "batch softmax": (1.0, None, "none"),
        "tracked u": (0.9, None, "none"),
        "tracked u + cap": (0.9, 5.0, "none"),
        "tracked u + cap + implicit term": (0.9, 5.0, "exact"),
        "tracked u + cap + first-order term": (0.9, 5.0, "first_order"),
    }


TINY = {
    "batch_size": 256,
    "model.width": 2,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "validation.size": 20,
}
SPACE = {"epochs": [1], "optimizer.lr.peak": [0.2]}
LABELS = [
    *((table, label) for table in ("imbalanced", "balanced") for label in ("at", "done_pgd", "done_pgd cap None")),
    *(("short", label) for label in ("at", "done_pgd")),
    ("equal", "at"),
    ("equal", "done_pgd cap 2"),
    *(("ablation", label) for label in ("AT with these numbers", "tracked u")),
]


@pytest.fixture(scope="module")
def study(inline, tmp_path_factory):
    """(folder, results) of the study with small runs, and fewer of them."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "FOLDS": 2,
            "SHORT_EPOCHS": 1,
            "SHORT_AT": {**SHORT_AT, "epochs": 1},
            "SHORT_DONE": {**SHORT_DONE, "epochs": 1},
            "METHODS": ("at", "done_pgd"),
            "AT_SPACE": SPACE,
            "DONE_SPACE": {**SPACE, "method.cap": [3.0]},
            "EQUAL": (("done_pgd", 2.0),),
            "ABLATION": {"tracked u": digits_study.UNCAPPED},
            "Search": partial(Search, trials=1, splits=1),
            "digits": lambda method, imbalanced: with_changes(digits(method, imbalanced), TINY),
        }.items():
            patch.setattr(digits_study, name, value)
        patch.setattr(folds, "FOLDS", 2)
        patch.setattr(folds, "bootstrap_difference", partial(bootstrap_difference, resamples=50))
        yield folder, run_study(folder, 1, Console(file=StringIO()))


def directories(folder, table, label):
    return [folder / table / label.replace(" ", "_") / f"fold-{fold}" for fold in (0, 1)]


def test_the_study_ends_in_results(study):
    folder, results = study
    assert read_json(folder / "results.json") == results
    assert (results["folds"], results["short_epochs"]) == (2, 1)
    assert [(row["table"], row["label"]) for row in results["rows"]] == LABELS
    for row in results["rows"]:
        tests = [read_json(RunDir(path).evaluation) for path in directories(folder, row["table"], row["label"])]
        assert row["failed"] == [] and row["n"] == 1797 == sum(test["n"] for test in tests)
        assert row["per_fold"]["ra_pgd"] == [test["ra_pgd"] for test in tests]
    assert len(results["differences"]) == 3 * (len(LABELS) - 5)  # the first row of each table is not compared


def test_the_winners_are_retrained_on_all_training_images(study):
    folder, results = study
    assert [search["recipe"] for search in results["searches"]] == [
        f"digits.{prefix}{method}" for prefix in ("imbalanced.", "") for method in ("at", "done_pgd")
    ]
    assert results["searches"][1]["winner"] == {"epochs": 1, "optimizer.lr.peak": 0.2, "method.cap": 3.0}
    trial = load_run(folder / "search" / "digits.imbalanced.done_pgd" / "trial-00-split-0")
    for fold, path in enumerate(directories(folder, "imbalanced", "done_pgd")):
        run = load_run(path)
        assert (run.method, run.optimizer, run.epochs) == (trial.method, trial.optimizer, trial.epochs)
        assert run.method.cap == 3.0 and run.optimizer.lr.peak == 0.2
        assert (trial.data.holdout, run.data.holdout, run.data.source) == (0.25, 0.0, Digits(fold, 2))
        (row,) = read_metrics(RunDir(path).metrics)
        assert row["validation"]["on"] == "test" and not (path / "checkpoints" / "best").exists()


def test_a_second_time_nothing_is_trained_and_the_page_is_written(study, monkeypatch):
    folder, results = study
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    printed = StringIO()
    page = run_digits_study("digits_done", folder, 1, 3, Console(file=printed, width=200))
    assert "4 of 4 runs are done already" in printed.getvalue() and "24 of 24 runs" in printed.getvalue()
    assert read_json(folder / "results.json") == results
    text = page.read_text()
    assert page == folder / "results.md" and text == study_markdown(results)
    assert all(f"| {label} |" in text for _, label in LABELS)

from collections import defaultdict
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from doubly.checkpoints.load import load_run
from doubly.cli import main
from doubly.data import Digits, load_splits
from doubly.evaluation.intervals import bootstrap_difference
from doubly.jobs.search import Search, with_changes
from doubly.methods import AT
from doubly.recipes.digits import digits
from doubly.report.study import study_markdown
from doubly.rundir import RunDir, read_json, read_metrics
from doubly.studies import digits_study as study_module
from doubly.studies.digits_study import COMPARED, FOLDS, SHORT, SHORT_DONE, SHORT_PLAIN, Arm, arms, searches, study
from doubly.training.setup import prepare

RECIPES = [f"digits.{prefix}{method}" for prefix in ("imbalanced.", "") for method in COMPARED]
CPU = torch.device("cpu")


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned():
    """recipe -> its trials, each a job per hold-out"""
    return {name: plan.jobs() for name, plan in searches(Path("study")).items()}


def test_every_method_gets_as_many_trials_on_the_same_holdouts(planned):
    assert list(planned) == RECIPES
    for name, trials in planned.items():
        assert len(trials) == 12
        for trial in trials:
            runs = [job.run for job in trial]
            assert {run.name for run in runs} == {name} and not any(job.measure for job in trial)
            assert [(run.data.source, run.data.holdout, run.data.split, run.seed) for run in runs] == [
                (Digits(0, 5), 0.25, 0, 0),
                (Digits(0, 5), 0.25, 1, 1),
            ]
    jobs = [job for trials in planned.values() for trial in trials for job in trial]
    assert len({job.output for job in jobs}) == len(jobs) == 8 * 12 * 2
    assert len({job.run.validation.attack for job in jobs}) == 1  # and measured alike


def test_what_is_held_out_is_the_same_for_all_and_no_test_image(planned):
    splits = Digits(0, FOLDS).load()
    seen = defaultdict(set)
    for trials in planned.values():
        for job in trials[0]:
            images = prepare(job.run, splits, CPU)
            held, trained = (frozenset(part.ids.tolist()) for part in (images.validation, images.train))
            assert images.chooses and len(held) == 359 and not held & trained
            assert held | trained <= set(splits.train.ids.tolist())
            seen[job.run.data.split].add(held)
    assert len(seen[0]) == len(seen[1]) == 1 and seen[0] != seen[1]


def test_equal_methods_are_searched_in_the_same_points(tmp_path):
    plans = searches(tmp_path)
    points = {name: plan.candidates() for name, plan in plans.items()}
    for prefix in ("digits.", "digits.imbalanced."):
        assert points[f"{prefix}done_pgd"] == points[f"{prefix}done_gd"] == points[f"{prefix}done_adam"]
    assert points["digits.at"] == points["digits.imbalanced.at"]
    at, done = plans["digits.at"].space, plans["digits.done_pgd"].space
    assert at.items() <= done.items() and set(done) - set(at) == {"method.cap", "method.temperature.values"}


WINNERS = {name: {"epochs": 40, "optimizer.weight_decay": 2e-3} for name in RECIPES}


def test_the_folds_of_every_row_test_each_image_once_and_train_on_all_others(tmp_path):
    rows = arms(WINNERS)
    plan = {tuple(job.run.data.source for job in arm.jobs(tmp_path)) for arm in rows}
    assert plan == {tuple(Digits(fold, FOLDS) for fold in range(FOLDS))}
    for arm in rows:
        jobs = arm.jobs(tmp_path)
        assert [job.run.seed for job in jobs] == list(range(FOLDS)) and all(job.measure for job in jobs)
        assert {job.run.data.holdout for job in jobs} == {0.0}
    splits = [load_splits(job.run.data) for job in rows[0].jobs(tmp_path)]
    tested = [position for split in splits for position in split.test.ids.tolist()]
    assert sorted(tested) == list(range(1797))
    assert all(sorted(split.train.ids.tolist() + split.test.ids.tolist()) == list(range(1797)) for split in splits)
    assert len({job.output for arm in rows for job in arm.jobs(tmp_path)}) == FOLDS * len(rows)


def test_each_row_is_what_its_label_says():
    rows = {(arm.table, arm.label): arm.run for arm in arms(WINNERS)}
    assert len(rows) == len(arms(WINNERS)) == 5 + 5 + 4 + 6 + 6
    for table in ("imbalanced", "balanced"):
        for method in COMPARED:
            run = digits(method, table == "imbalanced")
            assert rows[table, method] == with_changes(run, WINNERS[run.name])
        assert rows[table, "done_pgd cap None"] == with_changes(rows[table, "done_pgd"], {"method.cap": None})
    for method in COMPARED:  # at numbers that nobody chose
        run, numbers = rows["short", method], SHORT_PLAIN if method == "at" else SHORT_DONE
        assert run == with_changes(digits(method, True), numbers)
        assert (run.epochs, run.optimizer.lr.peak, run.optimizer.weight_decay) == (SHORT, 0.1, 5e-4)
    for label in ("done_pgd cap 2", "done_pgd cap 3", "done_pgd cap 5", "done_gd cap 3", "done_adam cap 3"):
        run, at = rows["equal", label], rows["equal", "at"]
        assert (run.optimizer, run.epochs) == (at.optimizer, at.epochs) and at == rows["imbalanced", "at"]
        assert label.startswith(run.name.rpartition(".")[2]) and label.endswith(f" {run.method.cap:g}")
    best = rows["imbalanced", "done_pgd"]
    ablation = {label: run for (table, label), run in rows.items() if table == "ablation"}
    assert all(replace(run, method=best.method) == best for run in ablation.values())  # they differ in the method alone
    assert ablation["AT with these numbers"].method == AT(best.method.attack)
    steps = {
        label: (run.method.eta, run.method.cap, run.method.implicit)
        for label, run in ablation.items()
        if label != "AT with these numbers"
    }
    assert steps == {
        "batch softmax": (1.0, None, "none"),
        "tracked u": (0.9, None, "none"),
        "tracked u + cap": (0.9, 5.0, "none"),
        "tracked u + cap + implicit term": (0.9, 5.0, "exact"),
        "tracked u + cap + first-order term": (0.9, 5.0, "first_order"),
    }


# --- the whole study in miniature ------------------------------------------------------------------------------------

TINY = {"batch": 64, "model.width": 4, "method.attack.steps": 1, "validation.attack.steps": 1, "validation.size": 20}
PLAIN = {"epochs": [1], "optimizer.lr.peak": [0.2]}


@pytest.fixture(scope="module")
def miniature(inline):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "FOLDS": 2,
            "SHORT": 1,
            "SHORT_PLAIN": {**SHORT_PLAIN, "epochs": 1},
            "SHORT_DONE": {**SHORT_DONE, "epochs": 1},
            "COMPARED": ("at", "done_pgd"),
            "PLAIN_SPACE": PLAIN,
            "DONE_SPACE": {**PLAIN, "method.cap": [3.0]},
            "Search": partial(Search, trials=1, splits=1),
            "digits": lambda method, imbalanced: with_changes(digits(method, imbalanced), TINY),
            "bootstrap_difference": partial(bootstrap_difference, resamples=50),
        }.items():
            patch.setattr(study_module, name, value)
        yield


@pytest.fixture(scope="module")
def studied(miniature, tmp_path_factory):
    """(folder, results)"""
    folder = tmp_path_factory.mktemp("study")
    return folder, study(folder, 1, Console(file=StringIO()))


ROWS = [
    *((table, label) for table in ("imbalanced", "balanced") for label in ("at", "done_pgd", "done_pgd cap None")),
    *(("short", label) for label in ("at", "done_pgd")),
    ("equal", "at"),
    *(("equal", f"done_pgd cap {cap}") for cap in (2, 3, 5)),
    *(("equal", f"done_{name} cap 3") for name in ("gd", "adam")),
    ("ablation", "AT with these numbers"),
    ("ablation", "batch softmax"),
    ("ablation", "tracked u"),
    ("ablation", "tracked u + cap"),
    ("ablation", "tracked u + cap + implicit term"),
    ("ablation", "tracked u + cap + first-order term"),
]


def runs_of(folder, table, label):
    return [folder / table / label.replace(" ", "_") / f"fold-{fold}" for fold in (0, 1)]


def test_it_ends_in_results(studied):
    folder, results = studied
    assert read_json(folder / "results.json") == results
    assert (results["folds"], results["short_epochs"]) == (2, 1)
    assert [(row["table"], row["label"]) for row in results["rows"]] == ROWS
    for row in results["rows"]:
        tests = [read_json(RunDir(path).evaluation) for path in runs_of(folder, row["table"], row["label"])]
        assert row["failed"] == [] and row["n"] == 1797 == sum(test["n"] for test in tests)
        for key in ("sa", "ra_pgd", "ra_tail_30", "ra_margin", "ra_margin_tail_30"):
            assert row["per_fold"][key] == [test[key] for test in tests]
        assert row["worst_per_fold"] == [test["worst_class"]["ra_pgd"] for test in tests]
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0


def test_the_winners_are_retrained_on_all_training_images(studied):
    folder, results = studied
    assert [search["recipe"] for search in results["searches"]] == [
        f"digits.{prefix}{method}" for prefix in ("imbalanced.", "") for method in ("at", "done_pgd")
    ]
    assert [len(search["trials"]) for search in results["searches"]] == [1] * 4
    assert results["searches"][1]["winner"] == {"epochs": 1, "optimizer.lr.peak": 0.2, "method.cap": 3.0}
    trial = load_run(folder / "search" / "digits.imbalanced.done_pgd" / "trial-00-split-0")
    for fold, path in enumerate(runs_of(folder, "imbalanced", "done_pgd")):
        run = load_run(path)
        assert (run.method, run.optimizer, run.epochs) == (trial.method, trial.optimizer, trial.epochs)
        assert run.method.cap == 3.0 and run.optimizer.lr.peak == 0.2
        assert (trial.data.holdout, run.data.holdout, run.data.source) == (0.25, 0.0, Digits(fold, 2))
        (row,) = read_metrics(RunDir(path).metrics)
        assert row["validation"]["on"] == "test" and not (path / "checkpoints" / "best").exists()


def correct(folder, table, label):
    """Whether each of the 1,797 was right, under each attack; read from the files by hand."""
    found = {"clean": np.full(1797, -1), "pgd": np.full(1797, -1), "y": np.full(1797, -1)}
    for path in runs_of(folder, table, label):
        saved = np.load(path / "evaluation.npz")
        for image, y, clean, pgd in zip(*(saved[key] for key in ("ids", "y", "clean", "pgd")), strict=True):
            found["y"][image], found["clean"][image], found["pgd"][image] = y, clean == y, pgd == y
    assert min(part.min() for part in found.values()) == 0  # each image was tested
    return found


def tail(right, y):
    return float(np.mean(sorted(right[y == k].mean() for k in range(10))[:3]))


def test_the_differences_are_those_of_the_same_images(studied):
    folder, results = studied
    found = {(d["table"], d["label"], d["metric"]): d for d in results["differences"]}
    heads = dict(reversed(ROWS))  # the first of each table
    plain = dict.fromkeys(("imbalanced", "balanced", "short", "equal"), "at")
    assert heads == {**plain, "ablation": "AT with these numbers"}
    others = [(table, label) for table, label in ROWS if heads[table] != label]
    assert len(found) == len(results["differences"]) == 3 * len(others)
    for table, label in others:
        mine, base = correct(folder, table, label), correct(folder, table, heads[table])
        y = mine["y"]
        np.testing.assert_array_equal(y, base["y"])
        expected = {
            "SA": mine["clean"].mean() - base["clean"].mean(),
            "RA-PGD": mine["pgd"].mean() - base["pgd"].mean(),
            "RA-Tail-30": tail(mine["pgd"], y) - tail(base["pgd"], y),
        }
        for metric, value in expected.items():
            assert found[table, label, metric]["value"] == pytest.approx(value, abs=1e-12)
        interval = bootstrap_difference(mine["pgd"], base["pgd"], y, lambda right, y: right.mean(), resamples=50)
        assert [found[table, label, "RA-PGD"][key] for key in ("low", "high")] == pytest.approx(interval[1:], abs=1e-12)
    assert max(abs(d["value"]) for d in found.values()) > 0.01, "nothing to compare"


def test_the_tail_of_all_images_is_pooled_over_the_folds(studied):
    folder, results = studied
    for row in results["rows"]:
        found = correct(folder, row["table"], row["label"])
        assert row["pooled_tail"] == pytest.approx(tail(found["pgd"], found["y"]))
        assert row["pooled_per_class"] == pytest.approx([found["pgd"][found["y"] == k].mean() for k in range(10)])


def test_again_it_trains_nothing_and_the_page_is_written(studied, monkeypatch, capfd):
    folder, results = studied
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    assert main(["reproduce", "digits_done", "--output", str(folder), "--jobs", "1"]) == 0
    out, _ = capfd.readouterr()
    assert "4 of 4 runs are done already" in out and "40 of 40 runs are done already" in out
    assert read_json(folder / "results.json") == results
    text = (folder / "results.md").read_text()
    assert text == study_markdown(results) and str(folder / "results.md") in out
    assert "mean ± sd over 2 stratified folds (seed = fold), n = 1797 in all; PGD-1, ℓ∞, ε = 0.15" in text
    assert all(f"| {label} |" in text for _, label in ROWS)


def test_a_row_that_failed_is_left_out_of_the_differences(studied):
    folder, _ = studied
    rows = [Arm(table, label, digits("at", True)) for table, label in ROWS[:3]]
    failures = {runs_of(folder, *ROWS[1])[0]: "the losses: 3 of 3 values are NaN or infinite"}
    assert study_module.row(rows[1], folder, failures) == {
        "table": "imbalanced",
        "label": "done_pgd",
        "failed": ["the losses: 3 of 3 values are NaN or infinite"],
    }
    assert {d["label"] for d in study_module.differences(rows, folder, failures)} == {"done_pgd cap None"}
    baseline = {Path(runs_of(folder, *ROWS[0])[1]): "gone"}
    assert study_module.differences(rows, folder, baseline) == []

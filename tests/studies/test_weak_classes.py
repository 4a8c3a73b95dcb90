"""The study of weak classes with small runs: selection on part B, resumption, pages, and what it refuses."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from doubly.errors import UsageError
from doubly.report.weak_classes import ablation_page, study_page
from doubly.rundir import read_json
from doubly.studies.weak_classes.measured_job import Measure, Measured
from doubly.studies.weak_classes.plan import METHODS, TRIALS, VARIANTS, StudyPlan
from doubly.studies.weak_classes.selection import Candidate, candidates, choose, paired_difference
from doubly.studies.weak_classes.study import WeakClassesStudy, run_ablation

TINY = {
    "epochs": 2,
    "batch_size": 256,
    "model.width": 2,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "validation.size": 20,
}
BOTH = (0.0, 1.0)
ROOT = Path(__file__).parents[2]


def small_plan(folder, **settings):
    return StudyPlan(
        folder,
        setting="digits.imbalanced",
        methods=("at", "done_class"),
        trials={"at": ({}, {"optimizer.lr.peak": 0.05}), "done_class": ({},)},
        changes=TINY,
        seeds=(11,),
        on_b=Measure("selection", "validation", 0, 30, "margin", BOTH),
        on_test=Measure("test", "test", 100, 40, "margin", BOTH),
        path_on_b=Measure("selection", "validation", 0, 30, "margin", (0.0, 0.5, 1.0)),
        path_on_test=Measure("path", "test", 100, 40, "margin", (0.0, 0.5, 1.0)),
        **settings,
    )


@pytest.fixture(scope="module")
def finished(inline, tmp_path_factory):
    study = WeakClassesStudy(small_plan(tmp_path_factory.mktemp("study")), 1)
    page = study.run(Console(file=StringIO()))
    return study, page


def test_the_study_measures_every_method_and_writes_its_page(finished):
    study, page = finished
    results = read_json(study.plan.output / "results.json")
    assert [row["method"] for row in results["rows"]] == ["at", "done_class"]
    assert all(row["seeds"] == [11] for row in results["rows"])
    assert {(d["method"], d["other"]) for d in results["differences"]} >= {("done_class", "at")}
    text = page.read_text()
    for words in ("n = 40 test images from number 100 on", "DONE-CLASS", "What the trials chose", "chosen"):
        assert words in text
    assert (study.plan.output / "paths.png").stat().st_size > 0
    job = study.plan.final_jobs("at", 0)[0]
    assert job.read(study.plan.on_test).correct.shape == (2, 40)
    points = read_json(job.output / "test.json")["points"]
    assert points[1]["average"] == job.read(study.plan.on_test).at(1.0).mean()


def test_what_is_measured_is_not_computed_again_and_other_settings_are(finished):
    study, page = finished
    job = study.plan.final_jobs("done_class", 0)[0]
    file = job.output / "test.json"
    before = file.stat().st_mtime_ns
    assert study.run(Console(file=StringIO())) == page and file.stat().st_mtime_ns == before
    file.write_text(file.read_text().replace('"count": 40', '"count": 41'))
    assert not job.is_done and job.read(study.plan.on_test) is None
    job.evaluate_trained(lambda: False)
    assert job.is_done


def test_the_ablation_has_every_variant(inline, tmp_path):
    plan = small_plan(tmp_path)
    page = run_ablation(plan, 1, Console(file=StringIO()))
    rows = read_json(tmp_path / "ablation.json")["rows"]
    assert [row["variant"] for row in rows] == list(VARIANTS) and len(VARIANTS) <= 12
    assert all(name in page.read_text() for name in VARIANTS)


def test_all_runs_of_the_real_study_exist_and_share_budget_and_images(tmp_path):
    plan = StudyPlan(tmp_path)
    runs = [job.run for method in METHODS for job in (*plan.trial_jobs(method), *plan.final_jobs(method, 0))]
    assert len({(run.data, run.ema_decay, run.batch_size, run.model) for run in runs}) == 1
    assert {run.epochs for run in runs} == {4, 8} and {len(trials) for trials in TRIALS.values()} == {3}


def test_the_highest_tail_wins_among_averages_within_a_point():
    options = [Candidate(0, 0.0, 0.45, 0.10), Candidate(0, 1.0, 0.442, 0.20), Candidate(1, 1.0, 0.43, 0.30)]
    assert choose(options) == options[1]
    y = np.repeat(np.arange(10), 2)
    correct = np.ones((2, 20), bool)
    correct[0, :4] = False  # as trained, classes 0 and 1 are always wrong
    (trained, repaired) = candidates({3: [Measured(BOTH, correct, correct, y)]})
    assert trained == Candidate(3, 0.0, 0.8, pytest.approx(1 / 3)) and repaired == Candidate(3, 1.0, 1.0, 1.0)


def test_a_paired_difference_is_the_mean_over_seeds():
    y = np.repeat(np.arange(10), 20)
    worse, better = np.ones(200, bool), np.ones(200, bool)
    worse[:40] = False
    rows = np.stack([worse, better])
    measured = [Measured(BOTH, rows, rows, y)] * 2
    value, low, high = paired_difference(measured, measured, (1.0, 0.0), "tail", 50)
    assert (value, low, high) == (pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["reproduce", "weak_classes", "--methods", "att"], "no method 'att'"),
        (["reproduce", "weak_classes", "--seeds", "4"], "has 3 seeds and 1 to 3 trials, got 4 and 3"),
        (["reproduce", "ablation", "--methods", "at"], "--methods is for tables"),
        (["reproduce", "weak_classes", "--scale", "paper"], "--scale is for tables"),
    ],
)
def test_refusals(cli, arguments, message):
    result = cli(*arguments)
    assert result.code == 2 and message in result.err


def test_the_page_shows_the_stored_results():
    page = (ROOT / "docs" / "weak-classes.md").read_text(encoding="utf-8")
    for name, render in (("ablation", ablation_page), ("study", study_page)):
        shown = page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]
        assert shown == render(read_json(ROOT / "results" / "weak-classes" / f"{name}.json"))


def test_nothing_done_is_said(tmp_path):
    from doubly.studies.weak_classes.study import write_ablation

    with pytest.raises(UsageError, match="no variant that is done"):
        write_ablation(small_plan(tmp_path))

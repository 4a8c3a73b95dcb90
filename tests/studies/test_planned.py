"""A planned study: what is left to do, commands, estimates, and a script for SLURM."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.jobs import cost
from doubly.jobs.cost import Estimate
from doubly.studies.digits import run_directories
from doubly.studies.planned import PlannedStudy
from doubly.studies.plans import PLANS, Plan, Scale, plan_jobs
from doubly.training.passes import Passes

TINY = {
    "epochs": 1,
    "batch_size": 512,
    "model.width": 2,
    "validation.size": 20,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "device": "cpu",
}
PLAN = Plan("for tests", {"digits": ("at", "done_pgd"), "digits.imbalanced": ("at",)}, autoattack=True)


def tiny_study(output, processes=None, root=None, **scale):
    scale = Scale("", EvalConfig(images=20, trust=False), TINY, **scale)
    jobs = plan_jobs(PLAN, scale, 1, output, root=root, autoattack=False)
    return PlannedStudy("tiny", jobs, scale, output, processes)


def test_a_study_runs_reports_and_has_nothing_left(inline, tmp_path, monkeypatch):
    monkeypatch.setattr("doubly.report.Report.write", lambda report, output: output / "report.html")
    study = tiny_study(tmp_path)
    assert study.report(Console(file=StringIO())) is None  # nothing is done
    assert study.run(Console(file=StringIO())) == {}
    printed = StringIO()
    assert study.report(Console(file=printed, width=200)) == tmp_path / "report-tiny" / "report.html"
    assert "DONE-PGD" in printed.getvalue() and "digits.imbalanced" in printed.getvalue()
    again = tiny_study(tmp_path)
    assert again.unfinished == [] and again.commands == [] and again.estimates(print) == {}


def test_estimates_are_based_on_one_calibration_per_network(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "MAX_SECONDS", 0.01)
    study, messages = tiny_study(tmp_path), []
    estimates = study.estimates(messages.append)
    assert list(estimates) == [job.output for job in study.jobs]
    passes = [estimate.step_passes for estimate in estimates.values()]
    assert passes == [Passes(2, 2), Passes(3, 3), Passes(2, 2)]
    assert len(messages) == 1 and messages[0].startswith("estimated from ")
    assert " s for a pass of 512 images of 8 x 8 pixels, " in messages[0]


def test_jobs_that_run_at_a_time_share_the_total_time():
    seconds = {Path(str(number)): Estimate(Passes(), value, 1.0) for number, value in enumerate((9.0, 4.0, 4.0))}
    study = PlannedStudy("tiny", [], Scale("", EvalConfig()), Path())
    assert study.local_processes == 2 and study.total_seconds(seconds) == 10.0  # the longest, or the mean load
    assert PlannedStudy("tiny", [], Scale("", EvalConfig()), Path(), 1).total_seconds(seconds) == 20.0


def test_missing_data_are_named_before_anything_runs(tmp_path):
    scale = Scale("small.", EvalConfig())
    jobs = plan_jobs(PLANS["figure3"], scale, 1, tmp_path / "runs", root=str(tmp_path / "empty"))
    with pytest.raises(UsageError) as error:
        PlannedStudy("figure3", jobs, scale, tmp_path / "runs").run(Console(file=StringIO()))
    for name in ("svhn", "gtsrb", "cifar10", "stl10"):
        assert f"doubly data fetch {name} " in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_script_has_a_task_per_unfinished_job_and_time_for_the_longest(tmp_path, monkeypatch):
    study = tiny_study(tmp_path, processes=2)
    estimates = {job.output: Estimate(Passes(), 3600.0 * number, 60.0) for number, job in enumerate(study.jobs)}
    monkeypatch.setattr(PlannedStudy, "estimates", lambda study, on_message: estimates)
    text = study.slurm_script(print)
    assert "#SBATCH --array=0-2%2\n" in text and "#SBATCH --time=0-05:00:00\n" in text  # twice 2 h and a minute
    assert f"# {study.report_command}\n" in text and study.report_command.startswith("doubly report /")
    assert "#SBATCH --gres=gpu:1\n" in tiny_study(tmp_path, needs_gpu=True).slurm_script(print)


def test_the_studies_on_digits_list_their_run_directories(tmp_path):
    for name, count in (("demo", 4 * 3), ("digits", 70 * (6 + 5)), ("digits_done", 8 * 12 * 2 + 26 * 5)):
        paths = run_directories(name, tmp_path, 3)
        assert len(set(paths)) == len(paths) == count and all(path.is_relative_to(tmp_path) for path in paths)

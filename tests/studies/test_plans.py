"""Which runs a table or figure takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from doubly.data import StepImbalance
from doubly.errors import UsageError
from doubly.recipes import RECIPES
from doubly.studies.plans import PLANS, SCALES, check_directories, plan_jobs
from doubly.training.loop import train_run

PAPER, SMALL = SCALES["paper"], SCALES["small"]
COUNTS = {
    "table1": 16,
    "table2": 10,
    "table3": 10,
    "table4": 4,
    "cifar10": 8,
    "figure1": 4,
    "figure2": 1,
    "figure3": 4,
    "figure4": 2,
    "figure5": 3,
    "figure6": 2,
}


def test_every_plan_has_its_runs_at_every_scale():
    assert PLANS.keys() == COUNTS.keys()
    for name, plan in PLANS.items():
        for scale in SCALES:
            jobs = plan_jobs(plan, SCALES[scale], 2, Path("runs"))
            assert len(jobs) == 2 * COUNTS[name] == len({job.output for job in jobs}), (name, scale)
            for job in jobs:
                assert job.run.name in RECIPES and (".small." in job.run.name) == (scale == "small")
                assert job.output == Path("runs") / f"{job.run.name}-s{job.run.seed}"
            assert [job.run.seed for job in jobs] == [0] * COUNTS[name] + [1] * COUNTS[name]  # whole tables first


def test_tables_1_and_2_and_figure_1_have_imbalanced_runs():
    imbalanced = {
        name
        for name, plan in PLANS.items()
        for job in plan_jobs(plan, PAPER, 1, Path())
        if isinstance(job.run.data.imbalance, StepImbalance)
    }
    assert imbalanced == {"table1", "table2", "figure1", "cifar10"}


def test_tables_but_for_the_fast_one_have_autoattack():
    with_autoattack = {
        name for name, plan in PLANS.items() if "autoattack" in plan_jobs(plan, PAPER, 1, Path())[0].attacks
    }
    assert with_autoattack == {"table1", "table2", "table3", "cifar10"}
    jobs = plan_jobs(PLANS["table1"], PAPER, 1, Path(), autoattack=False)
    assert all(job.attacks == ("pgd", "margin") for job in jobs)


def test_figures_use_the_runs_of_the_tables():
    def runs(name):
        return {job.output: job.run for job in plan_jobs(PLANS[name], SMALL, 3, Path("runs/small"))}

    tables = {**runs("table1"), **runs("table2"), **runs("table3")}
    for number in range(1, 7):
        assert runs(f"figure{number}").items() <= tables.items()


def test_the_scales_evaluate_on_all_or_some_images():
    paper, small = (plan_jobs(PLANS["cifar10"], scale, 1, Path())[0] for scale in (PAPER, SMALL))
    assert paper.evaluate.images is None and paper.evaluate.autoattack_images is None and paper.evaluate.trust
    assert small.evaluate.images == 2000 and small.evaluate.autoattack_images == 200 and small.evaluate.trust
    assert small.run.validation.every == 2 and paper.run.validation.every == 5


def test_some_methods_and_the_folder_of_the_data_can_be_chosen():
    jobs = plan_jobs(PLANS["table1"], SMALL, 1, Path(), root="/data", methods=["done_pgd", "at"])
    names = ["cifar10.small.at", "cifar10.small.done_pgd"]
    names += [name.replace("10.", "10.imbalanced.") for name in names]
    assert [job.run.name for job in jobs] == names
    assert {job.run.data.root for job in jobs} == {"/data"}


def test_what_does_not_fit_is_refused(tmp_path):
    (job,) = plan_jobs(PLANS["figure2"], SMALL, 1, tmp_path)
    check_directories([job])
    other = replace(
        RECIPES["digits.at"](), epochs=1, batch_size=1024, method=RECIPES["digits.standard"]().method, device="cpu"
    )
    train_run(other, job.output)
    for call, message in [
        (lambda: plan_jobs(PLANS["table2"], SMALL, 1, Path(), methods=["at", "trades"]), "the plan has no method 'tr"),
        (lambda: plan_jobs(PLANS["table2"], SMALL, 0, Path()), "seeds are at least 1, got 0"),
        (lambda: check_directories([job]), r"done_adam-s0 holds a run of another configuration .*: move it away, or"),
    ]:
        with pytest.raises(UsageError, match=message):
            call()

"""Which runs a table or figure takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from doubly.data import StepImbalance
from doubly.errors import UsageError
from doubly.recipes import RECIPES
from doubly.studies.plans import PLANS, SCALES, check, jobs
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


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_its_runs(name, scale):
    found = jobs(PLANS[name], SCALES[scale], 2, Path("runs"))
    assert len(found) == 2 * COUNTS[name] == len({job.output for job in found})
    for job in found:
        assert job.run.name in RECIPES and (".small." in job.run.name) == (scale == "small")
        assert job.output == Path("runs") / f"{job.run.name}-s{job.run.seed}"
    assert [job.run.seed for job in found] == [0] * COUNTS[name] + [1] * COUNTS[name]  # whole tables first


def test_what_is_thinned_out_is_what_the_paper_thins_out():
    for name, plan in PLANS.items():
        for job in jobs(plan, PAPER, 1, Path()):
            thinned = isinstance(job.run.data.imbalance, StepImbalance)
            assert thinned == (".imbalanced." in job.run.name)
            assert not thinned or name in ("table1", "table2", "figure1", "cifar10")


def test_tables_have_autoattack_but_for_the_fast_one_and_figures_none():
    with_it = {name for name, plan in PLANS.items() if "autoattack" in jobs(plan, PAPER, 1, Path())[0].attacks}
    assert with_it == {"table1", "table2", "table3", "cifar10"}
    assert all(job.attacks == ("pgd", "margin") for job in jobs(PLANS["table1"], PAPER, 1, Path(), autoattack=False))


def test_figures_find_the_runs_of_the_tables():
    tables = {job.output: job.run for name in ("table1", "table2", "table3") for job in jobs_of(name)}
    for number in range(1, 7):
        assert all(tables[job.output] == job.run for job in jobs_of(f"figure{number}"))


def jobs_of(name):
    return jobs(PLANS[name], SMALL, 3, Path("runs/small"))


def test_the_scales_measure_as_they_say():
    paper, small = (jobs(PLANS["cifar10"], scale, 1, Path())[0] for scale in (PAPER, SMALL))
    assert paper.measure.images is None and paper.measure.autoattack_images is None and paper.measure.trust
    assert small.measure.images == 2000 and small.measure.autoattack_images == 200 and small.measure.trust
    assert small.run.validation.every == 2 and paper.run.validation.every == 5


def test_methods_can_be_narrowed_and_data_placed():
    found = jobs(PLANS["table1"], SMALL, 1, Path(), root="/data", methods=["done_pgd", "at"])
    names = ["cifar10.small.at", "cifar10.small.done_pgd"]
    names += [name.replace("10.", "10.imbalanced.") for name in names]
    assert [job.run.name for job in found] == names
    assert {job.run.data.root for job in found} == {"/data"}


def test_a_method_that_the_plan_lacks_is_refused():
    with pytest.raises(UsageError, match="the plan has no method 'trades': valid are at, done_adam"):
        jobs(PLANS["table2"], SMALL, 1, Path(), methods=["at", "trades"])
    with pytest.raises(UsageError, match="seeds are at least 1, got 0"):
        jobs(PLANS["table2"], SMALL, 0, Path())


def test_a_directory_that_holds_another_run_is_refused_before_any_work(tmp_path, monkeypatch):
    (job, *_) = jobs(PLANS["figure2"], SMALL, 1, tmp_path)
    check([job])
    tiny = RECIPES["digits.at"]()
    tiny = replace(tiny, epochs=1, batch=1024, method=RECIPES["digits.standard"]().method)
    train_run(tiny, job.output)
    with pytest.raises(UsageError, match=r"done_adam-s0 holds a run of another configuration .*: move it away, or"):
        check([job])

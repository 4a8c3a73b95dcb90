import json
from io import StringIO

import pytest
from rich.console import Console

from doubly.checkpoints.load import load_run
from doubly.cli import main
from doubly.config.serialize import from_json, to_json
from doubly.data import Digits, Images, Splits
from doubly.errors import UsageError
from doubly.jobs.search import Search, default_space, search_all, with_changes
from doubly.recipes import RECIPES, recipe
from doubly.rundir import RunDir, append_metrics, read_json, read_metrics, write_json

TINY = {
    "epochs": 1,
    "batch": 512,
    "model.width": 2,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "optimizer.lr.peak": 0.05,
}
SPACE = {"optimizer.weight_decay": [5e-4, 2e-3, 5e-3], "epochs": [1, 2], "method.loss": ["loss.cross_entropy"]}


def search(output, space=SPACE, name="digits.at", **settings):
    return Search(with_changes(recipe(name), TINY), space, output, **{"trials": 4, "splits": 2, **settings})


# --- which points are tried ------------------------------------------------------------------------------------------


def test_equal_spaces_give_the_same_points_whatever_the_method(tmp_path):
    first, second = search(tmp_path / "a"), search(tmp_path / "b", name="digits.imbalanced.done_gd")
    assert first.candidates() == second.candidates() == first.candidates()
    assert search(tmp_path, trials=3).candidates() == first.candidates()[:3]


@pytest.mark.parametrize("trials", range(1, 7))
def test_all_points_are_different_and_of_the_grid(tmp_path, trials):
    found = search(tmp_path, trials=trials).candidates()
    assert len(found) == trials == len({json.dumps(point) for point in found})
    assert all(
        list(point) == list(SPACE) and all(value in SPACE[path] for path, value in point.items()) for point in found
    )


def test_more_trials_than_points_are_refused(tmp_path):
    with pytest.raises(UsageError, match="7 trials asked for, but the grid has only 6 points"):
        search(tmp_path, trials=7).candidates()
    twice = {"optimizer.weight_decay": [0.0, 0.0, 0.1]}  # two points, not three: a third would be sought for ever
    assert len(search(tmp_path, twice, trials=2).candidates()) == 2
    with pytest.raises(UsageError, match="only 2 points"):
        search(tmp_path, twice, trials=3).candidates()


@pytest.mark.parametrize("settings", [{"trials": 0}, {"splits": 0}])
def test_nothing_to_try_is_refused(tmp_path, settings):
    with pytest.raises(UsageError, match="at least 1"):
        search(tmp_path, **settings)


def test_a_field_that_does_not_exist_is_named_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    with pytest.raises(UsageError, match="did you mean 'weight_decay'"):
        search_all([search(tmp_path, {"optimizer.weight_decai": [1.0]}, trials=1)], 1, Console(file=StringIO()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_default_space_fits_every_recipe_and_holds_its_own_numbers(name, tmp_path):
    run = recipe(name)
    space = default_space(run)
    assert all(len(values) == 3 == len(set(values)) for values in space.values()) and len(space) == 3
    own = {"epochs": run.epochs, "optimizer.weight_decay": run.optimizer.weight_decay}
    own["optimizer.lr.peak"] = run.optimizer.lr.peak
    assert all(own[path] in values for path, values in space.items())
    assert with_changes(run, own) == run
    assert len(Search(run, space, tmp_path).jobs()) == 12


# --- what a trial is -------------------------------------------------------------------------------------------------


def test_a_trial_is_the_point_on_each_holdout_and_never_evaluated(tmp_path):
    searched = search(tmp_path, holdout=0.3)
    for trial, (point, jobs) in enumerate(zip(searched.candidates(), searched.jobs(), strict=True)):
        assert [job.output.name for job in jobs] == [f"trial-{trial:02d}-split-{split}" for split in (0, 1)]
        for split, job in enumerate(jobs):
            assert with_changes(job.run, point) == job.run and job.measure is None
            assert (job.run.data.holdout, job.run.data.split, job.run.seed) == (0.3, split, split)
            assert job.run.validation.every == job.run.epochs  # after the last epoch alone


def test_the_test_images_take_no_part(tmp_path, inline, monkeypatch):
    space = {"optimizer.weight_decay": [5e-4, 5e-2]}
    genuine, found = Digits.load, {}

    def other(self, root=None):
        splits = genuine(self, root)
        test = splits.test
        return Splits(splits.train, Images(255 - test.x, (test.y + 1) % 10, test.classes, test.ids))

    for name, load in (("a", genuine), ("b", other)):
        monkeypatch.setattr(Digits, "load", load)
        search_all([search(tmp_path / name, space, trials=2)], 1, Console(file=StringIO()))
        found[name] = (tmp_path / name / "search.json").read_bytes()
    assert found["a"] == found["b"]
    rows = [row for path in tmp_path.rglob("metrics.jsonl") for row in read_metrics(path)]
    assert len(rows) == 8 and {row["validation"]["on"] for row in rows} == {"holdout"}
    assert {row["validation"]["n"] for row in rows} == {359}  # a quarter of the 1,437 that fold 0 trains on
    assert not list(tmp_path.rglob("evaluation.json"))
    assert {run.data.source for run in map(load_run, tmp_path.glob("*/trial-*"))} == {Digits(0, 5)}


# --- who wins --------------------------------------------------------------------------------------------------------


def pretend(job, ra_pgd, ra_tail_30):
    """The files that training would have written."""
    job.output.mkdir(parents=True)
    write_json(RunDir(job.output).config, to_json(job.run))
    validation = {"on": "holdout", "n": 359, "sa": 0.9, "ra_pgd": ra_pgd, "ra_tail_30": ra_tail_30}
    for epoch in range(job.run.epochs):
        last = epoch == job.run.epochs - 1
        append_metrics(RunDir(job.output), {"epoch": epoch, **({"validation": validation} if last else {})})


SCORES = [[(0.5, 0.1), (0.7, 0.3)], [(0.6, 0.4), (0.8, 0.2)], [(0.9, 0.2), (0.1, 0.1)], [(0.99, 0.99), None]]


def test_the_winner_has_the_highest_mean_and_what_failed_counts_zero(tmp_path):
    searched = search(tmp_path)
    for jobs, scores in zip(searched.jobs(), SCORES, strict=True):
        for job, score in zip(jobs, scores, strict=True):
            if score is not None:
                pretend(job, *score)
    found = searched.result()
    assert [row["score"] for row in found["trials"]] == pytest.approx([0.4, 0.5, 0.325, 0.495])
    assert [row["changes"] for row in found["trials"]] == searched.candidates()
    assert found["winner"] == searched.candidates()[1]
    assert found["trials"][3]["holdouts"] == [{"n": 359, "sa": 0.9, "ra_pgd": 0.99, "ra_tail_30": 0.99}, None]
    assert read_json(tmp_path / "search.json") == found
    assert (found["recipe"], found["space"], found["holdout"]) == ("digits.at", SPACE, 0.25)


def test_a_run_that_ended_early_counts_zero(tmp_path):
    searched = search(tmp_path, {"epochs": [2]}, trials=1, splits=1)
    ((job,),) = searched.jobs()
    pretend(job, 0.9, 0.9)
    rows = RunDir(job.output).metrics.read_text().splitlines(keepends=True)
    RunDir(job.output).metrics.write_text(rows[0])
    assert searched.result()["trials"] == [{"changes": {"epochs": 2}, "score": 0.0, "holdouts": [None]}]


def test_trials_of_another_search_in_the_folder_count_zero_and_are_named(tmp_path, inline):
    other = search(tmp_path, {"optimizer.weight_decay": [1e-3]}, trials=1, splits=1)
    ((job,),) = other.jobs()
    pretend(job, 0.9, 0.9)
    assert other.result()["trials"][0]["score"] == pytest.approx(0.9)
    said = StringIO()
    mine = search(tmp_path, {"optimizer.weight_decay": [1e-1]}, trials=1, splits=1)
    (found,) = search_all([mine], 1, Console(file=said))
    assert found["trials"][0]["score"] == 0 and "failed and scores 0" in said.getvalue()
    assert "begun with another configuration (optimizer.weight_decay: 0.001 -> 0.1)" in said.getvalue()


# --- on the command line ---------------------------------------------------------------------------------------------


def test_search_on_the_command_line_and_its_winner_trains(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("doubly.cli.OUT", Console(width=200))  # room for one line per trial
    space = {path: [value] for path, value in TINY.items()} | {"optimizer.lr.peak": [0.05, 1e30]}  # one diverges
    write_json(tmp_path / "space.json", space)
    words = ["search", "digits.at", "--space", "space.json", "--trials", "2", "--splits", "1", "--jobs", "1"]
    assert main([*words, "--output", "found"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "RA-Tail-30" in out and "digits.at: hold-out, best first" in out
    assert "NaN or infinite" in out and out.count("failed and scores 0") == 1
    assert out.rstrip().endswith("now: doubly train --config found/winner.json")
    found = read_json(tmp_path / "found" / "search.json")
    scores = {row["changes"]["optimizer.lr.peak"]: row["score"] for row in found["trials"]}
    assert scores[1e30] == 0 < scores[0.05] <= 1 and found["winner"]["optimizer.lr.peak"] == 0.05
    assert f"{100 * scores[0.05]:.1f} %" in out
    winner = with_changes(recipe("digits.at"), found["winner"])
    assert from_json(read_json(tmp_path / "found" / "winner.json")) == winner
    assert winner.data.holdout == 0  # retrained on all training images
    assert main(["train", "--config", "found/winner.json", "--output", "trained"]) == 0
    assert load_run(tmp_path / "trained") == winner and len(read_metrics(tmp_path / "trained" / "metrics.jsonl")) == 1


@pytest.mark.parametrize("text", ["[1, 2]", '{"epochs": 3}', '{"epochs": []}'])
def test_a_space_of_another_form_is_refused(tmp_path, capfd, text):
    (tmp_path / "space.json").write_text(text)
    assert main(["search", "digits.at", "--space", str(tmp_path / "space.json"), "--output", str(tmp_path)]) == 2
    assert "must map dotted fields to lists of values" in capfd.readouterr().err

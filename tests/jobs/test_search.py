import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from doubly.checkpoints.load import load_run
from doubly.config import Adam, AdamW
from doubly.config.serialize import to_json, with_changes
from doubly.data import Digits, Images, Splits
from doubly.errors import UsageError
from doubly.jobs.search import Search, default_space, run_searches
from doubly.recipes import RECIPES, recipe
from doubly.rundir import RunDir, append_metrics, read_json, read_metrics, write_json
from doubly.schedules import Constant

TINY = {
    "epochs": 1,
    "batch_size": 512,
    "model.width": 2,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "optimizer.lr.peak": 0.05,
}
SPACE = {"optimizer.weight_decay": [5e-4, 2e-3, 5e-3], "epochs": [1, 2], "method.loss": ["loss.cross_entropy"]}


def search(output, space=SPACE, name="digits.at", **settings):
    return Search(with_changes(recipe(name), TINY), space, output, **{"trials": 4, "splits": 2, **settings})


def test_equal_spaces_give_the_same_different_points_whatever_the_method(tmp_path):
    first, second = search(tmp_path / "a"), search(tmp_path / "b", name="digits.imbalanced.done_gd")
    assert first.candidates() == second.candidates() == first.candidates()
    for trials in range(1, 7):
        points = search(tmp_path, trials=trials).candidates()
        assert points == search(tmp_path, trials=6).candidates()[:trials]
        assert len(points) == trials == len({json.dumps(point) for point in points})
        for point in points:
            assert list(point) == list(SPACE) and all(value in SPACE[path] for path, value in point.items())
    twice = {"optimizer.weight_decay": [0.0, 0.0, 0.1]}  # two points, not three
    assert len(search(tmp_path, twice, trials=2).candidates()) == 2


def test_what_cannot_be_searched_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    twice = {"optimizer.weight_decay": [0.0, 0.0, 0.1]}
    for space, settings, message in [
        (SPACE, {"trials": 7}, r"7 trials are more than the grid has points \(6\)"),
        (twice, {"trials": 3}, r"points \(2\)"),
        (SPACE, {"trials": 0}, "at least 1"),
        (SPACE, {"splits": 0}, "at least 1"),
        ({"optimizer.weight_decai": [1.0]}, {"trials": 1}, "did you mean 'weight_decay'"),
    ]:
        with pytest.raises(UsageError, match=message):
            run_searches([search(tmp_path, space, **settings)], 1, Console(file=StringIO()))
    assert list(tmp_path.iterdir()) == []


def test_the_default_space_is_around_the_settings_of_every_recipe(tmp_path):
    for name in RECIPES:
        run = recipe(name)
        space = default_space(run)
        settings = {
            "epochs": run.epochs,
            "optimizer.weight_decay": run.optimizer.weight_decay,
            "optimizer.lr.peak": run.optimizer.lr.peak,
        }
        assert list(space) == list(settings), name
        assert all(len(set(values)) == 3 and settings[path] in values for path, values in space.items()), name
        assert with_changes(run, settings) == run, name
    assert len(Search(run, space, tmp_path).jobs()) == 12


def test_the_default_space_has_what_the_optimizer_has():
    run, peaks = recipe("digits.at"), [0.5e-3, 1e-3, 2e-3]
    adamw = default_space(replace(run, optimizer=AdamW()))
    assert adamw["optimizer.weight_decay"] == [0.0025, 0.01, 0.04] and adamw["optimizer.lr.peak"] == peaks
    adam = default_space(replace(run, optimizer=Adam()))  # without weight decay
    assert list(adam) == ["epochs", "optimizer.lr.peak"] and adam["optimizer.lr.peak"] == peaks
    constant = default_space(replace(run, optimizer=AdamW(lr=Constant(0.1))))
    assert list(constant) == ["epochs", "optimizer.weight_decay"]


def test_a_trial_is_a_point_on_each_holdout_without_evaluation(tmp_path):
    searched = search(tmp_path, holdout=0.3, callbacks=(print,))
    for trial, (point, jobs) in enumerate(zip(searched.candidates(), searched.jobs(), strict=True)):
        assert [job.output.name for job in jobs] == [f"trial-{trial:02d}-split-{split}" for split in (0, 1)]
        for split, job in enumerate(jobs):
            assert with_changes(job.run, point) == job.run and job.evaluate is None and job.callbacks == (print,)
            assert (job.run.data.holdout, job.run.data.split, job.run.seed) == (0.3, split, split)
            assert job.run.validation.every == job.run.epochs  # after the last epoch only


def test_the_test_images_take_no_part(tmp_path, inline, monkeypatch):
    space = {"optimizer.weight_decay": [5e-4, 5e-2]}
    load, results = Digits.load, {}

    def load_other_test_images(self, root=None):
        splits = load(self, root)
        test = splits.test
        return Splits(splits.train, Images(255 - test.x, (test.y + 1) % 10, test.classes, test.ids))

    for name, function in (("a", load), ("b", load_other_test_images)):
        monkeypatch.setattr(Digits, "load", function)
        run_searches([search(tmp_path / name, space, trials=2)], 1, Console(file=StringIO()))
        results[name] = (tmp_path / name / "search.json").read_bytes()
    assert results["a"] == results["b"]
    rows = [row for path in tmp_path.rglob("metrics.jsonl") for row in read_metrics(path)]
    assert len(rows) == 8 and {row["validation"]["on"] for row in rows} == {"holdout"}
    assert {row["validation"]["n"] for row in rows} == {359}  # a quarter of the 1,437 that fold 0 trains on
    assert not list(tmp_path.rglob("evaluation.json"))
    assert {run.data.source for run in map(load_run, tmp_path.glob("*/trial-*"))} == {Digits(0, 5)}


def pretend(job, ra_pgd, ra_tail_30):
    """Write the files that training would write."""
    job.output.mkdir(parents=True)
    write_json(RunDir(job.output).config, to_json(job.run))
    validation = {"on": "holdout", "n": 359, "sa": 0.9, "ra_pgd": ra_pgd, "ra_tail_30": ra_tail_30}
    for epoch in range(job.run.epochs):
        last = epoch == job.run.epochs - 1
        append_metrics(RunDir(job.output), {"epoch": epoch, **({"validation": validation} if last else {})})


SCORES = [[(0.5, 0.1), (0.7, 0.3)], [(0.6, 0.4), (0.8, 0.2)], [(0.9, 0.2), (0.1, 0.1)], [(0.99, 0.99), None]]


def test_the_winner_has_the_highest_mean_and_a_failed_trial_scores_0(tmp_path):
    searched = search(tmp_path)
    for jobs, scores in zip(searched.jobs(), SCORES, strict=True):
        for job, score in zip(jobs, scores, strict=True):
            if score is not None:
                pretend(job, *score)
    result = searched.collect()
    assert [row["score"] for row in result["trials"]] == pytest.approx([0.4, 0.5, 0.325, 0.495])
    assert [row["changes"] for row in result["trials"]] == searched.candidates()
    assert result["winner"] == searched.candidates()[1]
    assert result["trials"][3]["holdouts"] == [{"n": 359, "sa": 0.9, "ra_pgd": 0.99, "ra_tail_30": 0.99}, None]
    assert read_json(tmp_path / "search.json") == result
    assert (result["recipe"], result["space"], result["holdout"]) == ("digits.at", SPACE, 0.25)


def test_a_trial_that_ended_early_scores_0(tmp_path):
    searched = search(tmp_path, {"epochs": [2]}, trials=1, splits=1)
    ((job,),) = searched.jobs()
    pretend(job, 0.9, 0.9)
    rows = RunDir(job.output).metrics.read_text().splitlines(keepends=True)
    RunDir(job.output).metrics.write_text(rows[0])
    assert searched.collect()["trials"] == [{"changes": {"epochs": 2}, "score": 0.0, "holdouts": [None]}]


def test_trials_of_another_search_in_the_folder_score_0_and_are_named(tmp_path, inline):
    other = search(tmp_path, {"optimizer.weight_decay": [1e-3]}, trials=1, splits=1)
    ((job,),) = other.jobs()
    pretend(job, 0.9, 0.9)
    assert other.collect()["trials"][0]["score"] == pytest.approx(0.9)
    printed = StringIO()
    searched = search(tmp_path, {"optimizer.weight_decay": [1e-1]}, trials=1, splits=1)
    (result,) = run_searches([searched], 1, Console(file=printed))
    assert result["trials"][0]["score"] == 0 and "failed and scores 0" in printed.getvalue()
    assert "begun with another configuration (optimizer.weight_decay: 0.001 -> 0.1)" in printed.getvalue()

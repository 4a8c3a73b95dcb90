"""A job in this process: when it is done, what its directory says, how it fails and stops."""

import shutil
from dataclasses import replace

import pytest

from doubly.callbacks import Callback
from doubly.config import SGD
from doubly.errors import Interrupted
from doubly.evaluation.config import EvalConfig
from doubly.jobs.job import Job, StopEvaluation, run_job
from doubly.rundir import RunDir, read_json, write_json
from doubly.schedules import Constant


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def finished(small_run, tmp_path_factory):
    """A job that has been trained and evaluated."""
    job = Job(small_run(), tmp_path_factory.mktemp("finished") / "run")
    assert run_job(job, never) is None
    return job


def copied(job, folder, **changes):
    """A copy of a job's directory whose evaluation.json has other values."""
    shutil.copytree(job.output, folder)
    write_json(RunDir(folder).evaluation, {**read_json(RunDir(folder).evaluation), **changes})
    return replace(job, output=folder)


def test_the_status_says_how_far_a_job_is(finished, tmp_path):
    assert finished.status == "done" and replace(finished, output=tmp_path / "nowhere").status == "to do"
    assert replace(finished, evaluate=EvalConfig()).status == "trained, to evaluate"  # without the checks of trust
    job = copied(finished, tmp_path / "stopped")
    metrics = RunDir(job.output).metrics
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    RunDir(job.output).evaluation.unlink()
    assert job.status == "stopped at epoch 1 of 2"


def test_an_evaluation_counts_if_it_is_what_the_job_asks_for(finished, tmp_path):
    for settings, attacks, done in [
        ({}, ("pgd",), True),
        ({"images": 360}, ("pgd", "margin"), True),
        ({"images": 10_000}, ("pgd", "margin"), True),  # there are only 360
        ({"images": 359}, ("pgd", "margin"), False),
        ({"trust": True}, ("pgd", "margin"), False),
        ({}, ("pgd", "margin", "autoattack"), False),
        ({}, ("pgd", "quick"), False),
    ]:
        job = replace(finished, evaluate=replace(EvalConfig(trust=False), **settings), attacks=attacks)
        assert job.is_done == done, (settings, attacks)
    job = copied(finished, tmp_path / "run", ra_aa=0.1, autoattack={"n": 20})
    for images, done in [(20, True), (30, False), (None, False)]:
        config = replace(job.evaluate, autoattack_images=images)
        assert replace(job, evaluate=config, attacks=("pgd", "margin", "autoattack")).is_done == done, images


def test_an_evaluation_of_something_else_does_not_count(finished, tmp_path):
    for number, (changes, done) in enumerate(
        [
            ({}, True),
            ({"epoch": 1}, False),
            ({"n": 100}, False),
            ({"protocol": {"attack": {"kind": "attack.pgd", "steps": 7}}}, False),
            ({"protocol": "by hand"}, False),
            ({"autoattack": None}, True),
        ]
    ):
        assert copied(finished, tmp_path / str(number), **changes).is_done == done, changes
    moved = replace(finished.run, data=replace(finished.run.data, root="/elsewhere"))
    assert replace(finished, run=moved).is_done  # where the data lie is not part of the run


def test_another_run_in_the_directory_is_not_taken_for_this_one(finished, small_run, tmp_path):
    for evaluate in (finished.evaluate, None):
        other = replace(finished, run=replace(finished.run, optimizer=SGD(Constant(0.05))), evaluate=evaluate)
        assert replace(finished, evaluate=evaluate).is_done and not other.is_done
        assert f"{other.output} was begun with another configuration (optimizer.lr" in run_job(other, never)
    write_json(tmp_path / "config.json", {"kind": "nonsense"})
    job = Job(small_run(), tmp_path)
    assert not job.is_done and "unknown kind 'nonsense'" in run_job(job, never)


def test_a_stopped_evaluation_continues_with_the_chunks_that_are_left(finished, tmp_path, monkeypatch):
    config = EvalConfig(trust=False, images=20, autoattack_images=4, autoattack_chunk_size=2)
    job = replace(copied(finished, tmp_path / "run"), evaluate=config, attacks=("pgd", "margin", "autoattack"))
    chunks, stopping = [], True

    def on_attack(callback, chunk, *details):
        chunks.append(chunk)
        if stopping and chunk == 1:
            raise Interrupted("stopped during the evaluation")

    monkeypatch.setattr(StopEvaluation, "on_attack", on_attack)
    assert "stopped during the evaluation" in run_job(job, never)
    assert not job.is_done and 0 in chunks
    stopping, _ = False, chunks.clear()
    assert run_job(job, never) is None
    assert job.is_done and 0 not in chunks and 1 in chunks
    assert read_json(RunDir(job.output).evaluation)["autoattack"]["n"] == 4


def test_an_evaluation_stops_when_asked_to():
    replies = [False, False, True, True]
    callback = StopEvaluation(lambda: replies.pop(0))
    callback.on_images(1, 2), callback.on_time_left(3.0)
    for call in (lambda: callback.on_images(1, 2), lambda: callback.on_time_left(None)):
        with pytest.raises(Interrupted):
            call()


class Recorder(Callback):
    """Records the calls, and the directory it was made for."""

    def __init__(self, path, events):
        self.path, self.events = path, events

    def on_epoch(self, row):
        self.events.append((self.path, "epoch", row["epoch"]))

    def on_images(self, done, total):
        self.events.append((self.path, "images", done))

    def close(self):
        self.events.append((self.path, "closed"))


def test_callbacks_hear_training_and_evaluation_and_are_closed(small_run, tmp_path):
    events = []
    job = Job(small_run(epochs=1), tmp_path / "run", callbacks=(lambda path: Recorder(path, events),))
    assert run_job(job, never) is None
    expected = [("epoch", 0), ("closed",), ("images", 360), ("closed",)]
    assert events == [(tmp_path / "run", *event) for event in expected]

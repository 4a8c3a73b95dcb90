"""Jobs in other processes. Starting one takes seconds, so one pool serves most tests."""

import os
import re
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from doubly.bridges.tensorboard import TensorBoard
from doubly.config import SGD
from doubly.errors import Interrupted, UsageError
from doubly.evaluation.api import evaluate_run
from doubly.jobs import pool as pool_module
from doubly.jobs.job import WITHOUT_TRUST, Job
from doubly.jobs.pool import run_jobs, thread_limit
from doubly.rundir import RunDir, read_json, read_metrics
from doubly.schedules import Constant
from doubly.training.loop import train_run


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


class Pool:
    """One call of `run_jobs`, with jobs in every state."""

    def __init__(self, folder: Path, small_run) -> None:
        self.folder, self.printed = folder, StringIO()
        attack = {"method": {"kind": "method.at", "attack": {"kind": "attack.pgd", "steps": 1}}}
        diverging = replace(small_run(), optimizer=SGD(Constant(1e30)))
        board = (TensorBoard.in_run_dir,)
        self.jobs = {
            "done": Job(small_run(seed=1), folder / "done"),
            "diverges": Job(diverging, folder / "diverges"),
            "refused": Job(small_run(), folder / "refused"),
            "new": Job(small_run(**attack), folder / "new", callbacks=board),
            "stopped": Job(small_run(**attack), folder / "stopped"),
            "trained": Job(small_run(seed=2), folder / "trained", evaluate=None, callbacks=board),
        }
        (folder / "refused").mkdir()
        (folder / "refused" / "letter.txt").write_text("a file of the user")
        train_run(self.jobs["done"].run, folder / "done")
        evaluate_run(folder / "done", config=WITHOUT_TRUST)
        steps = iter(range(100))
        with pytest.raises(Interrupted):
            train_run(self.jobs["stopped"].run, folder / "stopped", stop=lambda: next(steps) == 3)
        self.before = contents(folder / "done")
        self.done_before = [name for name, job in self.jobs.items() if job.is_done]
        self.failures = run_jobs(list(self.jobs.values()), 1, Console(file=self.printed))


@pytest.fixture(scope="module")
def pool(tmp_path_factory, small_run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "core_count", lambda: 1)  # one thread for the one process, as in this one
        yield Pool(tmp_path_factory.mktemp("pool"), small_run)


def test_a_finished_job_is_skipped_and_its_files_stay_as_they_are(pool):
    assert pool.done_before == ["done"]
    assert contents(pool.folder / "done") == pool.before
    assert pool.printed.getvalue().startswith("1 of 6 runs are done already\n")


def test_failures_are_returned_and_do_not_stop_other_jobs(pool):
    assert pool.failures.keys() == {pool.folder / "diverges", pool.folder / "refused"}
    assert re.search(r"epoch 0, step \d+: .*NaN or infinite", pool.failures[pool.folder / "diverges"])
    refused = f"{pool.folder / 'refused'} is not empty (letter.txt): choose another --output"
    assert pool.failures[pool.folder / "refused"].endswith(refused)
    assert {name for name, job in pool.jobs.items() if job.is_done} == {"done", "new", "stopped", "trained"}
    assert not RunDir(pool.folder / "refused").config.exists()


def test_a_job_has_the_results_of_the_run_by_itself_also_after_a_stop(pool, tmp_path, saved_run):
    train_run(pool.jobs["new"].run, tmp_path)
    evaluate_run(tmp_path, config=WITHOUT_TRUST)
    for name in ("new", "stopped"):
        saved = saved_run(pool.folder / name)
        assert saved == saved_run(tmp_path)
        assert saved.info["choices"] == {"channels_last": False, "threads": 1, "processes": 1}
        assert read_json(RunDir(pool.folder / name).evaluation) == read_json(RunDir(tmp_path).evaluation)


def test_a_job_without_evaluation_leaves_the_test_images_alone(pool):
    assert pool.jobs["trained"].epochs_done == 2
    assert not RunDir(pool.folder / "trained").evaluation.exists()
    assert not replace(pool.jobs["trained"], evaluate=WITHOUT_TRUST).is_done


def test_callbacks_are_made_in_the_workers(pool):
    for name in ("new", "trained"):
        rows = read_metrics(RunDir(pool.folder / name).metrics)
        losses = EventAccumulator(str(pool.folder / name / "tensorboard")).Reload().Scalars("train/loss")
        assert [event.step for event in losses] == [0, 1]
        assert [event.value for event in losses] == pytest.approx([row["loss"] for row in rows])
    assert not (pool.folder / "stopped" / "tensorboard").exists()


def test_each_job_that_ends_prints_a_line(pool):
    lines = pool.printed.getvalue().splitlines()[1:6]
    outputs = [str(job.output) for name, job in pool.jobs.items() if name != "done"]
    assert sorted(line.split(": ")[1] for line in lines) == sorted(outputs)
    assert [line.split(": ")[0] for line in lines] == [f"{number} of 5" for number in range(1, 6)]


def test_no_process_is_started_if_all_jobs_are_done(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "ProcessPoolExecutor", None)
    before = contents(pool.folder)
    assert run_jobs([job for job in pool.jobs.values() if job.is_done], 1, Console(file=StringIO())) == {}
    assert contents(pool.folder) == before


def test_a_killed_process_costs_its_job_a_step_at_most(tmp_path, monkeypatch, small_run, saved_run, killed_after_epoch):
    """Another job runs beside it; the killed one resumes to the same bits, without a row twice."""
    monkeypatch.setattr(pool_module, "core_count", lambda: 2)
    monkeypatch.setattr(pool_module, "ProcessPoolExecutor", ProcessPoolExecutor)  # whatever other tests put there
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    dying = Job(small_run(epochs=6, save_seconds=0.0), tmp_path / "dying", None)
    other = Job(small_run(seed=3), tmp_path / "other", None)
    with killed_after_epoch(dying.output, 2):
        assert run_jobs([dying, other], 2, Console(file=StringIO())) == {}
    train_run(replace(dying.run, save_seconds=20.0), tmp_path / "alone")
    assert saved_run(dying.output) == saved_run(tmp_path / "alone")
    assert [row["epoch"] for row in saved_run(dying.output).rows] == list(range(6))
    assert other.is_done and saved_run(other.output).info["choices"]["threads"] == 1


class BrokenPool(ProcessPoolExecutor):
    def submit(self, work, *arguments):
        future = Future()
        future.set_exception(BrokenProcessPool("a child process terminated abruptly"))
        return future


def test_a_job_that_dies_again_and_again_fails(tmp_path, monkeypatch, small_run):
    monkeypatch.setattr(pool_module, "ProcessPoolExecutor", BrokenPool)
    message = run_jobs([Job(small_run(), tmp_path)], 1, Console(file=StringIO()))[tmp_path]
    assert message.startswith("died 3 times") and "run fewer jobs at a time" in message


def test_processes_get_their_threads_from_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with thread_limit(3):
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "7" and "MKL_NUM_THREADS" not in os.environ


def test_what_cannot_run_is_refused(tmp_path, small_run):
    for job, processes, message in [
        (Job(small_run(), tmp_path / "run"), 0, "at least 1 process, got 0"),
        (
            Job(small_run(), tmp_path / "run", callbacks=(lambda path: None,)),
            1,
            "give callbacks as functions or classes",
        ),
    ]:
        with pytest.raises(UsageError, match=message):
            run_jobs([job], processes, Console(file=StringIO()))
    assert not (tmp_path / "run").exists()

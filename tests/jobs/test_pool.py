import json
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from doubly.config import SGD, Run
from doubly.config.serialize import from_json
from doubly.errors import Interrupted, UsageError
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.run_directory import evaluate_run
from doubly.jobs import pool as pool_module
from doubly.jobs.pool import Job, run_jobs
from doubly.rundir import RunDir, read_json, read_metrics, write_json
from doubly.schedules import Constant
from doubly.training.loop import train_run

SMALL = {
    "kind": "run",
    "data": {"kind": "data", "source": {"kind": "dataset.digits"}},
    "model": {"kind": "model.small_cnn", "width": 2},
    "method": {"kind": "method.at", "attack": {"kind": "attack.pgd", "steps": 1}},
    "validation": {"kind": "validation", "every": 2, "size": 20, "attack": {"kind": "attack.pgd", "steps": 1}},
    "epochs": 2,
    "batch": 512,
    "device": "cpu",
    "channels_last": "no",
}


def small(**changes) -> Run:
    return replace(from_json(SMALL), **changes)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below, and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def without_seconds(path: Path) -> list[dict]:
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "peak_memory")}
        for row in read_metrics(path)
    ]


class Pool:
    """One call of `run_jobs` for the whole file, since a process takes seconds to start: jobs of every fate."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, StringIO()
        self.jobs = {
            "done": Job(small(seed=1), folder / "done"),
            "diverges": Job(small(optimizer=SGD(Constant(1e30))), folder / "diverges"),
            "refused": Job(small(), folder / "refused"),
            "whole": Job(small(), folder / "whole"),
            "cut": Job(small(), folder / "cut"),
            "trained": Job(small(seed=2), folder / "trained", measure=None),
        }
        (folder / "refused").mkdir()
        (folder / "refused" / "letter.txt").write_text("dear diary")
        train_run(self.jobs["done"].run, folder / "done")
        evaluate_run(folder / "done")
        count = iter(range(100))
        with pytest.raises(Interrupted):
            train_run(self.jobs["cut"].run, folder / "cut", stop=lambda: next(count) == 3)
        self.before = contents(folder / "done")
        self.at_first = {name: job.done for name, job in self.jobs.items()}
        self.failures = run_jobs(list(self.jobs.values()), 1, Console(file=self.said))


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "cores", lambda: 1)  # one thread for the one process, as in this one
        return Pool(tmp_path_factory.mktemp("pool"))


def test_what_is_done_is_skipped_and_nothing_of_it_rewritten(pool):
    assert pool.at_first == {name: name == "done" for name in pool.jobs}
    assert contents(pool.folder / "done") == pool.before
    assert pool.said.getvalue().startswith("1 of 6 runs are done already\n")


def test_a_failure_is_reported_with_its_sentence_and_stops_nobody(pool):
    assert pool.failures.keys() == {pool.folder / "diverges", pool.folder / "refused"}
    assert re.search(r"epoch 0, step \d+: .*NaN or infinite", pool.failures[pool.folder / "diverges"])
    refused = f"{pool.folder / 'refused'} is not empty (letter.txt): choose another --output"
    assert pool.failures[pool.folder / "refused"].endswith(refused)
    assert {name for name, job in pool.jobs.items() if job.done} == {"done", "whole", "cut", "trained"}
    assert not pool.jobs["refused"].epochs_done and not RunDir(pool.folder / "refused").config.exists()


def test_the_results_are_those_of_the_run_alone(pool, tmp_path, same_bits, tiny):
    train_run(small(), tmp_path)
    evaluate_run(tmp_path, how=EvalConfig(trust=False))
    found = pool.folder / "whole"
    assert same_bits(tiny.checkpoint(found)[0], tiny.checkpoint(tmp_path)[0])
    choices = {"channels_last": False, "compile": False, "threads": 1, "processes": 1}
    assert tiny.checkpoint(found)[1]["choices"] == choices
    assert read_json(RunDir(found).evaluation) == read_json(RunDir(tmp_path).evaluation)
    assert without_seconds(RunDir(found).metrics) == without_seconds(RunDir(tmp_path).metrics)


def test_what_was_cut_is_resumed_to_the_same_bits(pool, same_bits, tiny):
    cut, whole = pool.folder / "cut", pool.folder / "whole"
    assert same_bits(tiny.checkpoint(cut)[0], tiny.checkpoint(whole)[0])
    assert read_json(RunDir(cut).evaluation) == read_json(RunDir(whole).evaluation)
    assert without_seconds(RunDir(cut).metrics) == without_seconds(RunDir(whole).metrics)


def test_a_job_that_is_only_trained_leaves_the_test_images_alone(pool):
    assert pool.jobs["trained"].epochs_done == 2
    assert not RunDir(pool.folder / "trained").evaluation.exists()
    assert not replace(pool.jobs["trained"], measure=EvalConfig()).done


def test_every_run_gets_a_line(pool):
    lines = pool.said.getvalue().splitlines()[1:]
    outputs = [str(job.output) for name, job in pool.jobs.items() if name != "done"]
    assert sorted(line.split(": ")[1] for line in lines[:5]) == sorted(outputs)
    assert [line.split(": ")[0] for line in lines[:5]] == [f"{number} of 5" for number in range(1, 6)]


def test_what_is_all_done_starts_no_process(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "ProcessPoolExecutor", None)
    before = contents(pool.folder)
    assert run_jobs([job for job in pool.jobs.values() if job.done], 1, Console(file=pool.said)) == {}
    assert contents(pool.folder) == before


@pytest.mark.parametrize("measure", [EvalConfig(trust=False), None])
def test_the_numbers_of_another_run_are_not_taken_for_those_of_this_one(pool, inline, measure):
    """The directory of a changed recipe, or of a search in another space."""
    other = Job(small(optimizer=SGD(Constant(0.05))), pool.folder / "whole", measure)
    assert Job(small(), pool.folder / "whole", measure).done and not other.done
    said = run_jobs([other], 1, Console(file=StringIO()))[other.output]
    assert f"{other.output} was begun with another configuration (optimizer.lr" in said


def test_a_damaged_configuration_is_a_sentence_too(tmp_path, inline):
    write_json(tmp_path / "config.json", {"kind": "nonsense"})
    job = Job(small(), tmp_path)
    assert not job.done
    assert "unknown kind 'nonsense'" in run_jobs([job], 1, Console(file=StringIO()))[tmp_path]


def killed(job: Job, deaths: list[int]) -> None:
    """Kill the process that trains the job after each of these epochs."""
    state, lock = job.output / "checkpoints" / "last" / "state.json", job.output / ".lock"
    end, before = time.monotonic() + 180, ""
    for epoch in deaths:
        while time.monotonic() < end:
            try:
                process = lock.read_text()
                if process and process != before and json.loads(state.read_text())["epoch"] >= epoch:
                    break
            except (FileNotFoundError, ValueError):  # not begun, or between two renames
                pass
            time.sleep(0.02)
        assert int(process) != os.getpid()
        os.kill(int(process), signal.SIGKILL)
        before = process


def test_a_process_that_is_killed_costs_its_own_run_the_step_at_most(tmp_path, monkeypatch, same_bits, tiny):
    """Beside it another run goes on; what died goes on from its checkpoint to the same bits, without a row twice."""
    monkeypatch.setattr(pool_module, "cores", lambda: 2)
    monkeypatch.setattr(pool_module, "ProcessPoolExecutor", ProcessPoolExecutor)  # whatever other tests put there
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    dying = Job(small(epochs=6, save_seconds=0.0), tmp_path / "dying", None)
    other = Job(small(seed=3), tmp_path / "other", None)
    killer = threading.Thread(target=killed, args=(dying, [2]))
    killer.start()
    assert run_jobs([dying, other], 2, Console(file=StringIO())) == {}
    killer.join()
    assert [row["epoch"] for row in read_metrics(RunDir(dying.output).metrics)] == list(range(6))
    train_run(replace(dying.run, save_seconds=20.0), tmp_path / "alone")
    assert same_bits(tiny.checkpoint(dying.output)[0], tiny.checkpoint(tmp_path / "alone")[0])
    assert other.done and tiny.checkpoint(other.output)[1]["choices"]["threads"] == 1


class Deadly(ProcessPoolExecutor):
    """A pool that is broken."""

    def submit(self, work, *arguments):
        future = Future()
        future.set_exception(BrokenProcessPool("a child process terminated abruptly"))
        return future


def test_a_run_that_dies_again_and_again_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "ProcessPoolExecutor", Deadly)
    said = run_jobs([Job(small(), tmp_path)], 1, Console(file=StringIO()))[tmp_path]
    assert said.startswith("died 3 times") and "run fewer jobs at a time" in said


def test_the_threads_are_pinned_before_anything_is_imported(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with pool_module.pinned(3):
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "7" and "MKL_NUM_THREADS" not in os.environ


def test_no_processes_are_refused(tmp_path):
    with pytest.raises(UsageError, match="at least 1 process, got 0"):
        run_jobs([Job(small(), tmp_path)], 0, Console(file=StringIO()))


def test_a_job_says_how_far_it_is(pool, tmp_path):
    job = pool.jobs["whole"]
    assert job.state == "done" and replace(job, output=tmp_path / "nowhere").state == "to do"
    assert replace(job, measure=EvalConfig()).state == "trained, to measure"  # the panel of trust is missing
    shutil.copytree(job.output, tmp_path / "cut")
    RunDir(tmp_path / "cut").metrics.write_text(RunDir(job.output).metrics.read_text().splitlines()[0] + "\n")
    RunDir(tmp_path / "cut").evaluation.unlink()
    assert replace(job, output=tmp_path / "cut").state == "cut at epoch 1 of 2"


@pytest.mark.parametrize(
    ("asked", "attacks", "done"),
    [
        ({}, ("pgd",), True),
        ({"images": 360}, ("pgd", "margin"), True),
        ({"images": 10_000}, ("pgd", "margin"), True),  # there are no more than 360
        ({"images": 359}, ("pgd", "margin"), False),
        ({"trust": True}, ("pgd", "margin"), False),
        ({}, ("pgd", "margin", "autoattack"), False),
        ({}, ("pgd", "quick"), False),
    ],
)
def test_what_was_measured_counts_if_it_is_what_is_asked_for(pool, asked, attacks, done):
    how = replace(EvalConfig(trust=False), **asked)
    assert replace(pool.jobs["whole"], measure=how, attacks=attacks).done == done


def changed(job, folder, **changes):
    """A copy of a job's directory whose evaluation.json says something else."""
    shutil.copytree(job.output, folder)
    write_json(RunDir(folder).evaluation, {**read_json(RunDir(folder).evaluation), **changes})
    return replace(job, output=folder)


def test_autoattack_counts_on_as_many_images(pool, tmp_path):
    job = changed(pool.jobs["whole"], tmp_path / "run", ra_aa=0.1, autoattack={"n": 20})
    job = replace(job, attacks=("pgd", "margin", "autoattack"))
    wanted = [replace(job.measure, autoattack_images=n) for n in (20, 30, None)]
    assert [replace(job, measure=how).done for how in wanted] == [True, False, False]
    assert replace(job, attacks=("pgd",)).done  # more than is asked for


@pytest.mark.parametrize(
    ("changes", "done"),
    [
        ({"epoch": 1}, False),
        ({"n": 100}, False),
        ({"n": 100, "test_images": None}, True),  # of a time before that was written: believed
        ({"protocol": {"attack": {"kind": "attack.pgd", "steps": 7}}}, False),
        ({"protocol": "by hand"}, False),
        ({"autoattack": None}, True),
    ],
)
def test_an_evaluation_of_something_else_does_not_count(pool, tmp_path, changes, done):
    assert changed(pool.jobs["whole"], tmp_path / "run", **changes).done == done


def test_a_run_whose_data_lie_elsewhere_now_is_still_done(pool):
    job = pool.jobs["whole"]
    assert replace(job, run=replace(job.run, data=replace(job.run.data, root="/elsewhere"))).done


def test_an_evaluation_that_was_stopped_goes_on(pool, tmp_path, inline, monkeypatch):
    """Asked to stop while AutoAttack runs, the worker ends, and the next takes the chunks that are finished."""
    shutil.copytree(pool.folder / "whole", tmp_path / "run")
    how = EvalConfig(trust=False, images=20, autoattack_images=4, autoattack_chunk=2, compile="no")
    job = replace(pool.jobs["whole"], output=tmp_path / "run", measure=how, attacks=("pgd", "margin", "autoattack"))
    chunks = []

    def ticking(watch, chunk, of, part, standing, left):
        chunks.append(chunk)
        if chunk == 1 and len(chunks) < 100:
            chunks.extend([chunk] * 100)
            raise Interrupted("stopped while measuring")

    monkeypatch.setattr(pool_module._Stopping, "attack", ticking)
    assert "stopped while measuring" in run_jobs([job], 1, Console(file=StringIO()))[job.output]
    assert not job.done and 0 in chunks
    chunks[:] = [None] * 100
    assert run_jobs([job], 1, Console(file=StringIO())) == {}
    assert job.done and 0 not in chunks and 1 in chunks
    assert read_json(RunDir(job.output).evaluation)["autoattack"]["n"] == 4


def test_a_pool_that_is_to_end_ends_what_measures():
    event = threading.Event()
    watch = pool_module._Stopping(event.is_set)
    watch.images(1, 2), watch.left(3.0)
    event.set()
    for call in (lambda: watch.images(1, 2), lambda: watch.left(None)):
        with pytest.raises(Interrupted):
            call()

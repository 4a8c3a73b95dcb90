"""Jobs on Ray: the logic with a stand-in for the package; slow, and with the package, a process that is killed."""

import os
import signal
import sys
from concurrent.futures import Future
from io import StringIO
from types import ModuleType

import pytest
from rich.console import Console

from doubly.errors import Interrupted, UsageError
from doubly.jobs.job import Job
from doubly.jobs.ray import run_on_ray
from doubly.training.loop import train_run


class FakeRay(ModuleType):
    """Does a task in this process when it is submitted; those named in `lost` die with their node."""

    def __init__(self, nodes, lost=()):
        super().__init__("ray")
        self.resources, self.lost, self.calls, self.task_options = nodes, lost, [], {}

    def init(self, **options):
        if options["address"] == "auto":
            raise ConnectionError("Could not find any running Ray instance.\nmore")
        self.calls.append(("init", options["address"]))

    def shutdown(self):
        self.calls.append("shutdown")

    def nodes(self):
        dead = {"Alive": False, "Resources": {"CPU": 1000.0, "GPU": 8.0}}
        return [dead, *({"Alive": True, "Resources": node} for node in self.resources)]

    def remote(self, function):
        self.function = function
        return self

    def options(self, **options):
        self.task_options = options
        task = ModuleType("task")
        task.remote = self.submit
        return task

    def submit(self, threads, job):
        reference, future = ModuleType("reference"), Future()
        reference.future = lambda: future
        if job.output.name in self.lost:
            future.set_exception(RuntimeError("the node is gone\nmore"))
        elif job.output.name == "interrupted":  # does not end, and a signal comes
            os.kill(os.getpid(), signal.SIGTERM)
        elif job.output.name != "pending":
            future.set_result(self.function(threads, job))
        return reference

    def cancel(self, reference):
        self.calls.append("cancel")

    def wait(self, references, num_returns, timeout):
        self.calls.append(("wait", num_returns, timeout))


@pytest.fixture
def on_ray(monkeypatch, tmp_path):
    """`run_on_ray` with the stand-in, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(jobs, address="local", nodes=({"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}), lost=(), **options):
        call.ray = FakeRay(nodes, lost)
        monkeypatch.setitem(sys.modules, "ray", call.ray)
        return run_on_ray(jobs, address, Console(file=StringIO()), **options)

    return call


@pytest.fixture
def jobs(tmp_path, small_run):
    """Jobs with relative directories of these names."""
    return lambda *names: [Job(small_run(epochs=1), (tmp_path / name).relative_to(tmp_path), None) for name in names]


def test_jobs_are_tasks_and_failed_or_lost_ones_are_reported(on_ray, jobs, tmp_path, saved_run):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("a file of the user")
    failures = on_ray(jobs("fine", "full", "lost"), lost=("lost",), processes=9)
    assert failures.keys() == {tmp_path / "full", tmp_path / "lost"}  # absolute: nodes have other working folders
    assert "full is not empty (letter.txt)" in failures[tmp_path / "full"]
    assert failures[tmp_path / "lost"].startswith("died 3 times (RuntimeError: the node is gone): ")
    assert jobs("fine")[0].is_done and on_ray.ray.calls == [("init", "local"), "shutdown"]
    assert saved_run(tmp_path / "fine").info["choices"]["threads"] == 1
    assert on_ray(jobs("fine")) == {} and on_ray.ray.calls == []  # nothing to do, so no connection


def test_tasks_ask_for_their_share_of_the_cores(on_ray, jobs):
    """Nodes of 4 and of 2 cores, the second with a GPU."""
    for options, cpus, gpus in [
        ({}, 2, 0),
        ({"processes": 2}, 3, 0),
        ({"processes": 1}, 4, 0),
        ({"processes": 9}, 1, 0),
        ({"gpu": True}, 2, 1),
    ]:
        on_ray(jobs("lost"), lost=("lost",), **options)
        task = on_ray.ray.task_options
        assert (task["num_cpus"], task["num_gpus"], task["max_retries"]) == (cpus, gpus, 2), options
        assert task["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == str(cpus), options


def test_a_signal_cancels_the_tasks_and_waits_until_they_have_saved(on_ray, jobs):
    with pytest.raises(Interrupted, match="the same command continues") as error:
        on_ray(jobs("pending", "interrupted"))
    assert error.value.number == signal.SIGTERM
    assert on_ray.ray.calls == [("init", "local"), "cancel", "cancel", ("wait", 2, 60.0), "shutdown"]


def test_what_cannot_run_is_refused_with_the_remedy(on_ray, jobs, tmp_path, monkeypatch):
    for options, message in [
        ({"address": "auto"}, r"no Ray cluster at 'auto' \(Could not find any running Ray instance\.\): start one"),
        ({"address": "127.0.0.1:1"}, r"no Ray cluster at '127.0.0.1:1' \(.*refused\): start one with `ray start"),
        ({"gpu": True, "nodes": ({"CPU": 4.0},)}, "no node of this Ray cluster has a GPU for each run: add such"),
    ]:
        with pytest.raises(UsageError, match=message):
            on_ray(jobs("run"), **options)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'pip install "doubly\[ray\]"'):
        run_on_ray(jobs("run"), "local", Console(file=StringIO()))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_process_of_ray_is_restarted_and_resumes(tmp_path, small_run, saved_run, killed_after_epoch):
    pytest.importorskip("ray")
    dying = Job(small_run(epochs=8, batch_size=400, save_seconds=0.0), tmp_path / "dying", None)
    with killed_after_epoch(dying.output, 3):
        assert run_on_ray([dying], "local", Console(file=StringIO()), processes=1000) == {}
    train_run(small_run(epochs=8, batch_size=400), tmp_path / "alone")
    assert saved_run(dying.output) == saved_run(tmp_path / "alone")
    assert [row["epoch"] for row in saved_run(dying.output).rows] == list(range(8))

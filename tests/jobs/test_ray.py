"""Runs on Ray: the logic with a stand-in for the package; slow, and with it, a process that is killed."""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from io import StringIO
from types import ModuleType

import pytest
from rich.console import Console

from doubly.config.run import Run
from doubly.config.serialize import from_json
from doubly.errors import Interrupted, UsageError
from doubly.jobs.pool import Job
from doubly.jobs.ray import run_on_ray
from doubly.rundir import RunDir, read_metrics
from doubly.training.loop import train_run

SMALL = {
    "kind": "run",
    "data": {"kind": "data", "source": {"kind": "dataset.digits"}},
    "model": {"kind": "model.small_cnn", "width": 2},
    "method": {"kind": "method.standard"},
    "validation": {"kind": "validation", "size": 20, "attack": {"kind": "attack.pgd", "steps": 1}},
    "epochs": 1,
    "batch": 1000,
    "device": "cpu",
    "channels_last": "no",
}


def small(**changes) -> Run:
    return from_json({**SMALL, **changes})


class FakeRay(ModuleType):
    """Does a task when it is asked for, in this process; `lost` ones die with their node."""

    def __init__(self, nodes, lost=()):
        super().__init__("ray")
        self.resources, self.lost, self.calls, self.options_given = nodes, lost, [], {}

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
        self.options_given = options
        task = ModuleType("task")
        task.remote = self.submit
        return task

    def submit(self, threads, config, output, *arguments):
        reference, future = ModuleType("reference"), Future()
        reference.future = lambda: future
        if output.name.startswith("pending"):
            return reference
        json.dumps(config)  # nothing but plain values is handed over
        if output.name in self.lost:
            future.set_exception(RuntimeError("the node is gone\nmore"))
        else:
            future.set_result(self.function(threads, config, output, *arguments))
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


def jobs(tmp_path, *names):
    return [Job(small(), (tmp_path / name).relative_to(tmp_path), None) for name in names]


def test_runs_are_tasks_and_what_fails_or_is_lost_is_a_sentence(on_ray, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear diary")
    found = on_ray(jobs(tmp_path, "fine", "full", "lost"), lost=("lost",), processes=2)
    assert found.keys() == {tmp_path / "full", tmp_path / "lost"}  # whole paths: a node has another working folder
    assert "full is not empty (letter.txt)" in found[tmp_path / "full"]
    assert found[tmp_path / "lost"].startswith("died 3 times (RuntimeError: the node is gone): ")
    assert jobs(tmp_path, "fine")[0].done and on_ray.ray.calls == [("init", "local"), "shutdown"]
    assert on_ray(jobs(tmp_path, "fine")) == {} and on_ray.ray.calls == []  # nothing to do, nobody asked


@pytest.mark.parametrize(
    ("asked", "cpus", "gpus"),
    [({}, 2, 0), ({"processes": 2}, 3, 0), ({"processes": 1}, 4, 0), ({"processes": 9}, 1, 0), ({"gpu": True}, 2, 1)],
)
def test_ray_is_told_what_a_run_takes_and_the_run_keeps_to_it(on_ray, tmp_path, asked, cpus, gpus):
    """Nodes of 4 and of 2 cores, the second with a GPU."""
    on_ray(jobs(tmp_path, "lost"), lost=("lost",), **asked)
    given = on_ray.ray.options_given
    assert (given["num_cpus"], given["num_gpus"], given["max_retries"]) == (cpus, gpus, 2)
    assert given["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == str(cpus)


def test_a_task_sets_its_threads(on_ray, tmp_path, tiny):
    on_ray(jobs(tmp_path, "fine"), processes=1, nodes=({"CPU": 1.0},))
    assert tiny.checkpoint(tmp_path / "fine")[1]["choices"]["threads"] == 1


def test_a_signal_cancels_waits_and_says_how_to_go_on(on_ray, tmp_path):
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Interrupted, match="the same command goes on") as ending:
        on_ray(jobs(tmp_path, "pending", "pending_too"))
    assert ending.value.number == signal.SIGTERM
    assert on_ray.ray.calls == [("init", "local"), "cancel", "cancel", ("wait", 2, 60.0), "shutdown"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"address": "auto"}, r"no Ray cluster at 'auto' \(Could not find any running Ray instance\.\): start one"),
        ({"address": "127.0.0.1:1"}, r"no Ray cluster at '127.0.0.1:1' \(.*refused\): start one with `ray start"),
        ({"gpu": True, "nodes": ({"CPU": 4.0},)}, "no node of this Ray cluster has a GPU for each run: add such"),
    ],
)
def test_bad_input_is_a_sentence_with_the_remedy(on_ray, tmp_path, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        on_ray(jobs(tmp_path, "run"), **options)
    assert not (tmp_path / "run").exists()


def test_without_the_package_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'pip install "doubly\[ray\]"'):
        run_on_ray([Job(small(), tmp_path)], "local", Console(file=StringIO()))


def killed(job: Job, epoch: int) -> None:
    """Kill the process that trains the job once its checkpoint stands at that epoch."""
    state, end = job.output / "checkpoints" / "last" / "state.json", time.monotonic() + 180
    while time.monotonic() < end:
        try:
            if json.loads(state.read_text())["epoch"] >= epoch:
                break
        except (FileNotFoundError, ValueError):  # not begun, or between two renames
            pass
        time.sleep(0.02)
    process = int((job.output / ".lock").read_text())
    assert process != os.getpid()
    os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_process_of_ray_that_is_killed_is_begun_again_and_resumes(tmp_path, same_bits, tiny):
    pytest.importorskip("ray")
    dying = Job(small(epochs=8, batch=400, save_seconds=0.0), tmp_path / "dying", None)
    killer = threading.Thread(target=killed, args=(dying, 3))
    killer.start()
    assert run_on_ray([dying], "local", Console(file=StringIO()), processes=1000) == {}
    killer.join()
    assert [row["epoch"] for row in read_metrics(RunDir(dying.output).metrics)] == list(range(8))
    train_run(small(epochs=8, batch=400), tmp_path / "alone")
    assert same_bits(tiny.checkpoint(dying.output)[0], tiny.checkpoint(tmp_path / "alone")[0])

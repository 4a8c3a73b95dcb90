"""Real processes for tests that send signals, forked from one that has imported torch; networks to evaluate."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from doubly.cli import main
from doubly.rundir import read_metrics, sha256
from evaluation_inputs import AUTOATTACK, command, write_inputs

DEADLINE = 600.0  # seconds that a test waits for an event before it fails; on an idle machine events take a few
RECIPE = "digits.imbalanced.done_pgd"
SMALL = [
    *("--model.width", "4", "--method.attack.steps", "2", "--validation.attack.steps", "2", "--validation.size", "40"),
    *("--threads", "1", "--device", "cpu"),
]
SERVER = """
import json, os, sys
import sklearn.datasets, torch._dynamo
import doubly.recipes, doubly.studies.digits
from doubly.cli import main

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(request["folder"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = main(request["words"])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def wait_until(condition, what):
    """Wait for an event, however busy the machine is."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {DEADLINE:.0f} s"
        time.sleep(0.01)


class ForkServer:
    """A process that has imported doubly, and forks a child for each run, one at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_number(self) -> int:
        """Read a line of the server; if none comes before the deadline, the server is killed and this fails."""
        timer = threading.Timer(DEADLINE, self.process.kill)
        timer.start()
        try:
            return int(self.process.stdout.readline())
        finally:
            timer.cancel()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(name="wait_until")
def wait_until_fixture():
    return wait_until


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()


class Child:
    """A run of `doubly` in a process and a process group of its own."""

    def __init__(self, server: ForkServer, folder: Path, words) -> None:
        self.server, self.code = server, None
        self.files = {name: folder / f".{name}" for name in ("out", "err")}
        request = {"words": [str(word) for word in words], "folder": str(folder)}
        request |= {name: str(path) for name, path in self.files.items()}
        print(json.dumps(request), file=server.process.stdin, flush=True)
        self.pid = server.read_number()

    def is_running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> int:
        """Wait until it ends, and return its exit code, negative for a signal that killed it."""
        if self.code is None:
            self.code = self.server.read_number()
        return self.code

    def send(self, number: int) -> int:
        """Send a signal and wait for the end."""
        os.kill(self.pid, number)
        return self.wait()

    @property
    def out(self) -> str:
        return self.files["out"].read_text()

    @property
    def err(self) -> str:
        return self.files["err"].read_text()


class Doubly:
    """Runs `doubly` in a folder, each time in another process."""

    recipe, small = RECIPE, SMALL

    def __init__(self, folder: Path, server: ForkServer | None = None) -> None:
        self.folder, self.server = folder, server
        self.children: list[Child] = []

    def start(self, *words) -> Child:
        self.children.append(Child(self.server, self.folder, words))
        return self.children[-1]

    def run(self, *words) -> Child:
        """Run to the end, which must be a good one."""
        child = self.start(*words)
        assert child.wait() == 0, child.err
        return child

    def close(self) -> None:
        """End what a failed test has left, with the workers."""
        for child in self.children:
            if child.code is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def wait_for_step(self, output, epoch, step, is_running) -> None:
        """Wait until the checkpoint of a running process has come to this step, or further."""
        state = self.folder / output / "checkpoints" / "last" / "state.json"

        def is_reached():
            assert is_running(), "the run ended too early"
            try:
                info = json.loads(state.read_text())
            except (FileNotFoundError, ValueError):  # between two renames
                return False
            return (info["epoch"], info["step"]) >= (epoch, step)

        wait_until(is_reached, f"epoch {epoch}, step {step}")

    def tensors(self, output, name="last") -> dict[str, str]:
        """Return the checksum of each file of tensors in a checkpoint."""
        folder = self.folder / output / "checkpoints" / name
        files = sorted(folder.glob("*.safetensors"))
        assert files, f"{folder} has no tensors"
        return {file.name: sha256(file) for file in files}

    def rows(self, output) -> list[dict]:
        """Return the metrics without what depends on the machine."""
        rows = read_metrics(self.folder / output / "metrics.jsonl")
        return [{key: value for key, value in row.items() if key not in ("seconds", "peak_memory")} for row in rows]


@pytest.fixture
def doubly(tmp_path, fork_server):
    runs = Doubly(tmp_path, fork_server)
    yield runs
    runs.close()


# --- networks and evaluations ----------------------------------------------------------------------------------------


def call_in(folder, *words):
    """Call `doubly` in this process, for fixtures of a module: (exit code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        code = main([str(word) for word in words])
    assert code == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Return a folder with networks, weights and images."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture
def run(cli, inputs, monkeypatch):
    """Return a function that calls `doubly` in the folder with the networks; the output goes elsewhere."""
    monkeypatch.chdir(inputs)
    return cli


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture(scope="session")
def complete(inputs):
    """Return the folder of an evaluation with AutoAttack that nothing disturbed, and what it printed."""
    return inputs / "complete", *call_in(inputs, *command("linear", *AUTOATTACK, output="complete"))


@pytest.fixture
def copy(complete, output):
    """Return a copy of that evaluation, to be damaged."""
    return shutil.copytree(complete[0], output)


@pytest.fixture(scope="session")
def plain(inputs):
    """Return two evaluations without AutoAttack, of different weights."""
    for name, weights in (("first", "net.safetensors"), ("second", "other.pt")):
        call_in(inputs, *command("linear", "--epsilon", 0.15, weights=weights, output=name))
    assert "RA-AA" not in (inputs / "first" / "evaluation.json").read_text()
    return inputs / "first", inputs / "second"


@pytest.fixture
def processes(doubly, inputs):
    """Return real processes in the folder with the networks."""
    doubly.folder = inputs
    return doubly

"""Settings and fixtures of all tests: one thread, and property tests that draw the same examples every time."""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from rich.console import Console

from doubly.cli import main
from tiny_run import Tiny

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
SLOW_FILES = ("test_world_sizes.py", "test_torchrun.py", "test_kill.py", "test_pool.py", "test_real_data.py")

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


def pytest_collection_modifyitems(items):
    """Run slow files first, so that no core waits for the last of them."""
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors are small, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny():
    """Trains a tiny problem in a fraction of a second; see tiny_run.py."""
    return Tiny()


@pytest.fixture
def splits(tiny):
    return tiny.splits


@pytest.fixture
def adversarial(tiny):
    from doubly.methods import AT

    return AT(tiny.attack)


@pytest.fixture
def same_bits():
    """Compare two dictionaries of tensors bit by bit."""

    def compare(one, other) -> bool:
        return one.keys() == other.keys() and all(
            one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
        )

    return compare


class Inline:
    """A pool in this process, so that what a test changes is changed for the jobs."""

    def __init__(self, processes, context, prepare, arguments):
        prepare(*arguments)

    def shutdown(self): ...

    def submit(self, work, *arguments):
        future = Future()
        future.set_result(work(*arguments))
        return future


@pytest.fixture(scope="module")
def inline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("doubly.jobs.pool.ProcessPoolExecutor", Inline)
        patch.setattr("doubly.jobs.pool.core_count", lambda: 1)
        yield


class CliResult(NamedTuple):
    """The exit code and the output of a call of the command line."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Return a function that calls `doubly` in this process, in an empty folder, on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("doubly.cli.OUT", Console(width=200))
    monkeypatch.setattr("doubly.cli.ERR", Console(width=200, stderr=True))
    threads = torch.get_num_threads()

    def call(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        return CliResult(code, *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def real_data():
    """The folder with real files of the datasets, on a machine that has one."""
    folder = os.environ.get("DOUBLY_DATA")
    if not folder:
        pytest.skip("set DOUBLY_DATA to a folder with real files of the datasets")
    return Path(folder)

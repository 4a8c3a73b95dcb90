"""Which device a process takes, and what environment.json says about it."""

import subprocess

import pytest
import torch

from doubly.config.device import select_device
from doubly.config.environment import command_line, describe_environment
from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.errors import UsageError


def test_auto_is_cuda_where_there_is_one():
    assert select_device("auto", SINGLE_PROCESS).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert select_device("cpu", SINGLE_PROCESS) == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused_in_one_sentence():
    for name in ("cuda:99", "toaster"):
        with pytest.raises(UsageError) as error:
            select_device(name, SINGLE_PROCESS)
        assert f"'{name}'" in str(error.value) and "auto or cpu" in str(error.value) and "\n" not in str(error.value)


class SecondOfTwo(Communicator):
    rank, world_size = 1, 2


def test_each_process_takes_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert select_device("auto", SINGLE_PROCESS) == torch.device("cuda")
    with pytest.raises(UsageError, match="process 1 of this machine has no GPU of its own, there are 1: start at most"):
        select_device("auto", SecondOfTwo())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device("auto", SecondOfTwo()) == torch.device("cuda", 1)


def test_the_environment_names_versions_and_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/lib/doubly/__main__.py", "train", "digits.at", "--name", "a b"])
    environment = describe_environment(torch.device("cpu"))
    assert environment["command"] == command_line() == "doubly train digits.at --name 'a b'"
    assert environment["packages"]["torch"] == torch.__version__ and environment["threads"] >= 1
    monkeypatch.setattr("doubly.config.environment.version", lambda name: missing(name))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: missing("git"))
    environment = describe_environment(torch.device("cpu"))
    assert environment["packages"]["numpy"] == "not installed" and environment["commit"] is None


def missing(name):
    from importlib.metadata import PackageNotFoundError

    raise FileNotFoundError(name) if name == "git" else PackageNotFoundError(name)

"""Joining the processes of torchrun; the others never answer here. Real processes are tested in test_collectives.py."""

import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from doubly.distributed import SINGLE_PROCESS, Communicator, join_processes, launch
from doubly.distributed.launch import job_id, launched, was_restarted
from doubly.errors import UsageError


@pytest.fixture
def torchrun(monkeypatch):
    """Set the environment of the second of two processes."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_single_process_joins_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes() as communicator:
        assert communicator is SINGLE_PROCESS and not dist.is_initialized() and launched() == (0, 1)


def test_a_process_that_cannot_join_is_told_why(torchrun):
    torchrun.delenv("MASTER_PORT", raising=False)
    message = r"process 1 of 2 did not reach the others .*MASTER_PORT.*: start them with"
    with pytest.raises(UsageError, match=message), join_processes():
        pass
    torchrun.setattr(dist, "is_nccl_available", lambda: False)
    for backend in ("gloo", "nccl"):
        torchrun.setattr(dist, "is_gloo_available", lambda backend=backend: backend != "gloo")
        torchrun.setattr(torch.cuda, "is_available", lambda backend=backend: backend == "nccl")
        with pytest.raises(UsageError, match=f"(?i)no {backend}.*install another build"), join_processes():
            pass
    torchrun.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK and WORLD_SIZE are numbers, got 'first' and '2'"), join_processes():
        pass


class OtherRestarted(Communicator):
    """Another one of several processes was restarted."""

    def all_gather_text(self, text):
        return [text, "yes"]


def test_restarts_are_counted_by_torchrun(monkeypatch):
    assert not was_restarted(SINGLE_PROCESS) and job_id() == "" and was_restarted(OtherRestarted())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert was_restarted(SINGLE_PROCESS) and job_id() == "7"


def test_only_a_run_that_the_same_job_began_resumes_by_itself(tiny, tmp_path, monkeypatch):
    run = tiny.run(epochs=1)
    for begun_by in ("7", "6", None):
        output = tmp_path / str(begun_by)
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        if begun_by is None:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        else:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", begun_by)
        tiny.train(run, output)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        if begun_by == "7":
            tiny.train(run, output)
        else:
            with pytest.raises(UsageError, match="already holds a run: add --resume"):
                tiny.train(run, output)


def test_the_port_of_a_closed_store_is_looked_up_again(monkeypatch):
    with socket.create_server(("localhost", 0)) as server:
        closed_port = server.getsockname()[1]
    store = dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)
    ports, joined = iter([closed_port, store.port]), []
    published = SimpleNamespace(get=lambda key: str(next(ports)))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(published, 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, store, **options: joined.append(store.port))
    launch._rendezvous(1, 2, "gloo", timedelta(minutes=10))
    assert joined == [store.port]

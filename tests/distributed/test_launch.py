import pytest
import torch
import torch.distributed as dist

from doubly.distributed import collectives as parallel
from doubly.distributed.launch import job, joined, restarted, started
from doubly.errors import UsageError
from doubly.training.setup import chosen_device


@pytest.fixture
def torchrun(monkeypatch):
    """The environment of the second of two processes; nobody answers."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_one_process_joins_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined():
        assert not dist.is_initialized() and started() == (0, 1) and parallel.world() == (0, 1)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_backend_that_is_missing_is_named(torchrun, backend):
    torchrun.setattr(dist, "is_gloo_available", lambda: backend != "gloo")
    torchrun.setattr(dist, "is_nccl_available", lambda: False)
    torchrun.setattr(torch.cuda, "is_available", lambda: backend == "nccl")
    with pytest.raises(UsageError, match=f"(?i)no {backend}.*install another build"), joined():
        pass


def test_processes_that_cannot_meet_are_told_what_to_start_them_with(torchrun):
    torchrun.delenv("MASTER_PORT", raising=False)
    said = r"process 1 of 2 did not reach the others .*MASTER_PORT.*: start them with"
    with pytest.raises(UsageError, match=said), joined():
        pass


def test_a_rank_that_is_no_number_is_refused(torchrun):
    torchrun.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK and WORLD_SIZE are numbers, got 'first' and '2'"), joined():
        pass


def test_restarts_are_counted_by_torchrun(monkeypatch):
    assert not restarted() and job() == ""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert restarted() and job() == "7"


@pytest.mark.parametrize("begun_by", ["7", "6", None])
def test_only_what_torchrun_began_itself_goes_on_by_itself(tiny, tmp_path, monkeypatch, adversarial, begun_by):
    run = tiny.run(adversarial, epochs=1)
    if begun_by:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", begun_by)
    tiny.train(run, tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if begun_by == "7":
        tiny.train(run, tmp_path)
    else:
        with pytest.raises(UsageError, match="already holds a run: add --resume"):
            tiny.train(run, tmp_path)


def test_a_process_without_a_gpu_of_its_own_is_refused(torchrun):
    torchrun.setattr(torch.cuda, "is_available", lambda: True)
    torchrun.setattr(torch.cuda, "device_count", lambda: 1)
    torchrun.setattr(parallel, "processes", lambda: (1, 2))
    with pytest.raises(UsageError, match="process 1 of this machine has no GPU of its own, there are 1: start at most"):
        chosen_device("auto")
    torchrun.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("auto") == torch.device("cuda", 1)

"""Peak memory of the process, as the system tells it."""

import sys

import pytest
import torch

from doubly.training import memory
from doubly.training.memory import peak_memory, reset_peak_memory

CPU = torch.device("cpu")


def test_the_peak_of_this_process_is_plausible():
    reset_peak_memory(CPU)
    assert peak_memory(CPU) > 2**20


def test_without_proc_the_peak_is_that_of_getrusage(tmp_path, monkeypatch):
    pytest.importorskip("resource")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "too")
    reset_peak_memory(CPU)
    kilobytes = peak_memory(CPU)
    assert kilobytes > 2**20
    monkeypatch.setattr(sys, "platform", "darwin")  # where the unit is a byte
    assert peak_memory(CPU) == pytest.approx(kilobytes / 1024, rel=0.5)
    monkeypatch.setattr(sys, "platform", "win32")
    assert peak_memory(CPU) is None


def test_cuda_counts_its_own(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 42)
    reset_peak_memory(torch.device("cuda"))
    assert calls == [torch.device("cuda")] and peak_memory(torch.device("cuda")) == 42

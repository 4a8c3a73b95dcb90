"""One thread: the tensors are small, and the machine is shared. And the dumb twin of `cid`."""

import runpy
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def dense_cid():
    return runpy.run_path(str(Path(__file__).parents[1] / "reference" / "dense_cid.py"))["dense_cid"]

"""`torchrun … -m doubly train`: a process that is lost, what is printed, and the bits after the restart."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE = 600.0
SETTINGS = ["--epochs", "6", "--save-seconds", "0.1", "--data.holdout", "0.2"]


@pytest.fixture
def torchrun(doubly):
    """Return a function that starts two processes that train."""
    agents = []

    def start(output, restarts=0):
        agent = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
        words = ["train", doubly.recipe, *doubly.small, *SETTINGS, "--output", output]
        process = subprocess.Popen(
            [sys.executable, *agent, "-m", "doubly", *words],
            cwd=doubly.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        agents.append(process)
        return process

    yield start
    for process in agents:  # where a test failed
        process.kill()
        process.communicate()


def ranks(pid):
    """Return the processes that an agent has started, by rank."""
    processes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                words = (stat.parent / "environ").read_bytes().split(b"\0")
                processes |= {int(word[5:]): int(stat.parent.name) for word in words if word.startswith(b"RANK=")}
        except OSError:
            continue
    return processes


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_a_process_that_is_killed_changes_no_bit(doubly, torchrun):
    whole = torchrun("whole")
    killed = torchrun("killed", restarts=1)
    doubly.wait_for_step("killed", 1, 2, lambda: killed.poll() is None)
    os.kill(ranks(killed.pid)[1], signal.SIGKILL)
    out, err = killed.communicate(timeout=DEADLINE)
    assert killed.returncode == 0, err
    assert "another process of this run has ended" in err and "continuing at epoch" in out
    assert whole.communicate(timeout=DEADLINE) and whole.returncode == 0
    for name in ("last", "best"):
        assert doubly.tensors("killed", name) == doubly.tensors("whole", name)
    assert doubly.rows("killed") == doubly.rows("whole")
    assert out.count("continuing at") == 1  # the first process prints for all

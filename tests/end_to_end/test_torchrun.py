"""`torchrun … -m doubly train`: a process that is lost, what is said, and the bits after the restart."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ["--epochs", "6", "--save-seconds", "0.1", "--data.holdout", "0.2"]


class Together:
    """torchrun in a folder."""

    def __init__(self, doubly) -> None:
        self.doubly, self.started = doubly, []

    def start(self, *words, restarts=0, processes=2):
        agent = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
        process = subprocess.Popen(
            [sys.executable, *agent, "-m", "doubly", *map(str, words)],
            cwd=self.doubly.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def train(self, output, *words, **how):
        return self.start("train", self.doubly.recipe, *self.doubly.small, "--output", output, *words, **how)


@pytest.fixture
def together(doubly):
    found = Together(doubly)
    yield found
    for process in found.started:  # where a test failed
        process.kill()
        process.communicate()


def children(pid):
    """By rank."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                words = (stat.parent / "environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): int(stat.parent.name) for word in words if word.startswith(b"RANK=")}
        except OSError:
            continue
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_a_process_that_is_killed_changes_no_bit(doubly, together):
    whole = together.train("whole", *SETTINGS)
    killed = together.train("killed", *SETTINGS, restarts=1)
    doubly.reached(killed, "killed", 1, 2)
    os.kill(children(killed.pid)[1], signal.SIGKILL)
    out, err = killed.communicate(timeout=120)
    assert killed.returncode == 0, err
    assert "another process of this run has ended" in err and "continuing at epoch" in out
    assert whole.communicate(timeout=120) and whole.returncode == 0
    for name in ("last", "best"):
        assert doubly.tensors("killed", name) == doubly.tensors("whole", name)
    assert doubly.rows("killed") == doubly.rows("whole")
    assert out.count("continuing at") == 1  # the first process speaks for all


def test_a_verb_for_one_process_refuses_torchrun(here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, err = here("doctor")
    assert code == 2 and "doctor is for one process: leave torchrun away" in err

"""kill -9 at ten moments spread over a run; what is resumed ends with the bits of the run that nobody touched."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

EPOCHS, STEPS = 20, 6
KILLS = 10
SETTINGS = ["--epochs", "20", "--save-seconds", "0.1", "--data.holdout", "0.2"]

# Starting Python and torch takes longer than the run, so they are started once; each run is a process of its own.
NURSERY = """
import json, os, sys
import sklearn.datasets, torch._dynamo
import doubly.recipes
from doubly.cli import main

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr
        os._exit(main(json.loads(line)))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Child:
    """A run in the nursery; it answers `poll` and `communicate` as a Popen does."""

    def __init__(self, nursery, words):
        self.nursery = nursery
        print(json.dumps(words), file=nursery.stdin, flush=True)
        self.pid = int(nursery.stdout.readline())

    def poll(self):
        with open(f"/proc/{self.pid}/stat") as stat:  # a child that ended is a zombie, or gone
            return None if stat.read().rsplit(")", 1)[1].split()[0] != "Z" else 1

    def communicate(self):
        return self.nursery.stdout.readline()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return int(self.nursery.stdout.readline())


@pytest.fixture
def nursery(doubly):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        cwd=doubly.folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


def moments():
    """(epoch, step, further seconds): somewhere in each tenth of the first four fifths of the run."""
    draw = random.Random(0)
    last = 0.8 * EPOCHS * STEPS
    for tenth in range(KILLS):
        place = int(last * (tenth + draw.random()) / KILLS)
        yield *divmod(place, STEPS), 0.08 * draw.random()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_kill_nine_at_ten_moments_changes_no_bit(doubly, nursery):
    doubly.train("whole", *SETTINGS)
    again = ["train", doubly.recipe, *doubly.small, *SETTINGS, "--output", "killed", "--resume"]
    places = []
    for epoch, step, delay in moments():
        child = Child(nursery, again)  # the first has nothing yet to resume
        doubly.reached(child, "killed", epoch, step)
        time.sleep(delay)
        assert child.kill() == -signal.SIGKILL
        places.append((epoch, step))
    assert len(set(places)) == KILLS
    done = doubly.run("train", "--output", "killed", "--resume")
    assert done.returncode == 0, done.stderr
    assert "continuing at epoch" in done.stdout
    for name in ("last", "best"):
        assert doubly.tensors("killed", name) == doubly.tensors("whole", name)
    assert {"model.safetensors", "state.safetensors"} == set(doubly.tensors("whole"))
    assert [row["epoch"] for row in doubly.rows("killed")] == list(range(EPOCHS))
    assert doubly.rows("killed") == doubly.rows("whole")

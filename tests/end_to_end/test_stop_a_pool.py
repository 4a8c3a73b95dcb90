import os
import signal
import subprocess
import sys
import time

import pytest


def left_of(group, patience):
    """Whether a process of the group is still there after some seconds of patience."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_study_stops_with_its_workers_and_can_go_on(tmp_path, number, code):
    asked = [sys.executable, "-m", "doubly", "reproduce", "demo", "--output", str(tmp_path), "--jobs", "2"]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 90
    while not list(tmp_path.glob("*/metrics.jsonl")) and time.monotonic() < end:
        time.sleep(0.1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to parent and workers alike
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "the same command continues where this one stopped" in err and "Traceback" not in err
    assert not left_of(process.pid, patience=20)
    begun = [path for path in tmp_path.iterdir() if (path / "config.json").exists()]
    assert begun and all((path / "checkpoints" / "last" / "state.json").exists() for path in begun)
    assert len(begun) <= 4  # nothing more was begun

"""doubly reproduce with several processes, stopped by a signal."""

import os
import signal

import pytest

JOBS = 2


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_study_stops_with_its_workers_and_can_be_continued(doubly, wait_until, number, code):
    study = doubly.start("reproduce", "demo", "--output", "demo", "--jobs", JOBS)
    folder = doubly.folder / "demo"
    wait_until(lambda: list(folder.glob("*/metrics.jsonl")) or not study.is_running(), "the first epoch")
    if number == signal.SIGINT:
        os.killpg(study.pid, number)  # as a terminal does: to parent and workers alike
        study.wait()
    else:
        study.send(number)
    assert study.code == code
    assert "the same command continues where this one stopped" in study.err and "Traceback" not in study.err

    def group_has_ended():
        try:
            os.killpg(study.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(group_has_ended, "the end of the workers")
    started = [path.parent for path in folder.glob("*/config.json")]
    assert started and all((path / "checkpoints" / "last" / "state.json").exists() for path in started)
    assert len(started) <= 2 * JOBS  # no more were started

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from doubly.errors import UsageError
from doubly.rundir import (
    RunDir,
    append_metrics,
    is_run,
    lock,
    read_json,
    read_metrics,
    sha256,
    truncate_metrics,
    write_json,
)

HOLD = "import sys, time; from pathlib import Path; from doubly.rundir import lock\nwith lock(Path(sys.argv[1])):\n"


@contextmanager
def holder(path):
    """Another process that holds the lock; it is killed in the end, as a machine might."""
    code = HOLD + "    print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_json_keeps_every_digit_and_every_letter(tmp_path):
    value = {"third": 1 / 3, "tiny": 5e-324, "name": "Größe <b>"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, {"deep": [math.nan]}])
def test_nan_is_refused_and_the_old_file_stays(tmp_path, value):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == 1


def test_a_failed_replacement_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", 1)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        write_json(tmp_path / "a.json", 2)
    assert read_json(tmp_path / "a.json") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", None])
def test_read_json_names_the_file(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_json(path)


def test_metrics_come_back_as_written(tmp_path):
    run = RunDir(tmp_path)
    rows = [{"epoch": 0, "loss": 1 / 3}, {"epoch": 1, "loss": 0.1, "validation": {"sa": 0.5}}]
    assert read_metrics(run.metrics) == []
    for row in rows:
        append_metrics(run, row)
    assert read_metrics(run.metrics) == rows


@pytest.mark.parametrize("tail", ['{"epoch": 2, "lo', "\x00\x00", '"epoch"', "\xff"])
def test_a_half_written_last_line_is_passed_over(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"epoch": 0}\n{"epoch": 1}\n' + tail.encode("latin-1"))
    assert [row["epoch"] for row in read_metrics(path)] == [0, 1]


def test_a_corrupt_middle_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 0}\n{"epo\n{"epoch": 2}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_metrics(path)


def test_truncate_drops_later_epochs_and_the_tail_so_that_appending_is_safe(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": 2}\n{"ep')
    truncate_metrics(run.metrics, 2)
    assert run.metrics.read_text() == '{"epoch": 0}\n{"epoch": 1}\n'
    append_metrics(run, {"epoch": 2, "again": True})
    assert read_metrics(run.metrics)[-1] == {"epoch": 2, "again": True}
    truncate_metrics(tmp_path / "missing.jsonl", 0)
    assert not (tmp_path / "missing.jsonl").exists()


def test_a_second_run_is_kept_out_and_told_by_whom(tmp_path):
    with holder(tmp_path) as process, pytest.raises(UsageError) as refusal, lock(tmp_path):
        pass
    assert f"in use by another run (process {process.pid}); wait for it or choose another --output" in str(
        refusal.value
    )


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    with holder(tmp_path):
        pass
    with lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_the_lock_is_given_back_also_after_an_error(tmp_path):
    with pytest.raises(KeyError), lock(tmp_path / "new"):
        raise KeyError
    with lock(tmp_path / "new"), pytest.raises(UsageError), lock(tmp_path / "new"):
        pass


def test_a_file_is_no_place_for_a_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file"), lock(tmp_path / "file"):
        pass


def test_is_run_and_checksum(tmp_path):
    assert not is_run(tmp_path) and not is_run(tmp_path / "missing")
    (tmp_path / "config.json").write_bytes(b"abc")
    assert is_run(tmp_path)
    assert sha256(tmp_path / "config.json").startswith("ba7816bf8f01cfea")


def test_rundir_does_not_import_torch():
    code = "import sys, doubly.rundir; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names():
    run = RunDir(Path("x"))
    files = [run.config, run.environment, run.metrics, run.checkpoints, run.evaluation, run.predictions, run.gallery]
    names = ["config.json", "environment.json", "metrics.jsonl", "checkpoints", "evaluation.json", "evaluation.npz"]
    assert [file.name for file in files] == [*names, "gallery.npz"]

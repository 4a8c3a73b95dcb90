import errno
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from doubly.errors import UsageError
from doubly.locks import lock_directory
from doubly.rundir import (
    RunDir,
    append_metrics,
    is_run,
    read_json,
    read_metrics,
    read_tree,
    runs_in,
    sha256,
    truncate_metrics,
    write_json,
)

HOLD = """
import sys, time
from pathlib import Path
from doubly.locks import lock_directory
with lock_directory(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(3600)
"""


@contextmanager
def holder(path):
    """Another process that holds the lock; it is killed in the end, as a machine might."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_json_keeps_every_digit_and_every_letter(tmp_path):
    for value in ({"third": 1 / 3, "tiny": 5e-324, "name": "Größe <b>"}, {"half a surrogate pair": "\ud83d"}):
        write_json(tmp_path / "a.json", value)
        assert read_json(tmp_path / "a.json") == value
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", 1)
    for value in (math.nan, math.inf, {"deep": [math.nan]}):
        with pytest.raises(ValueError):
            write_json(tmp_path / "a.json", value)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        write_json(tmp_path / "a.json", 2)
    assert read_json(tmp_path / "a.json") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_json_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "config.json"
    for content in (b"{", b"", b"\xff\xfe\x00", None):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=r"config\.json"):
            read_json(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_json(tmp_path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="holds a list"):
        read_tree(path)


def test_metrics_come_back_as_written(tmp_path):
    run = RunDir(tmp_path)
    rows = [{"epoch": 0, "loss": 1 / 3}, {"epoch": 1, "loss": 0.1, "validation": {"sa": 0.5}}]
    assert read_metrics(run.metrics) == []
    for row in rows:
        append_metrics(run, row)
    assert read_metrics(run.metrics) == rows


def test_only_a_last_line_may_be_half_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for tail in ('{"epoch": 2, "lo', "\x00\x00", '"epoch"', "\xff"):
        path.write_bytes(b'{"epoch": 0}\n{"epoch": 1}\n' + tail.encode("latin-1"))
        assert [row["epoch"] for row in read_metrics(path)] == [0, 1]
    path.write_text('{"epoch": 0}\n{"epo\n{"epoch": 2}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_metrics(path)


def test_truncate_drops_later_epochs_and_the_half_line_so_that_appending_is_safe(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": 2}\n{"ep')
    truncate_metrics(run.metrics, 2)
    assert run.metrics.read_text() == '{"epoch": 0}\n{"epoch": 1}\n'
    append_metrics(run, {"epoch": 2, "again": True})
    assert read_metrics(run.metrics)[-1] == {"epoch": 2, "again": True}
    truncate_metrics(tmp_path / "missing.jsonl", 0)
    assert not (tmp_path / "missing.jsonl").exists()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    with holder(tmp_path) as process, pytest.raises(UsageError) as refusal, lock_directory(tmp_path):
        pass
    message = f"in use by another run (process {process.pid}); wait for it or choose another --output"
    assert message in str(refusal.value)
    with lock_directory(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_the_lock_is_released_after_an_error_and_a_file_cannot_be_locked(tmp_path):
    with pytest.raises(KeyError), lock_directory(tmp_path / "new"):
        raise KeyError
    with lock_directory(tmp_path / "new"), pytest.raises(UsageError), lock_directory(tmp_path / "new"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file"), lock_directory(tmp_path / "file"):
        pass


def test_run_directories_are_found_and_files_have_checksums(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="not a run and contains none"):
            runs_in(path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(b"abc")
    assert runs_in(tmp_path) == [tmp_path / "a", tmp_path / "b"] and runs_in(tmp_path / "b") == [tmp_path / "b"]
    assert is_run(tmp_path / "a") and not is_run(tmp_path)
    assert sha256(tmp_path / "a" / "config.json").startswith("ba7816bf8f01cfea")


def test_the_files_have_the_names_of_the_documentation():
    run = RunDir(Path("x"))
    files = [run.config, run.environment, run.metrics, run.checkpoints, run.evaluation, run.predictions, run.gallery]
    names = ["config.json", "environment.json", "metrics.jsonl", "checkpoints", "evaluation.json", "evaluation.npz"]
    assert [file.name for file in files] == [*names, "gallery.npz"]


def test_rows_without_an_epoch_are_refused_when_a_run_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line, sentence in [
        ("{}", "line 2 does not give its epoch"),
        ('{"epoch": "1"}', "line 2 does not give its epoch"),
        ('{"epoch": 1.5}', "line 2 does not give its epoch"),
        ('{"epoch": true}', "line 2 does not give its epoch"),
        ('{"epoch": 1, "loss": NaN}', "NaN or infinity"),
        ("[" * 100_000, "line 2 is not a row"),
        ('{"epoch": ' + "9" * 5000 + "}", "line 2 is not a row"),
    ]:
        path.write_text(before := f'{{"epoch": 0}}\n{line}\n{{"epoch": 2}}\n')
        with pytest.raises(UsageError, match=sentence):
            truncate_metrics(path, 9)
        assert path.read_text() == before


def test_a_row_that_does_not_fit_on_the_disk_is_not_there_at_all(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    append_metrics(run, {"epoch": 0})
    append_metrics(run, {"epoch": 1, "folder": "\udcff"})
    before = run.metrics.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(UsageError, match=r"metrics\.jsonl cannot be written: the disk is full"):
        append_metrics(run, {"epoch": 2})
    assert run.metrics.read_bytes() == before and len(read_metrics(run.metrics)) == 2


def test_a_file_system_without_locks_is_explained_and_may_be_used_without(tmp_path, monkeypatch):
    for number in (errno.ENOLCK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):

        def flock(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("fcntl.flock", flock)
        with pytest.raises(UsageError, match=r"file system without locks.*--no-lock"), lock_directory(tmp_path):
            pass
        with lock_directory(tmp_path, lock=False) as held:
            held.check()


def test_a_directory_that_is_deleted_renamed_or_replaced_is_noticed_and_leftovers_are_removed(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / ".metrics.jsonl.999999999").touch()
    with lock_directory(path) as held:
        assert [file.name for file in path.iterdir()] == [".lock"]
        held.check()
        path.rename(tmp_path / "other")
        for prepare in (lambda: None, path.mkdir, (path / ".lock").touch):
            prepare()
            with pytest.raises(UsageError, match=r"deleted, renamed or replaced.*--resume"):
                held.check()

"""Files are written whole or not at all; what cannot be written is a sentence; leftovers of killed processes go."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from doubly.errors import UsageError
from doubly.files import (
    _machine,
    make_folder,
    remove_leftovers,
    replacing,
    write_arrays,
    write_bytes,
    write_error,
    write_json,
    write_text,
)

CALLS = {
    "a.json": lambda path: write_json(path, {"new": 1}),
    "a.html": lambda path: write_text(path, "new"),
    "a.jsonl": lambda path: write_bytes(path, b"new"),
    "a.npz": lambda path: write_arrays(path, {"x": np.zeros(3)}),
    "b.npz": lambda path: write_arrays(path, {"x": np.zeros(3)}, compressed=True),
}
SENTENCES = {
    errno.ENOSPC: "the disk is full.*make room",
    errno.EDQUOT: "quota.*make room",
    errno.EFBIG: "ulimit -f.*raise the limit",
    errno.EROFS: "the disk is read-only.*another disk",
    errno.EACCES: "may not be written.*permissions",
    errno.ENOENT: "its folder is gone.*do not delete or rename",
    errno.ENOTDIR: "a file stands where a folder is needed",
    errno.ENAMETOOLONG: "name is too long.*shorter",
    errno.EIO: "the system refused it.*check the disk",
}
LIMITED = """
import resource, sys
from pathlib import Path
from doubly.files import write_text
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for size in (900, 5000):
    try:
        write_text(Path(sys.argv[1]), "x" * size)
    except ValueError as error:
        print(error)
"""


def raising(number):
    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


def test_every_error_at_every_moment_is_a_sentence_and_leaves_the_old_file(tmp_path, monkeypatch):
    for name, call in CALLS.items():
        path = tmp_path / name
        path.write_bytes(b"old")
        for number, sentence in SENTENCES.items():
            writes = (Path, "open" if name.endswith("npz") else "write_bytes")
            for owner, function in ((os, "replace"), (os, "fsync"), (os, "open"), writes):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, function, raising(number))
                    with pytest.raises(UsageError, match=rf"{path.name} cannot be written: .*{sentence}") as refusal:
                        call(path)
                assert refusal.value.errno == number and "\n" not in str(refusal.value)
                assert path.read_bytes() == b"old"
        call(path)
        assert path.read_bytes() != b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(CALLS)


def test_a_limit_of_file_size_is_a_sentence(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "a"], capture_output=True, text=True)
    assert done.returncode == 0 and "ulimit -f" in done.stdout and done.stdout.count("\n") == 1, done.stderr
    assert (tmp_path / "a").read_text() == "x" * 900 and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_folders_that_cannot_be_and_errors_of_safetensors_are_explained(tmp_path):
    (tmp_path / "file").touch()
    for call in (lambda: make_folder(tmp_path / "file" / "below"), lambda: write_text(tmp_path / "none" / "a", "x")):
        with pytest.raises(UsageError, match="cannot be written"):
            call()
    assert not (tmp_path / "none").exists()

    class SafetensorError(Exception):
        pass

    full = "I/O error: No space left on device (os error 28)"
    for text, expected in ((full, UsageError), ("other", SafetensorError)):
        with pytest.raises(expected), replacing(tmp_path / "w"):
            raise SafetensorError(text)
    assert "what was there is unchanged" in str(write_error(tmp_path, OSError("odd")))
    long = tmp_path / ("ü" * 120)
    write_text(long, "fits")
    assert long.read_text() == "fits"


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    me, other, alive = os.getpid(), "0" * 8, os.getppid()
    ours = _machine()
    cases = {
        f".metrics.jsonl.{dead.pid}": False,
        f".evaluation-{dead.pid}.npz": False,
        f".images-00001-apgd-ce-{dead.pid}.npz": False,
        f".evaluation.{dead.pid}-{ours}.unfinished.npz": False,
        f".report.{dead.pid}-{ours}.unfinished.html": False,
        f".{'9' * 30}.{'9' * 30}-{ours}.unfinished": False,  # no number of a process
        f".metrics.jsonl.{alive}": True,
        f".evaluation.{alive}-{ours}.unfinished.npz": True,
        f".evaluation.{me}-{ours}.unfinished.npz": True,  # written by another thread
        f".evaluation.{dead.pid}-{other}.unfinished.npz": True,  # of another machine, which may live
        "evaluation.npz": True,
        ".lock": True,
        ".env.2024": True,
        f".notes-{dead.pid}.txt": True,
    }
    stale = {f".a.{alive}-{other}.unfinished.json": False, f".b.{me}-{ours}.unfinished.json": False}
    for name in (*cases, *stale):
        (tmp_path / name).write_text("half")
    for name in stale:
        os.utime(tmp_path / name, (0, 0))
    remove_leftovers(tmp_path)
    assert {name: (tmp_path / name).exists() for name in (*cases, *stale)} == {**cases, **stale}
    remove_leftovers(tmp_path / "missing")

"""Every verb that writes, on a disk that is full or read-only: exit code 2, a sentence, and nothing is lost."""

import errno
import os
import shutil
from pathlib import Path

from doubly.rundir import sha256

SMALL = [
    *("--epochs", "1", "--model.width", "4", "--method.attack.steps", "1", "--validation.attack.steps", "1"),
    *("--threads", "1", "--device", "cpu"),
]
VERBS = [
    ("train", "digits.at", *SMALL, "--output", "new"),
    ("train", "--resume", "--output", "half"),
    ("evaluate", "run", "--images", 20, "--no-trust"),
    ("check", "run", "--images", 20, "--output", "out"),
    ("repair", "run", "--output", "out"),
    ("frontier", "run", "--images", 20, "--scales", 0, 1, "--output", "out"),
    ("report", "run", "--output", "out"),
    ("export", "run", "--output", "out/w.safetensors"),
    ("data", "inspect", "digits", "--picture", "digits.png"),
    ("data", "imbalance", "digits", "--ratio", 0.5, "--output", "out"),
    ("reproduce", "table1", "--scale", "small", "--slurm", "job.sh", "--output", "out"),
]


def contents(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def test_a_full_or_read_only_disk_is_a_sentence_and_loses_nothing(cli, tmp_path, monkeypatch):
    assert cli("train", "digits.at", *SMALL, "--data.holdout", 0.2, "--output", "run").code == 0
    shutil.copytree("run", "half")
    shutil.rmtree("half/checkpoints")
    assert cli("evaluate", "run", "--images", 40, "--no-trust").code == 0
    before = contents(tmp_path)
    for number, sentence in ((errno.ENOSPC, "the disk is full"), (errno.EROFS, "the disk is read-only")):

        def failing(*_, number=number):
            raise OSError(number, os.strerror(number))

        for words in VERBS if number == errno.ENOSPC else VERBS[-5:]:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing)
                code, _, err = cli(*words)
            last = err.splitlines()[-1]
            assert code == 2 and last.startswith("doubly: ") and f"cannot be written: {sentence}" in last, (words, err)
            assert contents(tmp_path) == before, words
            for folder in ("new", "out"):
                assert not any(path.is_file() and path.name != ".lock" for path in Path(folder).rglob("*"))
                shutil.rmtree(folder, ignore_errors=True)

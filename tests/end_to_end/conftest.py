"""The command line as a person uses it: `python -m doubly` in another process, or its `main` in this one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from doubly.cli import main
from doubly.rundir import read_metrics, sha256

RECIPE = "digits.imbalanced.done_pgd"
SMALL = [
    *("--model.width", "4", "--method.attack.steps", "2", "--validation.attack.steps", "2", "--validation.size", "40"),
    *("--threads", "1", "--device", "cpu"),
]


class Doubly:
    """Runs `doubly` in a folder."""

    recipe, small = RECIPE, SMALL

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "doubly", *map(str, words)],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """To the end, in another process."""
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def train(self, output: str, *words: str) -> subprocess.CompletedProcess[str]:
        done = self.run("train", self.recipe, *self.small, "--output", output, *words)
        assert done.returncode == 0, done.stderr
        return done

    def reached(self, process: subprocess.Popen[str], output: str, epoch: int, step: int) -> None:
        """Wait until the checkpoint of a running process stands at this place, or later."""
        state = self.folder / output / "checkpoints" / "last" / "state.json"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert process.poll() is None, f"it ended too early: {process.communicate()}"
            try:
                found = json.loads(state.read_text())
            except (FileNotFoundError, ValueError):  # between two renames
                found = {"epoch": -1, "step": 0}
            if (found["epoch"], found["step"]) >= (epoch, step):
                return
            time.sleep(0.003)
        raise TimeoutError

    def tensors(self, output: str, name: str = "last") -> dict[str, str]:
        """The checksum of each file of tensors in a checkpoint."""
        folder = self.folder / output / "checkpoints" / name
        files = sorted(folder.glob("*.safetensors"))
        assert files, f"{folder} has no tensors"
        return {file.name: sha256(file) for file in files}

    def rows(self, output: str) -> list[dict]:
        rows = read_metrics(self.folder / output / "metrics.jsonl")
        return [{key: value for key, value in row.items() if key not in ("seconds", "peak_memory")} for row in rows]


@pytest.fixture
def doubly(tmp_path) -> Doubly:
    return Doubly(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Doubly:
    """A folder that the tests of a file share."""
    return Doubly(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """`doubly` in this process, in an empty folder: (exit code, stdout, stderr). What it raises fails the test."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def call(*words):
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        return code, out, err

    yield call
    torch.set_num_threads(threads)

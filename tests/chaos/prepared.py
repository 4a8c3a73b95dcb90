"""The runs that campaigns copy and damage, made once: trained, stopped halfway, evaluated, repaired, searched."""

import os
import shutil
import signal
from pathlib import Path

import safetensors.numpy
from tests.chaos.faults import run_armed
from tests.chaos.outcomes import call_cli
from tests.chaos.workers import fork_call

import doubly
from doubly.rundir import read_metrics, sha256
from evaluation_inputs import write_inputs

SMALL = (
    *("--model.width", "4", "--method.attack.steps", "1", "--validation.attack.steps", "1", "--validation.size", "40"),
    *("--data.holdout", "0.2", "--batch-size", "256", "--save-seconds", "0", "--device", "cpu", "--epochs", "2"),
)
TRAIN = ("train", "digits.at", *SMALL, "--threads", "1", "--resume", "--output")
EVALUATE = ("--images", "10", "--no-trust", "--attacks", "pgd", "--device", "cpu")
AUTOATTACK = ("--images", "6", "--no-trust", "--attacks", "pgd", "--autoattack", "--autoattack-chunk-size", "2")
HALFWAY, EARLIER = 150, 90  # changes of files after which the stopped runs were killed; a whole run has about 300


def prepare(base: Path) -> None:
    """Write all runs into the folder, which becomes the working directory."""
    base.mkdir(parents=True)
    os.chdir(base)
    for name, at in (("half", HALFWAY), ("earlier", EARLIER)):
        words = (*TRAIN, name)
        pid = fork_call(lambda words=words, at=at: run_armed(words, at, signal.SIGKILL), Path(".out"), Path(".err"))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, Path(".err").read_text()
        assert (base / name / "checkpoints" / "last").is_dir()
    _call(*TRAIN, "whole")
    shutil.copytree("whole", "evaluated")
    _call("evaluate", "evaluated", *EVALUATE)
    _call("repair", "evaluated", "--output", "repaired")
    _call("evaluate", "repaired", *EVALUATE)
    _call("frontier", "evaluated", "--images", 20, "--scales", 0, 1, "--output", "frontier")
    shutil.copytree("evaluated", "attacked")
    _call("evaluate", "attacked", *AUTOATTACK)
    Path("inputs").mkdir()
    write_inputs(Path("inputs"))


def _call(*words: object) -> None:
    result = call_cli(words)
    assert result.code == 0, f"{words}: {result.err}{result.error}"


def fingerprint(run: Path) -> dict[str, object]:
    """Return what must be the same however a training was interrupted."""
    files = sorted(run.glob("checkpoints/[!.]*/*.safetensors"))
    rows = read_metrics(run / "metrics.jsonl")
    times = ("seconds", "peak_memory")
    return {str(file.relative_to(run)): sha256(file) for file in files} | {
        "rows": [{key: value for key, value in row.items() if key not in times} for row in rows]
    }


def weights(path: Path) -> dict[str, bytes]:
    """Return the tensors of a safetensors file, to be compared bit by bit."""
    return {name: value.tobytes() for name, value in safetensors.numpy.load_file(path).items()}


def loaded_weights(run: Path) -> dict[str, bytes]:
    """Return the tensors of the network that `doubly.load` returns."""
    return {name: value.numpy().tobytes() for name, value in doubly.load(run).state_dict().items()}

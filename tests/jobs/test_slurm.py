"""Jobs as shell commands and as a SLURM array script, which bash runs here with stand-ins for its programs."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from doubly.evaluation.config import EvalConfig
from doubly.jobs.job import Job
from doubly.jobs.slurm import job_commands, report_command, slurm_script
from doubly.recipes import recipe

# Tells that it has started; then waits for SIGTERM, and tells that it has saved.
TRAINING = """
import signal, sys

def save(number, frame):
    print("saved", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
print("started", flush=True)
while True:
    signal.pause()
"""
PRINTING = 'import os, sys\nprint("|".join(sys.argv[1:]))\nsys.exit(int(os.environ["EXIT_CODE"]))\n'
REQUEUING = 'import sys\nprint("scontrol", *sys.argv[1:])\n'


@pytest.fixture
def array(tmp_path):
    """Start a task of the script of three jobs, with programs of these texts in Python."""
    jobs = [Job(recipe(f"digits.{method}"), tmp_path / "ru ns" / method) for method in ("at", "done_pgd", "mail")]
    commands = [job_commands(job, {"epochs": 1}) for job in jobs]
    script = slurm_script("tiny", commands, "doubly report", limit=2, hours=1.2, logs=tmp_path / "lo gs")
    (tmp_path / "array.sh").write_text(script)

    def start(task, programs, **variables):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in programs.items():
            (folder / name).write_text(f"#!{sys.executable}\n{text}")
            (folder / name).chmod(0o755)
        environment = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
        environment["SLURM_ARRAY_TASK_ID"] = str(task)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", str(tmp_path / "array.sh")], env=environment, **pipes)

    return start


def test_a_task_trains_and_evaluates_the_job_of_its_number(array, tmp_path):
    text = (tmp_path / "array.sh").read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH") and "#SBATCH --array=0-2%2\n" in text
    assert "#SBATCH --time=0-03:00:00\n" in text and f"#SBATCH --output={tmp_path}/lo\\ gs/%x-%A-%a.log\n" in text
    assert "#SBATCH --requeue\n" in text and "#SBATCH --signal=B:USR1@120\n" in text
    process = array(1, {"doubly": PRINTING}, EXIT_CODE="0")
    train, evaluate = (line.split("|") for line in process.communicate(timeout=600)[0].splitlines())
    output = str(tmp_path / "ru ns" / "done_pgd")
    assert process.returncode == 0 and train[:4] == ["train", "digits.done_pgd", "--seed", "0"]
    assert train[4:] == ["--epochs", "1", "--output", output, "--resume"] and evaluate[:2] == ["evaluate", output]
    process = array(1, {"doubly": PRINTING}, EXIT_CODE="143")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 143 and "evaluate" not in out
    process = array(3, {})
    assert "they are 0 to 2" in process.communicate(timeout=600)[1] and process.returncode == 2


def test_a_task_that_gets_a_signal_saves_first(array):
    for number, restarts, code, queued in [
        (signal.SIGUSR1, "3", 0, "scontrol requeue 70_1\n"),  # the time is nearly up
        (signal.SIGUSR1, "100", 1, ""),  # not for ever
        (signal.SIGTERM, "3", 143, ""),  # canceled or preempted: the cluster decides
    ]:
        variables = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_RESTART_COUNT": restarts}
        process = array(1, {"doubly": TRAINING, "scontrol": REQUEUING}, **variables)
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=600)
        assert (process.returncode, out) == (code, f"saved\n{queued}")


def test_without_an_estimate_a_task_asks_for_a_gpu_and_no_time(tmp_path):
    commands = [job_commands(Job(recipe("digits.at"), tmp_path), {})]
    text = slurm_script("gpu", commands, "doubly report", limit=None, hours=None, logs=tmp_path)
    assert "#SBATCH --array=0-0\n" in text and "#SBATCH --gres=gpu:1\n" in text and "#SBATCH --time" not in text


def test_commands_have_the_settings_that_are_not_the_default():
    config = EvalConfig(trust=False, images=20, weights_r=(1.0, 0.5), output=Path("a b"))
    job = Job(recipe("digits.at"), Path("runs/at"), config, ("pgd", "autoattack"))
    words = shlex.split(job_commands(job, {}).evaluate)
    assert words[:3] == ["doubly", "evaluate", str(Path("runs/at").resolve())]
    assert words[3:] == [
        *("--autoattack", "--output", "a b", "--images", "20", "--no-trust", "--weights-r", "1.0", "0.5")
    ]
    assert shlex.split(report_command([Path("/a b")], Path("/c"))) == ["doubly", "report", "/a b", "--output", "/c"]

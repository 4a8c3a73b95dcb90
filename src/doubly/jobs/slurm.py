"""Jobs as shell commands, and as an array script for the scheduler SLURM."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from doubly.jobs.job import Job

# One task per run. A command that is done already takes a moment, or evaluates again with AutoAttack's finished chunks.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=doubly-{name}
#SBATCH --array=0-{last}{limit}
{resources}
#SBATCH --output={logs}/%x-%A-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# {count} runs. A task whose node fails, that is preempted, or whose time is nearly up saves, is queued again, and
# continues where it stopped; so does one that died when this script is submitted again. To leave out what is done by
# then, write the script again. In the end:
# {report}
set -euo pipefail
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
# Bash handles a signal while it waits, not while a command runs in the foreground: so commands run in the background.
run() {{ "$@" & wait "$!"; }}
save() {{
  trap "" USR1 TERM
  # $! names the command in the background as soon as it exists; a variable could still be empty when a signal comes.
  if [ -n "${{!:-}}" ] && kill -TERM "$!" 2> /dev/null; then wait "$!" || true; fi
}}
again() {{
  [ "${{SLURM_RESTART_COUNT:-0}}" -lt 100 ] && scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
}}
trap 'save; again; exit' USR1
trap 'save; exit 143' TERM
case "${{SLURM_ARRAY_TASK_ID:?submit this script with sbatch, or set it to the number of a run}}" in
{cases}
*) echo "there is no run $SLURM_ARRAY_TASK_ID: they are 0 to {last}" >&2; exit 2 ;;
esac
"""

CPU = """\
#SBATCH --cpus-per-task=2
#SBATCH --time={time}"""
GPU = """\
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
# How long a run takes depends on the GPU: set --time to what your cluster allows; a run that is stopped continues."""


class JobCommands(NamedTuple):
    """The shell commands of a job: to train or resume it, and to evaluate it."""

    train: str
    evaluate: str

    @property
    def line(self) -> str:
        """Both in one line."""
        return f"{self.train} && {self.evaluate}"


def job_commands(job: Job, changes: Mapping[str, object], train_flags: Sequence[str] = ()) -> JobCommands:
    """Return the commands that do a job of a recipe, with absolute paths for any working folder.

    Args:
        job: The job; its callbacks are not part of the commands.
        changes: How its run differs from the recipe of its name, by dotted path, beside seed and root.
        train_flags: Further flags of the command that trains.
    """
    output, run, root = job.output.resolve(), job.run, job.run.data.root
    data: list[object] = [] if root is None else ["--data-root", root]
    changed = [word for path, value in changes.items() for word in (f"--{path}", value)]
    train = ["doubly", "train", run.name, "--seed", run.seed, *data, *changed, "--output", output, "--resume"]
    train += train_flags
    return JobCommands(_shell(train), _shell(["doubly", "evaluate", output, *data, *_evaluation_flags(job)]))


def report_command(runs: Sequence[Path], output: Path) -> str:
    """Return the command that writes the report of these run directories into a folder."""
    return _shell(["doubly", "report", *(run.resolve() for run in runs), "--output", output.resolve()])


def slurm_script(
    name: str, commands: Sequence[JobCommands], report: str, *, limit: int | None, hours: float | None, logs: Path
) -> str:
    """Return an array script with a task for each job.

    Args:
        name: Name of the study.
        commands: Commands of each job.
        report: The command that follows in the end, for a comment.
        limit: Most tasks that run at a time; None leaves it to the cluster.
        hours: What the longest job is estimated to take; its task gets twice that. None asks for GPUs instead, whose
            speed is unknown.
        logs: Folder of the logs.
    """
    cases = [f"{number}) run {job.train} && run {job.evaluate} ;;" for number, job in enumerate(commands)]
    return SCRIPT.format(
        name=name,
        last=len(commands) - 1,
        limit="" if limit is None else f"%{limit}",
        resources=GPU if hours is None else CPU.format(time=_time(math.ceil(2 * hours))),
        logs=str(logs.resolve()).replace(" ", r"\ "),
        count=len(commands),
        report=report,
        cases="\n".join(cases),
    )


def _time(hours: int) -> str:
    return f"{hours // 24}-{hours % 24:02d}:00:00"


def _evaluation_flags(job: Job) -> list[object]:
    """Return the flags of `doubly evaluate` for settings that are not the default."""
    words: list[object] = ["--autoattack"] if "autoattack" in job.attacks else []
    for setting in fields(job.evaluate) if job.evaluate is not None else ():
        value, flag = getattr(job.evaluate, setting.name), setting.name.replace("_", "-")
        if value == setting.default:
            continue
        match value:
            case bool():
                words += [f"--{flag}" if value else f"--no-{flag}"]
            case tuple():
                words += [f"--{flag}", *value]
            case _:
                words += [f"--{flag}", value]
    return words


def _shell(words: Sequence[object]) -> str:
    return shlex.join([str(word) for word in words])

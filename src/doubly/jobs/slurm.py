"""The runs of a plan as commands of a shell, one per run, for a cluster's scheduler."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

# One task per run. A line that is done already takes a moment, or measures again with AutoAttack's finished chunks.
SLURM = """\
#!/bin/bash
#SBATCH --job-name=doubly-{name}
#SBATCH --array=0-{last}{jobs}
{resources}
#SBATCH --output={logs}/%x-%A-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# {count} runs. A task whose node fails, that is preempted, or whose time is nearly up saves, is queued again, and goes
# on where it stopped; so does one that died when this script is submitted again. To leave out what is done by then,
# have it written anew. In the end:
# {report}
set -euo pipefail
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
child=
# Bash hears a signal while it waits, not while a command runs: so commands run beside it.
run() {{ "$@" & child=$!; wait "$child"; }}
save() {{
  trap "" USR1 TERM
  if [ -n "$child" ] && kill -TERM "$child" 2> /dev/null; then wait "$child" || true; fi
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
# How long a run takes depends on the GPU: set --time to what your cluster allows; a run that is cut goes on."""


def command(job: Any, changes: Mapping[str, object]) -> str:
    """Train, or go on, and then measure."""
    return " && ".join(steps(job, changes))


def steps(job: Any, changes: Mapping[str, object]) -> tuple[str, str]:
    """To train and to measure; `changes` are those of the recipe. Paths are whole, for any working folder."""
    place, run, root = job.output.resolve(), job.run, job.run.data.root
    data = [] if root is None else ["--data-root", root]
    changed = [word for path, value in changes.items() for word in (f"--{path}", value)]
    train = ["doubly", "train", run.name, "--seed", run.seed, *data, *changed, "--output", place, "--resume"]
    measure = ["doubly", "evaluate", place, *data, *_how(job)]
    return _shell(train), _shell(measure)


def report_command(runs: Sequence[Path], output: Path) -> str:
    return _shell(["doubly", "report", *(run.resolve() for run in runs), "--output", output.resolve()])


def slurm(
    name: str, commands: Sequence[tuple[str, str]], report: str, jobs: int | None, hours: float | None, logs: Path
) -> str:
    """An array script. `hours`: what the longest run is estimated to take here, and it is given twice that; without,
    the runs are for GPUs, whose speed this machine cannot tell."""
    cases = "\n".join(f"{number}) run {train} && run {measure} ;;" for number, (train, measure) in enumerate(commands))
    return SLURM.format(
        name=name,
        last=len(commands) - 1,
        jobs="" if jobs is None else f"%{jobs}",
        resources=GPU if hours is None else CPU.format(time=_time(math.ceil(2 * hours))),
        logs=str(logs.resolve()).replace(" ", r"\ "),
        count=len(commands),
        report=report,
        cases=cases,
    )


def _time(hours: int) -> str:
    return f"{hours // 24}-{hours % 24:02d}:00:00"


def _how(job: Any) -> list[object]:
    """The flags of `doubly evaluate`; what is the default needs none."""
    words: list[object] = []
    for each in fields(job.measure):
        value, flag = getattr(job.measure, each.name), each.name.replace("_", "-")
        if value != each.default:
            parts = value if isinstance(value, tuple) else (value,)
            words += [f"--no-{flag}" if value is False else f"--{flag}", *(() if isinstance(value, bool) else parts)]
    return [*words, *(["--autoattack"] if "autoattack" in job.attacks else [])]


def _shell(words: Sequence[object]) -> str:
    return shlex.join([str(word) for word in words])

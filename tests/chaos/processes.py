"""Real processes: kills while Python imports, kills of the processes of torchrun, and commands at the same time."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.chaos.kills import SCENARIOS, Process
from tests.chaos.outcomes import CliResult, Outcome, judge_end
from tests.chaos.prepared import EVALUATE, TRAIN, fingerprint

IMPORT_SECONDS = 2.5  # `import torch` takes about as long
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
SECONDS = 240


def kill_imports(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Kill a training in the seconds in which Python imports torch and doubly; then train in peace."""
    draw, whole = random.Random(seed), fingerprint(base / "whole")
    for _ in range(count):
        number, delay = draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)), IMPORT_SECONDS * draw.random()
        process = _start(("-m", "doubly", *TRAIN, "run"))
        note = f"signal {number} after {delay:.2f} s of importing"
        time.sleep(delay)
        process.send_signal(number)
        _, err = process.communicate(timeout=SECONDS)
        # Before `main` runs, Python's own handler prints where Ctrl-C came; that is no error of ours.
        ours = "Traceback" in err and "KeyboardInterrupt" not in err
        yield Outcome("traceback", f"{note}: {err[-600:]}") if ours else Outcome("survived")
    code = Process((*TRAIN, "run")).wait()
    if code or fingerprint(Path("run")) != whole:
        yield Outcome("lost", f"after kills while importing: exit code {code}")


def kill_ranks(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Kill a process of torchrun, or torchrun, at a random moment; the same command then ends with the same bits."""
    draw = random.Random(seed)
    whole = _start((*TORCHRUN, "doubly", *TRAIN, "whole"))
    begun = time.monotonic()
    assert whole.wait(SECONDS) == 0, whole.stderr and whole.stderr.read()
    seconds, notes = time.monotonic() - begun, []
    for _ in range(count):
        process = _start((*TORCHRUN, "doubly", *TRAIN, "killed"))
        time.sleep(draw.uniform(0.3, 1.0) * seconds)
        victims = [process.pid, *_children(process.pid)]
        victim = draw.choice(victims[1:] or victims)
        for pid in (victim,) if victim != process.pid else victims:
            os.kill(pid, signal.SIGKILL)
        notes.append(f"process {victims.index(victim)} of torchrun")
        process.communicate(timeout=SECONDS)
    last = _start((*TORCHRUN, "doubly", *TRAIN, "killed"))
    _, err = last.communicate(timeout=SECONDS)
    is_same = last.returncode == 0 and fingerprint(Path("killed")) == fingerprint(Path("whole"))
    for note in notes:
        yield Outcome("survived") if is_same else Outcome("lost", f"{note}: {last.returncode}: {err[-500:]}")


def at_once(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Evaluate, report, watch and train in a folder that is training, and run two studies in one folder."""
    draw, study = random.Random(seed), SCENARIOS["reproduce"]
    whole = fingerprint(base / "whole")
    yield from _two_studies(study.words)
    left = count - 2
    while left > 0:
        shutil.rmtree("run", ignore_errors=True)
        training = _in_folder(".training", (*TRAIN, "run"))
        while training.wait(0.01) is None and not Path("run/checkpoints/last").exists():
            pass
        while training.wait(draw.random() * 0.2) is None and left > 0:
            verb = draw.choice(("evaluate", "evaluate", "report", "watch", "train", "export"))
            words = {
                "evaluate": ("evaluate", "run", *EVALUATE, "--output", "elsewhere"),
                "report": ("report", "run", "--output", "page"),
                "watch": ("watch", "run", "--once"),
                "train": (*TRAIN, "run"),
                "export": ("export", "run", "--output", "w.safetensors"),
            }[verb]
            other = Process(words)
            code = other.wait() or 0
            yield judge_end(CliResult(code, other.out.read_text(), other.err.read_text()), f"{verb} during training")
            left -= 1
        code = training.wait()
        if code or fingerprint(Path("run")) != whole:
            yield Outcome("lost", f"training that others watched: {code}: {training.err.read_text()[-500:]}")
            left -= 1


def _two_studies(words: Sequence[str]) -> Iterator[Outcome]:
    """Start a study twice in one folder, and again once both have ended: its result is that of a study alone."""
    scenario = SCENARIOS["reproduce"]
    scenario.change()
    results = []
    for folder in ("alone", "both"):
        Path(folder).mkdir()
        os.chdir(folder)
        processes = [_in_folder(f".{number}", words) for number in range(1 if folder == "alone" else 2)]
        codes = [process.wait() for process in processes]
        errors = [process.err.read_text() for process in processes]
        again = Process(words).wait() if folder == "both" else 0
        results.append(scenario.result())
        os.chdir("..")
    same = again == 0 and results[0] == results[1]
    for code, err in zip(codes, errors, strict=True):
        outcome = judge_end(CliResult(code or 0, "", err), "two studies in one folder")
        yield outcome if same else Outcome("lost", f"two studies in one folder: {codes}, then {again}: {errors}")


def _in_folder(folder: str, words: Sequence[str]) -> Process:
    """Start `doubly` with files for its output that no other process has."""
    Path(folder).mkdir(exist_ok=True)
    return Process(words, files=Path(folder))


def _start(words: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _children(parent: int) -> list[int]:
    """Return the processes that a process has started."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                children.append(int(stat.parent.name))
        except OSError:
            continue
    return sorted(children)

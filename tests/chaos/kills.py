"""Processes killed at random moments, and at changes of files: the same command then ends with the same result."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.chaos.faults import run_armed
from tests.chaos.outcomes import CliResult, Outcome, judge_end
from tests.chaos.prepared import AUTOATTACK, SMALL, TRAIN, fingerprint
from tests.chaos.workers import fork_call

from doubly.studies import demo

SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGINT)
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes after a signal that was handled
SECONDS = 240  # that a process may take
TIMES = ("seconds", "peak_memory", "command", "date", "time", "started", "written")


class Scenario(NamedTuple):
    """A command that is killed.

    Attributes:
        words: The command line.
        inputs: Runs of the prepared ones that it reads, copied beside it.
        result: What must be the same as without a kill, read in the working directory.
        most: Kills before one call has to come to its end.
        change: Changes this process before the command, such as the sizes of a study.
    """

    words: Sequence[str]
    inputs: Sequence[str]
    result: Callable[[], Any]
    most: int = 4
    change: Callable[[], object] = lambda: None


def without_times(value: Any) -> Any:
    """Return JSON without what depends on the clock."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def evaluation(folder: str) -> Any:
    """Return all that an evaluation has found."""
    with np.load(Path(folder) / "evaluation.npz") as file:
        arrays = {name: file[name].tolist() for name in file.files}
    return without_times(json.loads((Path(folder) / "evaluation.json").read_text())), arrays


def _repaired() -> Any:
    return fingerprint(Path("new")), without_times(json.loads(Path("new/repair.json").read_text()))


def _report() -> Any:
    files = sorted(str(path) for path in Path("page").rglob("*") if not path.name.startswith("."))
    return files, Path("page/table.csv").read_text(), Path("page/report.html").stat().st_size // 1000


def _search() -> Any:
    return without_times(json.loads(Path("found/search.json").read_text()))


def _demo() -> Any:
    runs = sorted(path.parent for path in Path("study").glob("*/config.json"))
    return Path("study/demo.md").read_text(), [fingerprint(run) for run in runs], [evaluation(str(run)) for run in runs]


def shrink_demo() -> None:
    """Make the runs of `reproduce demo` tiny."""
    from doubly.config.serialize import with_changes
    from doubly.recipes.digits import digits

    tiny = {"batch_size": 512, "model.width": 2, "method.attack.steps": 1, "validation.attack.steps": 1}
    demo.digits = lambda method, imbalanced: with_changes(digits(method, imbalanced), {**tiny, "validation.size": 20})
    demo.SHARED["epochs"] = 1
    demo.ATTACKS = ("pgd", "strong")


SCENARIOS = {
    "train": Scenario((*TRAIN, "run"), (), lambda: fingerprint(Path("run")), most=10),
    "evaluate": Scenario(("evaluate", "whole", *AUTOATTACK), ("whole",), lambda: evaluation("whole"), most=8),
    "repair": Scenario(("repair", "evaluated", "--output", "new"), ("evaluated",), _repaired),
    "report": Scenario(("report", "evaluated", "--output", "page"), ("evaluated",), _report),
    "search": Scenario(
        ("search", "digits.at", *SMALL, "--trials", "1", "--splits", "1", "--jobs", "1", "--output", "found"),
        (),
        _search,
    ),
    "reproduce": Scenario(
        ("reproduce", "demo", "--seeds", "1", "--jobs", "2", "--output", "study"), (), _demo, most=6, change=shrink_demo
    ),
}


def kill(name: str, base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Kill a command so many times, continue it until it ends, and compare the result with that without kills."""
    draw, scenario = random.Random(seed), SCENARIOS[name]
    scenario.change()
    begun = time.monotonic()
    with _folder("reference", base, scenario):
        code = Process(scenario.words).wait()
        assert code == 0, Path("err").read_text()
        changes, expected = int(Path("counted").read_text()), scenario.result()
    seconds = time.monotonic() - begun
    left = count
    while left > 0:
        with _folder("killed", base, scenario):
            outcomes = []
            for _ in range(min(left, scenario.most)):
                outcome = _kill_once(scenario, draw, changes, seconds, f"{name}, seed {seed}")
                if outcome is None:  # it came to its end before
                    break
                outcomes.append(outcome)
            outcomes = _finish(scenario, expected, outcomes, f"{name}, seed {seed}")
            left -= len(outcomes)
            yield from outcomes
    for pid in _orphans(Path.cwd()):
        yield Outcome("lost", f"{name}, seed {seed}: process {pid} goes on although its parent was killed")


def _kill_once(scenario: Scenario, draw: random.Random, changes: int, seconds: float, note: str) -> Outcome | None:
    number = draw.choice(SIGNALS)
    if draw.random() < 0.6:
        at = draw.randint(1, changes)
        process = Process(scenario.words, at, number)
        note = f"{note}, signal {number} at change {at}"
    else:
        process = Process(scenario.words)
        delay = draw.random() * seconds
        process.wait(delay)
        process.send(number, whole_group=draw.random() < 0.5)
        note = f"{note}, signal {number} after {delay:.2f} s"
    code = process.wait()
    if code == 0:
        return None
    if code in (-number, *STOPPED):
        err = process.err.read_text(errors="replace")
        return Outcome("traceback", f"{note}: {err[-600:]}") if "Traceback" in err else Outcome("survived", note)
    return judge_end(CliResult(code, "", process.err.read_text(errors="replace")), note)


def _finish(scenario: Scenario, expected: Any, outcomes: list[Outcome], note: str) -> list[Outcome]:
    """Let the command end, and count the kills as lost if it cannot, or has another result."""
    process = Process(scenario.words)
    code = process.wait()
    history = "; ".join(outcome.note for outcome in outcomes)
    if code and not _was_complete(scenario, expected, process):
        reason = f"{note}: exit code {code}: {process.err.read_text(errors='replace')[-500:]} after {history}"
    elif not code and scenario.result() != expected:
        reason = f"{note}: another result after {history}"
    else:
        return [outcome._replace(note="") if outcome.kind == "survived" else outcome for outcome in outcomes]
    return [Outcome("lost", reason) for _ in outcomes] or [Outcome("lost", reason)]


def _was_complete(scenario: Scenario, expected: Any, process: "Process") -> bool:
    """Return whether a command is refused only because the kill came when its result was complete, as of repair."""
    try:
        return "is not empty" in process.err.read_text(errors="replace") and scenario.result() == expected
    except OSError:
        return False


def _orphans(folder: Path) -> list[str]:
    """Return the processes that work below a folder, after those that are about to end have had the time."""
    deadline, own = time.monotonic() + 10, str(os.getpid())
    while time.monotonic() < deadline:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                place = os.readlink(process / "cwd")
            except OSError:
                continue
            if place.startswith(str(folder)) and process.name != own:
                found.append(process.name)
        if not found:
            break
        time.sleep(0.1)
    return found


class Process:
    """`doubly` in a forked process and a process group of its own."""

    def __init__(self, words: Sequence[str], at: int = 0, number: int = signal.SIGKILL, files: Path = Path()) -> None:
        self.out, self.err, self.code = (files / "out").absolute(), (files / "err").absolute(), None
        self.pid = fork_call(lambda: run_armed(words, at, number, files / "counted"), self.out, self.err)

    def wait(self, seconds: float = SECONDS) -> int | None:
        """Wait for the end and return the exit code; None if it has not ended by then (after all, it is killed)."""
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.005)
        if self.code is None and seconds == SECONDS:
            self.send(signal.SIGKILL, whole_group=True)
            raise TimeoutError(f"no end within {seconds} s: {self.err.read_text(errors='replace')[-500:]}")
        return self.code

    def send(self, number: int, whole_group: bool) -> None:
        """Send a signal to the process, or also to those that it has started."""
        if self.code is None:
            try:
                (os.killpg if whole_group else os.kill)(self.pid, number)
            except ProcessLookupError:  # so young that it has no group yet
                os.kill(self.pid, number)


class _folder:  # noqa: N801 - used as a function
    """A working directory with copies of the prepared runs."""

    def __init__(self, name: str, base: Path, scenario: Scenario) -> None:
        self.path, self.before = Path(name).absolute(), Path.cwd()
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        for run in scenario.inputs:
            shutil.copytree(base / run, self.path / run)

    def __enter__(self) -> None:
        os.chdir(self.path)

    def __exit__(self, *_: object) -> None:
        os.chdir(self.before)

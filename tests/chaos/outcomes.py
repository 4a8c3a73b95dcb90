"""What became of an attempt, and the command line called in this process."""

import io
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import NamedTuple

from rich.console import Console

import doubly.cli

FINE = ("survived", "refused")
KINDS = ("survived", "refused", "lost", "traceback", "executed")
SECONDS = 120  # after which an attempt in this process counts as lost


class Outcome(NamedTuple):
    """One attempt: one of `KINDS`, and what was tried, with the error where it is not fine."""

    kind: str
    note: str = ""


class CliResult(NamedTuple):
    """The exit code and the output of a call; `error` is the traceback of an exception that came out of it."""

    code: int
    out: str
    err: str
    error: str = ""


class TooSlowError(BaseException):
    """An attempt hangs. Not an Exception, so that no handler takes it for an error of the file."""


def call_cli(words: Sequence[object]) -> CliResult:
    """Call `doubly` in this process."""
    out, err = io.StringIO(), io.StringIO()
    doubly.cli.OUT, doubly.cli.ERR = Console(width=200), Console(width=200, stderr=True)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code, error = doubly.cli.main([str(word) for word in words]), ""
        except Exception:
            code, error = 1, traceback.format_exc()
    return CliResult(code, out.getvalue(), err.getvalue(), error)


def judge_cli(words: Sequence[object], note: str) -> tuple[Outcome, CliResult]:
    """Call `doubly`, and classify how it ended."""
    note = f"doubly {' '.join(map(str, words))} | {note}"
    try:
        with bounded():
            result = call_cli(words)
    except TooSlowError:
        return Outcome("lost", f"{note}: no end within {SECONDS} s"), CliResult(1, "", "")
    return judge_end(result, note), result


def judge_end(result: CliResult, note: str) -> Outcome:
    """Classify the end of a process or call: a result, a sentence, or a traceback."""
    said = f"{result.err}\n{result.out}".strip()
    if result.error or "Traceback (most recent call last)" in said:
        return Outcome("traceback", f"{note}: {_end(result.error or said)}")
    if result.code == 0:
        return Outcome("survived")
    if result.code < 0 or not said:
        return Outcome("traceback", f"{note}: exit code {result.code} and no sentence")
    return Outcome("refused")


@contextmanager
def bounded(seconds: int = SECONDS) -> Iterator[None]:
    """Raise `TooSlowError` inside if it lasts too long."""

    def stop(number: int, frame: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge_call(call: object, note: str) -> tuple[Outcome, object]:
    """Call a function of the library: a result, a ValueError with a sentence, or any other error."""
    try:
        with bounded():
            value = call()  # type: ignore[operator]
    except TooSlowError:
        return Outcome("lost", f"{note}: no end within {SECONDS} s"), None
    except ValueError as error:
        if "\n" not in str(error) and type(error).__module__.startswith("doubly"):
            return Outcome("refused"), None
        return Outcome("traceback", f"{note}: {_end(traceback.format_exc())}"), None
    except Exception:
        return Outcome("traceback", f"{note}: {_end(traceback.format_exc())}"), None
    return Outcome("survived"), value


def _end(text: str) -> str:
    """Return the last frames and the error, on one line."""
    return " / ".join(line.strip() for line in text.strip().splitlines()[-7:])[-700:]

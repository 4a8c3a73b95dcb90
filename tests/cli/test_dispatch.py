"""doubly itself: help, version, exit codes, torchrun, and which verbs do without torch."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from doubly.cli import VERBS, main
from doubly.errors import Interrupted, NonFiniteError, ProcessLost, UsageError
from doubly.version import __version__

RUN = Path(__file__).parents[2] / "results" / "cifar10-small" / "cifar10.small.at-s0"
WITHOUT_TORCH = """
import json, sys
from doubly.__main__ import main

codes = [main(words) for words in json.loads(sys.argv[1])]
print("codes", *codes, "torch" in sys.modules)
"""


def test_help_version_report_and_watch_do_not_import_torch(tmp_path):
    commands = [
        *(["--help"], ["--version"], ["train", "--help"], ["report", "--help"], ["watch", "--help"]),
        *(["report", str(RUN), "--output", "page"], ["watch", str(RUN), "--once"]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == f"codes {'0 ' * len(commands)}False", done.stdout + done.stderr
    assert f"doubly {__version__}\n" in done.stdout and (tmp_path / "page" / "report.html").exists()


def test_help_names_every_verb_and_every_verb_has_help(cli, tmp_path):
    code, out, err = cli("--help")
    assert (code, err) == (0, "") and all(f"│ {name} " in out for name in VERBS)
    assert cli()[0] == 2
    for name in (*VERBS, "data fetch", "data inspect", "data imbalance"):
        for flag in ("--help", "-h"):
            code, out, err = cli(*name.split(), flag)
            assert (code, err) == (0, "") and f"doubly {name}" in out, name
    assert not list(tmp_path.iterdir())


def test_an_unknown_verb_is_refused(cli):
    code, out, err = cli("trian", "digits.at")
    assert (code, out) == (2, "") and err.startswith("doubly: there is no verb 'trian': valid are train, watch, ")


@pytest.fixture
def raising(monkeypatch):
    """Return a function that lets `doubly export` raise an error."""

    def call(error):
        def export(arguments, out, err):
            raise error

        monkeypatch.setattr("doubly.cli.export.export", export)

    return call


def test_errors_become_exit_codes_and_one_sentence(cli, raising):
    terminated = Interrupted("stopped")
    terminated.number = 15
    for error, code, message in [
        (UsageError("wrong"), 2, "doubly: wrong\n"),
        (NonFiniteError("nan"), 2, "doubly: nan\n"),
        (OSError("disk full"), 2, "doubly: disk full\n"),
        (OSError(30, "Read-only", "a/b"), 2, "doubly: a/b cannot be used (Read-only): check the path, its permissions"),
        (MemoryError(), 2, "doubly: there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "doubly: there is not enough memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), 2, "doubly: there is not enough mem"),
        (ProcessLost("gone"), 75, "doubly: another process of this run has ended or cannot be reached (gone)"),
        (terminated, 143, "doubly: stopped\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (SystemExit(), 0, ""),
        (SystemExit(2), 2, ""),
    ]:
        raising(error)
        result = cli("export")
        assert (result.code, result.out) == (code, "") and result.err.startswith(message), error
    raising(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):  # with its traceback
        cli("export")


def test_the_first_process_of_torchrun_prints_and_errors_of_others_name_their_process(cli, raising, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli("--version") == (0, "", "")
    assert cli("train", "nothing").err.startswith("doubly, process 1: there is no recipe 'nothing'")
    monkeypatch.setenv("RANK", "0")
    code, _, err = cli("doctor")
    assert code == 2 and "doctor runs in one process: start it without torchrun, which is for train and evaluate" in err
    assert cli("--version").out == f"doubly {__version__}\n"


def test_characters_that_the_terminal_does_not_have_are_replaced(monkeypatch, raising):
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    for name, stderr in (("OUT", False), ("ERR", True)):
        monkeypatch.setattr(f"doubly.cli.{name}", Console(stderr=stderr))
    raising(UsageError("ε is too large"))
    assert main(["--help"]) == 0 and main(["list", "methods"]) == 0 and main(["export"]) == 2
    for stream in streams.values():
        stream.flush()
    assert streams["stderr"].buffer.getvalue() == b"doubly: ? is too large\n"
    assert b"train" in streams["stdout"].buffer.getvalue()

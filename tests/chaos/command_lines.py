"""Malformed command lines: flags of every verb with missing, wrong and absurd values."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.outcomes import Outcome, call_cli, judge_cli

from doubly.cli import VERBS

VALUES = (
    "", "-1", "0", "1", "2", "1.5", "nan", "inf", "-inf", "1e400", "9" * 400, "8/255", "1/0", "0/0", "x", "--", "-",
    "true", "None", "[]", "{}", "[1", '{"a": 1}', "../..", "/", "/dev/null", "nowhere", "\udcff", "\x1b[2J",
    "猫", "x" * 5000, "linf", "l2", "cpu", "cuda", "cuda:99", "meta", "auto", "at", "done_pgd", "digits", "digits.at",
    "method=done", "model=", "=", "a.b.c=1", "last", "best", "os:system", "a:b:c", "0.1", "3", "png", "*", "%s", "\n",
)  # fmt: skip
LONG = (
    "--autoattack",
    "--quick",
    "--curve-images",
    "--jobs",
    "--ray",
    "--trust-code",
    "--images",
)  # work, not a mistake
STARTS = {  # beginning of each verb's line, and an end that keeps it short
    "train": ((["digits.at"], ["--data", "DIGITS", "--method", "at"], ["--config", "RUN/config.json"]), ["--dry-run"]),
    "watch": ((["RUN"], ["nowhere"]), ["--once"]),
    "check": ((["nowhere"], ["os:getcwd"]), []),
    "evaluate": ((["RUN"], ["nowhere"], ["--data", "DIGITS"]), ["--images", "4", "--no-trust"]),
    "repair": ((["nowhere"], ["RUN", "--output", "RUN"]), []),
    "frontier": ((["nowhere"], ["RUN", "nowhere"]), []),
    "compare": ((["RUN", "RUN"], ["nowhere", "RUN"]), []),
    "report": ((["nowhere"],), []),
    "search": ((["digits.at"],), ["--trials", "0"]),
    "reproduce": ((["demo"], ["table1"], ["figure5"], ["weak_classes"]), ["--dry-run"]),
    "data": ((["inspect", "digits"], ["inspect"], ["imbalance", "digits"], ["list"]), []),
    "export": ((["RUN", "--output", "w.safetensors"], ["nowhere"]), []),
    "list": (([], ["methods"], ["kinds"]), []),
    "completion": (([], ["--print"]), []),
    "doctor": (([], ["x"]), ["--nothing"]),
}


def malformed_lines(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Call verbs with random flags and values."""
    assert set(STARTS) == set(VERBS), "say here how each verb begins"
    os.environ["HOME"] = str(Path.cwd())  # completion writes there
    draw, flags = random.Random(seed), {verb: _flags(verb) for verb in STARTS}
    for number in range(count):
        verb = sorted(STARTS)[number % len(STARTS)] if draw.random() < 0.5 else "train"
        starts, end = STARTS[verb]
        words = [*draw.choice(starts), *_random_words(flags[verb], draw)]
        if draw.random() < 0.1:
            draw.shuffle(words)
        shutil.rmtree("RUN", ignore_errors=True)
        shutil.copytree(base / "evaluated", "RUN")
        shutil.copyfile(base / "inputs" / "digits.npz", "DIGITS.npz")
        words = [word.replace("DIGITS", "DIGITS.npz") for word in words]
        first = [verb] if draw.random() < 0.98 else [draw.choice(VALUES)]
        yield judge_cli([*first, *words, *end], "")[0]


def _random_words(flags: list[str], draw: random.Random) -> list[str]:
    words = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.random()
        flag = draw.choice(flags) if kind < 0.9 else f"--{draw.choice(VALUES)}"
        if kind < 0.15:
            words.append(f"{flag}={draw.choice(VALUES)}")
        elif kind < 0.85:
            words += [flag, draw.choice(VALUES)]
        else:
            words.append(draw.choice((flag, draw.choice(VALUES))))
    return words


def _flags(verb: str) -> list[str]:
    """Return the flags that the help of a verb names."""
    starts, _ = STARTS[verb]
    texts = [call_cli((verb, *words, "--help-all")) for words in (starts[0], [])]
    named = {flag for text in texts for flag in re.findall(r"--[a-z][\w.-]*\w", text.out + text.err)}
    return sorted(named - set(LONG)) or ["--nothing"]

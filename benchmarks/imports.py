"""How long `import doubly` takes beside `import torch`, and which commands do without torch. A part of run.py."""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lines import Line, Outcome, Settings, answer, medians, taking_turns

ROOT = Path(__file__).parents[1]
NAMES = "from doubly import DONE, PGD, LinfBall, evaluate, train"  # what the README's five lines need
STATEMENTS = {"torch": "import torch", "doubly": "import doubly", "its names": NAMES}
WITHOUT_TORCH = """
import sys
from doubly.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
assert not code, code
print("torch" in sys.modules)
"""


FIRST_STEP = """
import os, sys
from doubly.cli import main
from doubly.training import loop
step = loop.train_step
def first(*arguments):
    step(*arguments)
    os._exit(0)
loop.train_step = first
main(["train", "digits.at", "--output", sys.argv[1]])
"""


def starting(statement: str) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - start

    return seconds


def cpu_seconds(*words: str) -> float:
    """Return the CPU seconds of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def torch_free(what: str, *words: str) -> Line:
    """Whether the command ran and torch was not imported."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, check=False)
    error = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    return answer(f"{what} without importing torch", done.stdout.endswith("False\n") and not done.returncode, error)


def measure(settings: Settings) -> Outcome:
    seconds = taking_turns({name: starting(statement) for name, statement in STATEMENTS.items()}, settings.rounds)

    def beyond_torch(name: str, label: str) -> Line:
        differences = (a - b for a, b in zip(seconds[name], seconds["torch"], strict=True))
        return Line(label, tuple(differences), aim=0.2, unit="s")

    commands = {word: cpu_seconds("-m", "doubly", *word.split()) for word in ("--help", "list recipes", "--version")}
    with tempfile.TemporaryDirectory() as folder:
        first_step = [cpu_seconds("-c", FIRST_STEP, f"{folder}/{turn}") for turn in range(settings.rounds)]
        torch_alone = [cpu_seconds("-c", "import torch") for _ in range(settings.rounds)]
        runs = ROOT / "results" / "cifar10-small" / ("cifar10.small.at-s0" if settings.quick else "")
        lines = [
            beyond_torch("doubly", "`import doubly` − `import torch`"),
            beyond_torch("its names", f"`{NAMES}` − `import torch`"),
            torch_free("`doubly --help`", "--help"),
            torch_free("`doubly list recipes`", "list", "recipes"),
            *(Line(f"`doubly {word}`, CPU seconds", (value,), 0.4, unit="s") for word, value in commands.items()),
            Line(
                "from Enter to the first step of `doubly train digits.at` / `import torch`, CPU seconds",
                tuple(a / b for a, b in zip(first_step, torch_alone, strict=True)),
                1.3,
            ),
            torch_free("`doubly report` of results/cifar10-small", "report", str(runs), "--output", f"{folder}/report"),
        ]
    # `import doubly` alone loads nothing: the line with names is the one to look at.
    return Outcome(lines, "a Python process each, from its start to its end", medians(seconds))

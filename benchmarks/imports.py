"""How long `import doubly` takes beside `import torch`, and which commands do without torch. A part of run.py."""

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


def starting(statement: str) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - start

    return seconds


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

    with tempfile.TemporaryDirectory() as folder:
        runs = ROOT / "results" / "cifar10-small" / ("cifar10.small.at-s0" if settings.quick else "")
        lines = [
            beyond_torch("doubly", "`import doubly` − `import torch`"),
            beyond_torch("its names", f"`{NAMES}` − `import torch`"),
            torch_free("`doubly --help`", "--help"),
            torch_free("`doubly report` of results/cifar10-small", "report", str(runs), "--output", f"{folder}/report"),
        ]
    # `import doubly` alone loads nothing: the line with names is the one to look at.
    return Outcome(lines, "a Python process each, from its start to its end", medians(seconds))

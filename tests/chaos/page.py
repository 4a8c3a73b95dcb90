"""The table of the campaign, and docs/reliability.md."""

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from tests.chaos import ROOT
from tests.chaos.campaigns import CAMPAIGNS
from tests.chaos.outcomes import KINDS, Outcome

HEAD = ("campaign", "tried", "survived", "refused with a sentence", "lost", "tracebacks", "executed")
PAGE = """\
# Reliability

What happens to `doubly` when calls are wrong, files are damaged or hostile, and processes are killed. `make chaos` \
tries it by the thousand and writes this page; nothing on it was typed by hand.

{table}

{run}

- **survived**: the command or call came to a right result: the damage did not matter, an older checkpoint was taken, \
or, after a kill, the same command ended with the same bits as one that was not killed.
- **refused with a sentence**: it ended with a message that names the file or argument and says what to do.
- **lost**: a run that cannot be continued, ends with another result or hangs; a process that stays behind.
- **tracebacks**: an error of Python, torch or numpy reached the user.
- **executed**: code from a file was run, a file was written outside its folder, or a name was obeyed as a command of \
a terminal, spreadsheet, browser or LaTeX.

## What each row does

{about}

## Run it yourself

```bash
make chaos
```

The seed decides what is tried, except for moments on the clock: `SEED=7` behind it tries something else, and \
`SCALE=0.1` a tenth of it. The command prints each attempt that is lost, ends in a traceback or executes \
something, and then exits with code 1. It takes two processes at a time. The campaign is in `tests/chaos/`.

[Security](security.md) says which files may be opened from strangers, and what a killed process leaves.
"""


class Settings(NamedTuple):
    """How a campaign was run."""

    seed: int
    scale: float
    workers: int
    seconds: float
    load: float


def count(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Return how many attempts ended in each way."""
    return Counter(outcome.kind for outcome in outcomes)


def table_lines(counts: Mapping[str, Counter[str]]) -> list[str]:
    """Return the table as Markdown."""
    rows = [(name, *_cells(numbers)) for name, numbers in counts.items()]
    total: Counter[str] = sum(counts.values(), Counter())
    rows.append(("**all**", *_cells(total)))
    return [f"| {' | '.join(row)} |" for row in (HEAD, ("---", *["---:"] * 6), *rows)]


def _cells(numbers: Counter[str]) -> list[str]:
    return [f"{numbers.total():,}", *(f"{numbers[kind]:,}" for kind in KINDS)]


def write_page(output: Path, counts: Mapping[str, Counter[str]], settings: Settings) -> None:
    """Write docs/reliability.md."""
    _write(output, counts, _describe(settings))


def replace_rows(output: Path, counts: Mapping[str, Counter[str]], settings: Settings) -> None:
    """Replace the rows of some campaigns in the page, and say that they were run again."""
    text = output.read_text(encoding="utf-8")
    before = {}
    for campaign in CAMPAIGNS:
        cells = re.search(rf"^\| {campaign.name} \| (.+) \|$", text, re.MULTILINE)
        numbers = [int(cell.replace(",", "")) for cell in cells[1].split(" | ")[1:]] if cells else []
        before[campaign.name] = Counter(dict(zip(KINDS, numbers, strict=bool(numbers))))
    (described,) = re.findall(r"^`make chaos` of .*$", text, re.MULTILINE)
    names = [f"{name} (before: {sum(before[name][kind] for kind in KINDS[2:])} lost or worse)" for name in counts]
    _write(output, {**before, **counts}, f"{described} Run again later: {', '.join(names)}: {_describe(settings)}")


def _write(output: Path, counts: Mapping[str, Counter[str]], described: str) -> None:
    about: dict[str, list[str]] = {}
    for campaign in CAMPAIGNS:
        about.setdefault(campaign.about, []).append(campaign.name)
    lines = [f"- **{', '.join(names)}**: {text}" for text, names in about.items()]
    page = PAGE.format(table="\n".join(table_lines(counts)), run=described, about="\n".join(lines))
    output.write_text(page, encoding="utf-8")


def _describe(settings: Settings) -> str:
    """Return date, commit, seed and machine in a sentence."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{cores} cores of {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    return (
        f"`make chaos` of {datetime.now(UTC):%Y-%m-%d}, seed {settings.seed}, scale {settings.scale:g}, "
        f"commit `{_commit()}`: {settings.seconds / 60:.0f} minutes with {settings.workers} processes on {machine}, "
        f"torch {torch.__version__}; mean load of the machine {settings.load:.1f}, which includes these processes."
    )


def _commit() -> str:
    """Return the commit, with a mark if files of the package or of the campaign differ from it."""
    words = {"head": ("rev-parse", "--short=10", "HEAD"), "changed": ("status", "--porcelain", "src", "tests")}
    texts = {}
    for name, arguments in words.items():
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        texts[name] = result.stdout.strip() if result.returncode == 0 else ""
    return f"{texts['head'] or 'unknown'}{' with changes' if texts['changed'] else ''}"

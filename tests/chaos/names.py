"""Hostile names of runs, methods and classes in every output: shown, and obeyed by nothing."""

import csv
import io
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.outcomes import Outcome, judge_cli

import doubly.report.pictures
from doubly.text import FORMULA_STARTS

PARTS = (
    "cat", "=1+1", "+", "-2", "@x", "\t=", "\x1b[2J", "\x1b]0;t\x07", "\n", "\r", "\x00", "\x85", "\u2028", "\udcff",
    "\ud83d", "<script>alert(1)</script>", "&amp;", "'", '"', "|", "`", "*", "_", "[", "]", "\\", "{", "}", "$", "%",
    "#", "~", "^", "\\end{tabular}", "[bold]", "../", "/", "é", "猫", "x" * 300, "'><img src=x onerror=alert(1)>",
)  # fmt: skip
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def hostile_names(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Give a run and its classes hostile names, and write its report, compare it and watch it."""
    draw, run = random.Random(seed), Path("run")
    doubly.report.pictures._draw = lambda wanted, stem: []
    for _ in range(count):
        for left in (run, Path("out")):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(base / "evaluated", run, ignore=shutil.ignore_patterns("checkpoints"))
        name = "".join(draw.choices(PARTS, k=draw.randint(1, 5)))
        where = _rename(run, name, draw)
        verb = draw.choice(("report", "report", "compare", "watch"))
        words = {"report": ("report", run, "--output", "out"), "compare": ("compare", run, run)}
        note = f"{where} = {name!r:.80}"
        outcome, result = judge_cli(words.get(verb, ("watch", run, "--once")), note)
        obeyed = CONTROL.search(result.out.replace("\r\n", "\n")) or CONTROL.search(result.err) or _obeyed(Path("out"))
        yield Outcome("executed", f"{verb}: {note}: {obeyed}") if obeyed else outcome


def _rename(run: Path, name: str, draw: random.Random) -> str:
    where = draw.choice(("name", "label", "table", "classes", "attack", "note"))
    file = run / ("evaluation.json" if where in ("classes", "attack", "note") else "config.json")
    tree = json.loads(file.read_text())
    if where == "classes":
        tree = _renamed(tree, draw.choice(sorted(tree["per_class"])), name)
    elif where == "attack":
        for part in tree.values():
            if isinstance(part, dict) and "pgd" in part:
                part[name] = part["pgd"]
    else:
        tree[where] = name
    file.write_bytes(json.dumps(tree).encode())
    return where


def _renamed(tree: Any, old: str, new: str) -> Any:
    """Return JSON with another name for a class, as a key and as a value."""
    if isinstance(tree, dict):
        return {new if key == old else key: _renamed(value, old, new) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_renamed(value, old, new) for value in tree]
    return new if tree == old else tree


def _obeyed(folder: Path) -> str:
    """Return what in a report would be obeyed by a browser, a spreadsheet or LaTeX; nothing if all is escaped."""
    page, table, latex = (folder / name for name in ("report.html", "table.csv", "table.tex"))
    if not page.exists():
        return ""
    text = page.read_text("utf-8")
    rows = csv.reader(io.StringIO(table.read_text("utf-8")))
    if "<script>alert" in text or "<img src=x onerror" in text or CONTROL.search(text):
        return "HTML"
    if any(cell.startswith(FORMULA_STARTS) and not _is_number(cell) for row in rows for cell in row):
        return "a formula"
    begun, ended = (latex.read_text("utf-8").count(f"\\{word}{{tabular}}") for word in ("begin", "end"))
    return "" if begun == ended else "LaTeX"


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.]+( ± [\d.]+)?", cell) is not None

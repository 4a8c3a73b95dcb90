"""A leaderboard that is one file: networks of any origin, one sortable table per protocol, never two in one."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.errors import UsageError
from doubly.metric_names import METRICS
from doubly.report.leaderboard_entry import make_entry, read_entry
from doubly.report.protocol import describe_attack, describe_setting, flatten
from doubly.report.run_result import read_run
from doubly.report.templates import load_template
from doubly.rundir import is_result, runs_in
from doubly.text import duration, format_percent, printable, shorten

FIRST = ("ra_pgd", "ra_tail_30")  # average and tail stand side by side


@dataclass(frozen=True)
class Cell:
    """A cell of the table: what is shown, what it is sorted by, and an address that it leads to."""

    text: str
    value: float | str = "nan"
    link: str = ""
    is_best: bool = False


@dataclass(frozen=True)
class Board:
    """The entries that were measured by one protocol."""

    key: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]

    @property
    def identity(self) -> str:
        """A short checksum of the protocol."""
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def title(self) -> str:
        """Dataset, attack and number of images in words."""
        first = self.entries[0]
        attack = shorten(describe_attack(first["protocol"]) or "attack", 200)
        return f"{shorten(first['data'])}: {attack}, n = {first['n']:,}"

    @property
    def details(self) -> str:
        """Every setting of the protocol."""
        settings = [describe_setting(key, value) for key, value in self.key.items() if key != "classes"]
        return shorten(", ".join(settings), 1000)

    @property
    def metrics(self) -> list[str]:
        """The accuracies that an entry has, clean, average and tail first."""
        used = {key for entry in self.entries for key, value in entry["accuracies"].items() if value is not None}
        return [key for key in dict.fromkeys(("sa", *FIRST, *METRICS)) if key in used]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Title and explanation of each column."""
        accuracies = [(METRICS[key].label, METRICS[key].explanation) for key in self.metrics]
        cost = (
            ("training", "training time, on whichever machine it was"),
            ("passes", "forward and backward passes per image"),
        )
        worst = ("worst class", METRICS["worst_class"].explanation)
        trust = ("checks", "what the checks of the numbers say; suspicious ones stand below and are never best")
        return [("network", ""), ("method", ""), ("trained on", ""), *accuracies, worst, *cost, trust]

    @property
    def rows(self) -> list[list[Cell]]:
        """The entries, highest tail first, suspicious ones below the others."""
        trusted = [entry for entry in self.entries if not _is_suspicious(entry)]
        best = {key: max((e["accuracies"].get(key) or 0.0 for e in trusted), default=2.0) for key in self.metrics}
        ordered = sorted(self.entries, key=lambda e: (_is_suspicious(e), -e["accuracies"]["ra_tail_30"], e["name"]))
        return [self._row(entry, best) for entry in ordered]

    def _row(self, entry: Mapping[str, Any], best: Mapping[str, float]) -> list[Cell]:
        seed = f", seed {entry['seed']}" if entry.get("seed") else ""
        cells = [Cell(shorten(entry["name"], 60) + seed, printable(entry["name"]), entry.get("link", ""))]
        words = entry["method"], entry.get("trained_on") or "-"
        cells += [Cell(shorten(text, 40), printable(text)) for text in words]
        for key in self.metrics:
            value = entry["accuracies"].get(key)
            is_best = value == best[key] and not _is_suspicious(entry)
            cells.append(Cell("-") if value is None else Cell(format_percent(value), value, is_best=is_best))
        name, worst = min(
            ((name, row["ra_pgd"]) for name, row in entry["per_class"].items() if row["ra_pgd"] is not None),
            key=lambda pair: pair[1],
        )
        seconds, passes = (entry["cost"].get(key) for key in ("seconds", "passes"))
        cells.append(Cell(f"{format_percent(worst)} ({shorten(name)})", worst))
        cells.append(Cell("-") if seconds is None else Cell(duration(seconds), seconds))
        cells.append(Cell("-") if passes is None else Cell(f"{passes:,.0f}", passes))
        verdict = entry.get("trust", "")
        return [*cells, Cell(shorten(verdict, 30) if verdict else "not checked", printable(verdict) or "nan")]


def _is_suspicious(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("trust") == "suspicious")


def read_entries(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the entries of run directories, evaluations and JSON files, and of folders of these.

    Args:
        paths: Where they are; what is named twice counts once.

    Raises:
        UsageError: If there are none, or one is not valid; the message names it.
    """
    entries: dict[Path, dict[str, Any]] = {}
    for path in paths:
        files = (
            [path] if path.is_file() else sorted(path.glob("*.json")) if not is_result(path) and path.is_dir() else []
        )
        entries |= {file.resolve(): read_entry(file) for file in files}
        if not files or (path.is_dir() and any(map(is_result, path.iterdir()))):
            entries |= {run.resolve(): make_entry(read_run(run)) for run in runs_in(path, is_result)}
    if not entries:
        raise UsageError("a leaderboard needs at least one entry: give run directories, evaluations or entry files")
    return list(entries.values())


def group(entries: Sequence[Mapping[str, Any]]) -> list[Board]:
    """Return one board per protocol, the largest first.

    An entry without AutoAttack may share a table with one that has it; two with different settings of it may not.
    """
    same: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        same.setdefault(json.dumps(_key(entry), sort_keys=True), []).append(entry)
    boards = [
        Board(_key(part[0]) | _autoattack(part), part) for alike in same.values() for part in _by_autoattack(alike)
    ]
    return sorted(boards, key=lambda board: (-len(board.entries), board.title))


def _key(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything but AutoAttack that two numbers must share to be compared."""
    protocol, has_images = flatten(entry["protocol"]), "data_sha256" in entry["protocol"]
    data = {} if has_images else {"data": entry["data"]}  # the checksum tells more than a name
    tail = {f"tail.{key}": value for key, value in entry["tail"].items()}
    return {**data, "n": entry["n"], **protocol, **tail, "classes": list(entry["per_class"])}


def _autoattack(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of AutoAttack of the first entry that has it."""
    return flatten({"autoattack": next((entry["autoattack"] for entry in entries if entry.get("autoattack")), {})})


def _by_autoattack(entries: list[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        kinds.setdefault(json.dumps(_autoattack([entry]), sort_keys=True), []).append(entry)
    return list(kinds.values()) if len(kinds.keys() - {"{}"}) > 1 else [entries]


def require_one_protocol(boards: Sequence[Board]) -> None:
    """Refuse entries of several protocols.

    Raises:
        UsageError: It names the settings in which they differ.
    """
    if len(boards) > 1:
        keys = dict.fromkeys(key for board in boards for key in board.key)
        differ = [key for key in keys if len({repr(board.key.get(key)) for board in boards}) > 1]
        raise UsageError(
            f"the entries were measured by {len(boards)} protocols, which differ in {', '.join(differ[:6])}: evaluate "
            "them in the same way, or leave out --one-protocol for a table each"
        )


def render(boards: Sequence[Board]) -> str:
    """Return the page; all text is escaped."""
    return load_template("leaderboard.html.j2").render(boards=boards)

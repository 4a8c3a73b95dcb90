"""doubly list."""

import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from doubly.cli.tables import print_line
from doubly.errors import UsageError

CATALOG = Path(__file__).with_name("catalog.json")  # written by catalog.py, so that no list imports torch
HELP = """\
usage: doubly list methods|attacks|models|datasets|recipes|kinds [PREFIX]
       doubly list recipes --names
       doubly list passes

List what can be named, with a line about each; with a prefix, only the names that begin with it.
recipes: a table of datasets and methods; with --names or a prefix, a line about each recipe.
kinds: what `doubly train --set PATH=KIND` takes. passes: forward and backward passes in a step of each method."""

TABLES = ("methods", "attacks", "models", "datasets", "recipes", "kinds", "passes")
FORMS = {"": "B", "imbalanced": "I", "small": "b", "imbalanced.small": "i"}
RECIPE_NAMES = """\
A recipe is named DATASET.METHOD, as in `doubly train digits.at`:
  B  DATASET.METHOD                    b  DATASET.small.METHOD, for two CPU cores
  I  DATASET.imbalanced.METHOD         i  DATASET.imbalanced.small.METHOD
`doubly list recipes digits` has a line about each of digits, `doubly list recipes --names` of all."""


def list_entries(arguments: list[str], out: Console, err: Console) -> int:
    """Print the entries of one of the tables, with a line about each."""
    if len(arguments) not in (1, 2) or arguments[0] in ("-h", "--help"):
        print_line(out, HELP)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    if arguments == ["passes"]:
        from doubly.studies.passes import passes_table

        out.out(passes_table(), highlight=False)
        return 0
    if arguments == ["recipes"]:
        out.out(_recipe_table(_entries("recipes")), highlight=False)
        return 0
    prefix = arguments[1] if len(arguments) == 2 and arguments != ["recipes", "--names"] else ""
    for name, text in _entries(arguments[0]).items():
        if name.startswith(prefix):
            print_line(out, f"{name:40} {text}")
    return 0


def _recipe_table(names: Iterable[str]) -> str:
    """Return which recipes there are: a row per method, a column per dataset, and a mark for each form of it."""
    forms: dict[str, dict[str, set[str]]] = {}
    for name in names:
        dataset, *form, method = name.split(".")
        forms.setdefault(method, {}).setdefault(dataset, set()).add(".".join(form))
    datasets = list(dict.fromkeys(name.partition(".")[0] for name in names))
    rows = [["method", *datasets]]
    for method, found in forms.items():
        cells = [
            [mark if form in found.get(dataset, ()) else "-" for form, mark in FORMS.items()] for dataset in datasets
        ]
        rows.append([method, *(" ".join(cell) for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], "", RECIPE_NAMES])


def _entries(table: str) -> dict[str, str]:
    """Return names and lines of one of the tables."""
    tables: dict[str, dict[str, str]] = json.loads(CATALOG.read_text(encoding="utf-8"))
    if table not in tables:
        from doubly.config.serialize import suggestion

        raise UsageError(f"there is no list of '{table}'{suggestion(table, TABLES)}")
    return tables[table]

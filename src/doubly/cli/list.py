"""doubly list."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from doubly.cli.tables import print_line
from doubly.errors import UsageError
from doubly.text import method_label

if TYPE_CHECKING:
    from doubly.config import Run

HELP = """\
usage: doubly list methods|attacks|models|datasets|recipes|kinds [PREFIX]
       doubly list passes

List what can be named, with a line about each; with a prefix, only the names that begin with it.
kinds: what `doubly train --set PATH=KIND` takes. passes: forward and backward passes in a step of each method."""


def list_entries(arguments: list[str], out: Console, err: Console) -> int:
    """Print the entries of one of the tables, with a line about each."""
    if len(arguments) not in (1, 2) or arguments[0] in ("-h", "--help"):
        print_line(out, HELP)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    if arguments == ["passes"]:
        from doubly.studies.passes import passes_table

        out.out(passes_table(), highlight=False)
        return 0
    prefix = arguments[1] if len(arguments) == 2 else ""
    for name, entry in _entries(arguments[0]).items():
        if name.startswith(prefix):
            text = _describe(entry()) if arguments[0] == "recipes" else (entry.__doc__ or "").strip().splitlines()[0]
            print_line(out, f"{name:40} {text}")
    return 0


def _describe(run: "Run") -> str:
    """Return what tells recipes of a dataset apart."""
    label = run.label or method_label(run.name)
    return f"{label}, {run.model.label}, {run.epochs} epochs, batch size {run.batch_size}"


def _entries(table: str) -> Mapping[str, Any]:
    from doubly.attacks import ATTACKS
    from doubly.attacks.autoattack import AutoAttack
    from doubly.config.serialize import KINDS, suggestion
    from doubly.data import DATASETS
    from doubly.methods import METHODS
    from doubly.models import MODELS
    from doubly.recipes import RECIPES

    tables: dict[str, Mapping[str, Any]] = {
        "methods": METHODS,
        "attacks": {**ATTACKS, "autoattack": AutoAttack},
        "models": MODELS,
        "datasets": DATASETS,
        "recipes": RECIPES,
        "kinds": KINDS,
    }
    if table not in tables:
        raise UsageError(f"there is no list of '{table}'{suggestion(table, [*tables, 'passes'])}")
    return tables[table]

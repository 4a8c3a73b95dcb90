"""What can be named on the command line, with a line about each; `python -m doubly.cli.catalog` writes catalog.json.

`doubly list` and shell completion read that file instead of importing torch. A test compares it with the registries.
"""

import json
from collections.abc import Mapping
from typing import Any

from doubly.attacks import ATTACKS
from doubly.attacks.autoattack import AutoAttack
from doubly.cli.list import CATALOG
from doubly.config import Run
from doubly.config.serialize import KINDS
from doubly.data import DATASETS
from doubly.methods import METHODS
from doubly.models import MODELS
from doubly.recipes import RECIPES
from doubly.text import method_label


def catalog() -> dict[str, dict[str, str]]:
    """Return the names of each table with a line about each."""
    tables: dict[str, Mapping[str, Any]] = {
        "methods": METHODS,
        "attacks": {**ATTACKS, "autoattack": AutoAttack},
        "models": MODELS,
        "datasets": DATASETS,
        "kinds": KINDS,
    }
    lines = {
        table: {name: (entry.__doc__ or "").strip().splitlines()[0] for name, entry in entries.items()}
        for table, entries in tables.items()
    }
    return {**lines, "recipes": {name: _describe(recipe()) for name, recipe in RECIPES.items()}}


def _describe(run: Run) -> str:
    """Return what tells recipes of a dataset apart."""
    label = run.label or method_label(run.name)
    return f"{label}, {run.model.label}, {run.epochs} epochs, batch size {run.batch_size}"


if __name__ == "__main__":
    CATALOG.write_text(json.dumps(catalog(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

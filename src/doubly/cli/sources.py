"""Runs as the command line names them: a dataset, a recipe, a folder or a file, with changes of single fields."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from doubly.config import Data, Run
from doubly.config.serialize import KINDS, suggestion, with_change
from doubly.data import DATASETS, Arrays, ImageFolder
from doubly.errors import UsageError
from doubly.methods import Standard
from doubly.models import SmallCNN
from doubly.recipes import RECIPES, recipe
from doubly.text import parse_number
from doubly.threat import THREATS, LinfBall, Threat


def with_data_root(run: Run, root: str | None) -> Run:
    """Return the run with its dataset's files in a folder, as an absolute path; the same run if `root` is None."""
    return run if root is None else replace(run, data=replace(run.data, root=str(Path(root).resolve())))


def apply_changes(run: Run, changes: Sequence[str]) -> Run:
    """Apply what was given as --set.

    Args:
        run: The run to change.
        changes: PATH=JSON, or PATH=KIND for a part with its defaults.

    Raises:
        UsageError: If a change is not of this form, or does not fit the run.
    """
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set is written PATH=KIND or PATH=JSON, got '{change}'")
        try:
            value = text if text in KINDS else json.loads(text)
        except ValueError:
            raise UsageError(f"--set {path}: '{text}' is neither JSON nor a kind{suggestion(text, KINDS)}") from None
        run = with_change(run, path, value)
    return run


def run_for_source(name: str, root: str | None, changes: Sequence[str]) -> Run:
    """Return a run on the images of a name.

    Args:
        name: A recipe; or a dataset, a folder of class folders or a file of arrays, of which all images are used, with
            a network and a method that are only placeholders.
        root: Folder with the dataset's files, and in which folders and files are looked for.
        changes: PATH=JSON, relative to the dataset unless it begins with data.

    Raises:
        UsageError: If there is nothing of this name, or a change does not fit.
    """
    path = Path(root or ".") / name
    if name in RECIPES:
        run = recipe(name)
    elif name in DATASETS:
        run = _run_on(Data(DATASETS[name]()))
    elif path.is_dir():
        run = _run_on(Data(ImageFolder(name)))
    elif path.is_file():
        run = _run_on(Data(Arrays(name)))
    else:
        raise UsageError(
            f"there is no dataset, recipe, folder or file '{name}'{suggestion(name, [*DATASETS, *RECIPES])}"
        )
    changes = [change if change.startswith("data.") else f"data.source.{change}" for change in changes]
    return with_data_root(apply_changes(run, changes), root)


def _run_on(data: Data) -> Run:
    return Run(data, SmallCNN(), Standard())


def select_threat(name: str | None, epsilon: str | None, default: Threat | None) -> Threat | None:
    """Return the threat of --threat and --epsilon; the default if they name none, or only the kind of the default."""
    if name is not None and name not in THREATS:
        raise UsageError(f"there is no threat '{name}'{suggestion(name, THREATS)}")
    kind = THREATS[name] if name else LinfBall if default is None else type(default)
    if epsilon is not None:
        return kind(radius=parse_number(epsilon))  # type: ignore[call-arg]  # a field of every subclass
    return default if name is None or type(default) is kind else kind()


def source_folder_name(model: str, weights: str | None) -> str:
    """Return a name for the results; networks whose weights have the same file name get different ones."""
    path = Path(weights).resolve() if weights else ""
    digest = hashlib.sha256(f"{model} {path}".encode()).hexdigest()[:6]
    name = Path(weights).stem if weights else model.replace(":", "-")
    return f"{name}-{digest}"

"""Runs as the command line names them: a dataset, a recipe, a folder or a file, with changes of single fields."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from doubly.config import Data, Run
from doubly.config.hugging_face import HuggingFace, is_hugging_face
from doubly.config.serialize import KINDS, suggestion, trust_code, with_change
from doubly.config.user_code import UserModel
from doubly.data import DATASETS, Arrays, DataSource, ImageFolder, TarShards
from doubly.data.sources.tar_shards import is_shards
from doubly.errors import UsageError
from doubly.methods import Standard
from doubly.models import Model, SmallCNN
from doubly.reading import parse_json
from doubly.recipes import RECIPES, recipe
from doubly.recipes.own_data import look_at, own_data_run
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
            value = text if text in KINDS else parse_json(text)
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
    run = recipe(name) if name in RECIPES else _run_on(Data(source_of(name, root)))
    changes = [change if change.startswith("data.") else f"data.source.{change}" for change in changes]
    return with_data_root(apply_changes(run, changes), root)


def source_of(name: str, root: str | None) -> DataSource:
    """Return the dataset of a name, a folder of class folders, a file of arrays, or a Hugging Face folder.

    Raises:
        UsageError: If there is nothing of this name.
    """
    path = Path(root or ".") / name
    if name in DATASETS:
        source: DataSource = DATASETS[name]()
        return source
    if is_shards(path, name):
        return TarShards(name)
    if path.is_dir():
        return HuggingFace(name) if is_hugging_face(path) else ImageFolder(name)
    if path.is_file():
        return Arrays(name)
    raise UsageError(f"there is no dataset, recipe, folder or file '{name}'{suggestion(name, [*DATASETS, *RECIPES])}")


def named_run(recipe_name: str | None, data: str | None, method: str | None, root: str | None) -> tuple[Run, str]:
    """Return the run that a recipe, or data and a method, stand for.

    Args:
        recipe_name: A recipe, if one was named.
        data: What was given as --data.
        method: What was given as --method.
        root: What was given as --data-root.

    Returns:
        The run, and a note about what was found in the data.

    Raises:
        UsageError: If both or neither are given, or there is nothing of this name.
    """
    if recipe_name is not None and (data or method):
        raise UsageError(
            f"the recipe {recipe_name} has its data and method: leave it out, as in --data {data or 'my_images'} "
            f"--method {method or 'at'}"
        )
    if recipe_name is not None:
        return _recipe(recipe_name), ""
    if data is None or method is None:
        raise UsageError(
            "name a recipe (`doubly list recipes` shows them), or give --data and --method, as in --data my_images "
            "--method cfol"
        )
    if f"{data}.{method}" in RECIPES:
        return recipe(f"{data}.{method}"), ""
    folder = None if data in DATASETS and root is None else Path(root or ".").resolve()
    look = look_at(source_of(data, root), folder)
    name = re.sub(r"[^\w-]+", "_", Path(data).resolve().stem)
    return own_data_run(name, look, None if folder is None else str(folder), method), look.note


def _recipe(name: str) -> Run:
    if name not in RECIPES and (name in DATASETS or Path(name).exists()):
        raise UsageError(f"{name} is data, not a recipe: doubly train --data {name} --method at")
    return recipe(name)


def _run_on(data: Data) -> Run:
    return Run(data, SmallCNN(), Standard())


def select_architecture(
    model: str | None, run: Run, trust: bool, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Model | None:
    """Return what builds the network of a run directory, if not its own configuration.

    Args:
        model: package.module:function of --model.
        run: The configuration of the directory.
        trust: Whether --trust-code allows to import the function that the configuration names.
        mean: What was given as --mean; by default that of the configuration.
        std: What was given as --std.

    Raises:
        UsageError: If only one of mean and std is given, or they are given without a network.
    """
    if bool(mean) != bool(std):
        raise UsageError("--mean and --std go together: give the two, or neither")
    if model is not None:
        return UserModel(model, None, *((tuple(mean), tuple(std)) if mean else run.model.normalization or ()))
    if mean:
        raise UsageError("--mean and --std go with --model package.module:function; doubly's networks normalize inside")
    return trust_code(run).model if trust else None


def select_threat(name: str | None, epsilon: str | None, default: Threat | None) -> Threat | None:
    """Return the threat of --norm and --epsilon; the default if they name none, or only the kind of the default."""
    if name is not None and name not in THREATS:
        raise UsageError(f"there is no norm '{name}'{suggestion(name, THREATS)}")
    kind = THREATS[name] if name else LinfBall if default is None else type(default)
    if epsilon is not None and type(default) is kind:
        return replace(default, radius=parse_number(epsilon))  # type: ignore[type-var]  # also keeps the barrier
    if epsilon is not None:
        return kind(radius=parse_number(epsilon))  # a field of every subclass
    return default if name is None or type(default) is kind else kind()


def source_folder_name(model: str, weights: str | None, mean: Sequence[float] = (), std: Sequence[float] = ()) -> str:
    """Return a name for the results; networks whose weights have the same file name get different ones."""
    path = Path(weights).resolve() if weights else ""
    normalization = f" {tuple(mean)} {tuple(std)}" if mean or std else ""
    digest = hashlib.sha256(f"{model} {path}{normalization}".encode()).hexdigest()[:6]
    name = Path(weights).stem if weights else re.sub(r"[^\w-]*[^\w.-]+[^\w-]*", "-", model)
    return f"{name}-{digest}"

"""Checkpoint files: a directory of safetensors and JSON that is either complete or does not exist.

A checkpoint is written beside the old one, flushed to disk and renamed; the old one is removed only when the new one is
complete.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from doubly.errors import UsageError
from doubly.files import WriteError, explained_writes, flush, replacing, write_json, write_text
from doubly.reading import read_json
from doubly.rundir import sha256

SCHEMA = 3
UNSEALED_SCHEMA = 2  # of older checkpoints, whose state.json has no checksum
SEAL = "state.json.sha256"


class Checkpoint(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        tensors: Groups of tensors by name, one safetensors file each.
        info: Everything else, as state.json keeps it.
    """

    tensors: dict[str, dict[str, Tensor]]
    info: dict[str, Any]


def save_checkpoint(folder: Path, name: str, checkpoint: Checkpoint) -> None:
    """Write folder/name atomically, with checksums of the tensor files and of state.json, which lists them.

    The folder is created if needed, the one that it lies in is not: a run directory that was deleted stays deleted.

    Raises:
        WriteError: If it cannot be written; the checkpoint before it is as it was.
    """
    target, new, previous = folder / name, folder / f".{name}.new", folder / f".{name}.previous"
    try:
        with explained_writes(target):
            _write_new(new, checkpoint)
    except WriteError:
        shutil.rmtree(new, ignore_errors=True)  # room for others
        raise
    with explained_writes(target):
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)
            target.rename(previous)
        new.rename(target)
        flush(folder)
    shutil.rmtree(previous, ignore_errors=True)


def _write_new(new: Path, checkpoint: Checkpoint) -> None:
    shutil.rmtree(new, ignore_errors=True)
    new.parent.mkdir(exist_ok=True)
    new.mkdir()
    for group, values in checkpoint.tensors.items():
        file = new / f"{group}.safetensors"
        safetensors.torch.save_file({k: v.detach().cpu().contiguous().clone() for k, v in values.items()}, file)
        flush(file)
    checksums = {file.name: sha256(file) for file in sorted(new.iterdir())}
    write_json(new / "state.json", {"schema": SCHEMA, "checksums": checksums, **checkpoint.info})
    seal_checkpoint(new)
    flush(new)


def seal_checkpoint(path: Path) -> None:
    """Write the checksum of a checkpoint's state.json beside it."""
    write_text(path / SEAL, sha256(path / "state.json") + "\n")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically.

    Raises:
        WriteError: If it cannot be written.
    """
    with replacing(path) as unfinished:
        safetensors.torch.save_file(dict(tensors), unfinished, dict(metadata))


def find_checkpoint(folder: Path, name: str) -> Path | None:
    """Return the named checkpoint, or the one before it if the process died between two renames; None if neither."""
    return next((path for path in (folder / name, folder / f".{name}.previous") if path.is_dir()), None)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check it against its checksums.

    Raises:
        UsageError: If it is damaged, or of another version.
    """
    try:
        return _load(path)
    except OSError as error:  # also where another process has just replaced it
        raise UsageError(
            f"checkpoint {path} cannot be read ({error.strerror or error}): delete it to begin again"
        ) from None


def _load(path: Path) -> Checkpoint:
    if not (path / "state.json").is_file():
        raise UsageError(f"checkpoint {path} is damaged (state.json is missing): delete it to begin again")
    info = read_json(path / "state.json")
    if not isinstance(info, dict) or not isinstance(info.get("checksums"), dict):
        raise UsageError(
            f"{path} is no checkpoint of doubly: its state.json lacks the checksums; delete it to begin again"
        )
    if info.get("schema") not in (SCHEMA, UNSEALED_SCHEMA):
        raise UsageError(
            f"{path} has schema {info.get('schema')}, this version reads {SCHEMA}: use the doubly that wrote it"
        )
    _check_seal(path, required=info["schema"] == SCHEMA)
    tensors = {}
    for file, checksum in info["checksums"].items():
        part = path / Path(file).name
        if not part.exists() or sha256(part) != checksum:
            raise UsageError(f"checkpoint {path} is damaged ({file} is missing or changed): delete it to begin again")
        try:
            tensors[part.stem] = safetensors.torch.load_file(part)
        except (SafetensorError, RuntimeError) as error:  # RuntimeError: the file went away while it was opened
            reason = f"{error!s:.120}"
            raise UsageError(f"checkpoint {path} is damaged ({file}: {reason}): delete it to begin again") from None
    return Checkpoint(tensors, info)


def load_checkpoint_or_previous(folder: Path, name: str) -> tuple[Path, Checkpoint, str] | None:
    """Read the named checkpoint, or the one before it where that stands and the newer one is damaged.

    Args:
        folder: The folder of the checkpoints.
        name: Name of the checkpoint.

    Returns:
        Where it is, its contents, and a sentence about the damage, empty if there is none; None without a checkpoint.

    Raises:
        UsageError: If it is damaged, and there is none before it.
    """
    path, previous = find_checkpoint(folder, name), folder / f".{name}.previous"
    if path is None:
        return None
    try:
        return path, load_checkpoint(path), ""
    except UsageError as error:
        if path == previous or not previous.is_dir():
            raise
        return previous, load_checkpoint(previous), f"{error}; continuing from the checkpoint before it"


def _check_seal(path: Path, required: bool) -> None:
    """Compare state.json with its checksum, byte for byte."""
    seal = path / SEAL
    if not seal.exists() and not required:
        return
    if not seal.is_file() or seal.read_bytes() != f"{sha256(path / 'state.json')}\n".encode():
        raise UsageError(f"checkpoint {path} is damaged (state.json or {SEAL} was changed): delete it to begin again")

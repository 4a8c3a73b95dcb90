"""Checkpoint files: a directory of safetensors and JSON that is either complete or does not exist.

A checkpoint is written beside the old one, flushed to disk and renamed; the old one is removed only when the new one is
complete.
"""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from doubly.errors import UsageError
from doubly.rundir import read_json, sha256, write_json

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
    """Write folder/name atomically, with checksums of the tensor files and of state.json, which lists them."""
    target, new, previous = folder / name, folder / f".{name}.new", folder / f".{name}.previous"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for group, values in checkpoint.tensors.items():
        file = new / f"{group}.safetensors"
        safetensors.torch.save_file({k: v.detach().cpu().contiguous().clone() for k, v in values.items()}, file)
        _flush(file)
    checksums = {file.name: sha256(file) for file in sorted(new.iterdir())}
    write_json(new / "state.json", {"schema": SCHEMA, "checksums": checksums, **checkpoint.info})
    seal_checkpoint(new)
    _flush(new / SEAL)
    _flush(new)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    new.rename(target)
    _flush(folder)
    shutil.rmtree(previous, ignore_errors=True)


def seal_checkpoint(path: Path) -> None:
    """Write the checksum of a checkpoint's state.json beside it."""
    (path / SEAL).write_text(sha256(path / "state.json") + "\n", encoding="ascii")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_checkpoint(folder: Path, name: str) -> Path | None:
    """Return the named checkpoint, or the one before it if the process died between two renames; None if neither."""
    return next((path for path in (folder / name, folder / f".{name}.previous") if path.is_dir()), None)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check it against its checksums.

    Raises:
        UsageError: If it is damaged, or of another version.
    """
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
        except SafetensorError as error:
            raise UsageError(f"checkpoint {path} is damaged ({file}: {error}): delete it to begin again") from None
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

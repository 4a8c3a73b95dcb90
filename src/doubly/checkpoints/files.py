"""Checkpoints: a directory of safetensors and JSON, which either stands whole or does not exist.

It is written beside the old one, flushed to disk and renamed; the old one goes only when the new one stands.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from doubly.errors import UsageError
from doubly.rundir import read_json, sha256, write_json

SCHEMA = 1


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(folder: Path, name: str, tensors: dict[str, dict[str, Tensor]], info: dict[str, Any]) -> None:
    """Write folder/name: one safetensors file per group of tensors, and state.json with `info` and their checksums."""
    target, fresh, previous = folder / name, folder / f".{name}.fresh", folder / f".{name}.previous"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for group, values in tensors.items():
        file = fresh / f"{group}.safetensors"
        safetensors.torch.save_file({k: v.detach().cpu().contiguous().clone() for k, v in values.items()}, file)
        _flush(file)
    checksums = {file.name: sha256(file) for file in sorted(fresh.iterdir())}
    write_json(fresh / "state.json", {"schema": SCHEMA, "checksums": checksums, **info})
    _flush(fresh)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    fresh.rename(target)
    _flush(folder)
    shutil.rmtree(previous, ignore_errors=True)


def find(folder: Path, name: str) -> Path | None:
    """The checkpoint that stands: the named one, or the one before if the process died between two renames."""
    return next((p for p in (folder / name, folder / f".{name}.previous") if p.is_dir()), None)


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """(tensors by group, info), checked against their checksums."""
    if not (path / "state.json").is_file():
        raise UsageError(f"checkpoint {path} is damaged (state.json is missing): delete it to begin again")
    info = read_json(path / "state.json")
    if not isinstance(info, dict) or not isinstance(info.get("checksums"), dict):
        raise UsageError(f"{path} is no checkpoint of doubly: its state.json lacks the checksums")
    if info.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} has schema {info.get('schema')}, this version reads {SCHEMA}: use the doubly that wrote it"
        )
    tensors = {}
    for file, checksum in info["checksums"].items():
        part = path / Path(file).name
        if not part.exists() or sha256(part) != checksum:
            raise UsageError(f"checkpoint {path} is damaged ({file} is missing or changed): delete it to begin again")
        try:
            tensors[part.stem] = safetensors.torch.load_file(part)
        except SafetensorError as problem:
            raise UsageError(f"checkpoint {path} is damaged ({file}: {problem})") from None
    return tensors, info

"""A cache of decoded images on disk, as files of raw bytes (shards) that the operating system pages in when needed."""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from doubly.data.mapped_pixels import MappedPixels
from doubly.errors import UsageError

MAX_SHARD_BYTES = 2**28
MAX_UNUSED_DAYS = 30  # shards that were not opened for longer are removed when others are written


def open_shards(folder: Path, chunks: Iterable[NDArray[np.uint8]], count: int) -> MappedPixels:
    """Map the shards in a folder into memory, after writing them if the folder does not exist.

    Args:
        folder: Folder of this set of images; its name changes whenever the images do (`cache_key`).
        chunks: Pixels (n, C, H, W), used only if the shards have to be written.
        count: Number of images.

    Returns:
        The pixels on disk.

    Raises:
        UsageError: The shards are damaged, or the folder cannot be written.
    """
    if not folder.is_dir():
        _remove_unused(folder.parent)
        _write(folder, chunks)
    with suppress(OSError):  # a read-only cache cannot be marked as used
        folder.touch()
    try:
        shape = tuple(int(word) for word in (folder / "shape").read_text("ascii").split())
        # Copy-on-write: torch wants arrays that it may write to, and the file stays as it is.
        maps = [np.memmap(path, np.uint8, "c").reshape(-1, *shape) for path in sorted(folder.glob("*.bin"))]
        per_shard = max(1, MAX_SHARD_BYTES // int(np.prod(shape)))
    except (OSError, ValueError, ZeroDivisionError):
        maps, per_shard = [], 0
    if sum(map(len, maps)) != count or any(len(part) != per_shard for part in maps[:-1]):
        raise UsageError(f"{folder} is damaged: delete it, and it is built again")
    return MappedPixels.of([torch.from_numpy(part) for part in maps])


def cache_key(parts: Iterable[object]) -> str:
    """Return a folder name that changes with any of the parts."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:24]


def _remove_unused(cache: Path) -> None:
    """Remove shards that were not opened for a long time; they are written again when needed."""
    for shape in cache.glob("*/shape"):
        if time.time() - shape.parent.stat().st_mtime > MAX_UNUSED_DAYS * 86400:
            shutil.rmtree(shape.parent, ignore_errors=True)


def _write(folder: Path, chunks: Iterable[NDArray[np.uint8]]) -> None:
    """Write the shards under a temporary name, and rename them when they are complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as problem:
        raise UsageError(
            f"{folder.parent} cannot be written to ({problem.strerror}): name another folder in $DOUBLY_CACHE"
        ) from None
    try:
        _write_shards(unfinished, chunks)
        unfinished.rename(folder)
    except OSError as problem:
        if not folder.is_dir():  # else another process has built it meanwhile
            raise UsageError(
                f"{folder.parent} has no room for the decoded images, or cannot be written ({problem}): make room, or "
                "name another folder in $DOUBLY_CACHE"
            ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    # Left by a process that was killed; one that is still writing is no longer needed.
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _write_shards(folder: Path, chunks: Iterable[NDArray[np.uint8]]) -> None:
    pending: NDArray[np.uint8] | None = None
    number = 0
    for chunk in chunks:
        pending = chunk if pending is None else np.concatenate([pending, chunk])
        size = max(1, MAX_SHARD_BYTES // pending[0].size)
        while len(pending) >= size:
            pending[:size].tofile(folder / f"{number:05d}.bin")
            pending, number = pending[size:], number + 1
        (folder / "shape").write_text(" ".join(map(str, chunk.shape[1:])), "ascii")
    if pending is not None and len(pending):
        pending.tofile(folder / f"{number:05d}.bin")

"""Images that do not fit into memory: files of raw bytes that the operating system pages in as they are asked for."""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.errors import UsageError

SHARD = 2**28  # bytes
DAYS = 30  # without use, after which shards make room for others


@dataclass(frozen=True, eq=False)
class Mapped:
    """(N, C, H, W) bytes on disk that index like a tensor. Only what is asked for is read; a subset copies nothing."""

    shards: tuple[Tensor, ...]  # all but the last equally long
    rows: Tensor  # (N,) int64, positions over all shards
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where what is read goes

    @staticmethod
    def of(shards: Sequence[Tensor]) -> "Mapped":
        return Mapped(tuple(shards), torch.arange(sum(len(shard) for shard in shards)))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.shards[0].shape[1:]))

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        rows = self.rows[index.to(self.rows.device) if isinstance(index, Tensor) else index]
        found = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8)
        shard = rows // len(self.shards[0])
        for number in sorted(set(shard.tolist())):
            mine = shard == number
            found[mine] = self.shards[number][rows[mine] - number * len(self.shards[0])]
        if self.device.type == "cuda":  # from pinned memory, so that nobody waits for the copy
            return found.pin_memory().to(self.device, non_blocking=True)
        return found.to(self.device)

    def subset(self, index: Tensor) -> "Mapped":
        return replace(self, rows=self.rows[index.to(self.rows.device)])

    def to(self, device: torch.device | str) -> "Mapped":
        return replace(self, device=torch.device(device))


def mapped(folder: Path, chunks: Iterable[NDArray[np.uint8]], count: int) -> Mapped:
    """The shards in the folder, which are written from the chunks if the folder is not there yet."""
    if not folder.is_dir():
        _remove_unused(folder.parent)
        _write(folder, chunks)
    with suppress(OSError):  # a place that we may only read has somebody else to clear it
        folder.touch()
    try:
        shape = tuple(int(word) for word in (folder / "shape").read_text("ascii").split())
        # Copy-on-write: torch wants arrays that it may write to, and the file stays as it is.
        maps = [np.memmap(path, np.uint8, "c").reshape(-1, *shape) for path in sorted(folder.glob("*.bin"))]
        per_shard = max(1, SHARD // int(np.prod(shape)))
    except (OSError, ValueError, ZeroDivisionError):
        maps, per_shard = [], 0
    if sum(map(len, maps)) != count or any(len(part) != per_shard for part in maps[:-1]):
        raise UsageError(f"{folder} is damaged: delete it, and it is built again")
    return Mapped.of([torch.from_numpy(part) for part in maps])


def _remove_unused(place: Path) -> None:
    """Shards that nobody opened for a long time: whoever needs them builds them again."""
    for shape in place.glob("*/shape"):
        if time.time() - shape.parent.stat().st_mtime > DAYS * 86400:
            shutil.rmtree(shape.parent, ignore_errors=True)


def key(parts: Iterable[object]) -> str:
    """A name for a folder that changes with any of the parts."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:24]


def _write(folder: Path, chunks: Iterable[NDArray[np.uint8]]) -> None:
    """Under another name until all is there: what is cut short never looks whole."""
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
                f"{folder.parent} has no room for the images as bytes, or cannot be written ({problem}): make room, or "
                "name another folder in $DOUBLY_CACHE"
            ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for left in folder.parent.glob(f".{folder.name}.*"):  # by one that was killed; one that still works is not needed
        shutil.rmtree(left, ignore_errors=True)


def _write_shards(folder: Path, chunks: Iterable[NDArray[np.uint8]]) -> None:
    rest: NDArray[np.uint8] | None = None
    number = 0
    for chunk in chunks:
        rest = chunk if rest is None else np.concatenate([rest, chunk])
        size = max(1, SHARD // rest[0].size)
        while len(rest) >= size:
            rest[:size].tofile(folder / f"{number:05d}.bin")
            rest, number = rest[size:], number + 1
        (folder / "shape").write_text(" ".join(map(str, chunk.shape[1:])), "ascii")
    if rest is not None and len(rest):
        rest.tofile(folder / f"{number:05d}.bin")

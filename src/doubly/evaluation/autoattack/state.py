"""What AutoAttack has found so far, on disk: a folder with the key of the evaluation and one file for each chunk.

A chunk is a fixed range of images. Its file is replaced as a whole after each attack, so a killed evaluation goes on
after the last attack that ended; processes that share a folder work on different chunks and never on one file.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from doubly.errors import UsageError
from doubly.rundir import read_json, write_json

SCHEMA = 1


@dataclass(frozen=True)
class Chunks:
    """`key`: everything that the outcome depends on. Without a folder nothing is kept."""

    folder: Path | None
    key: Mapping[str, Any]

    def open(self) -> None:
        """Make the folder, or make sure that it belongs to this evaluation."""
        if self.folder is None:
            return
        file = self.folder / "key.json"
        if file.is_file():
            self._check(read_json(file), file)
        else:
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(file, dict(self.key))

    def _check(self, found: Any, file: Path) -> None:
        found = found if isinstance(found, dict) else {}
        differing = [name for name in {**self.key, **found} if self.key.get(name) != found.get(name)]
        if differing:
            name = differing[0]
            raise UsageError(
                f"{file} belongs to another evaluation: its {name} is {found.get(name)!s:.60}, here it is "
                f"{self.key.get(name)!s:.60}; choose another folder, or delete that one to begin anew"
            )

    def read(self, index: int) -> dict[str, Any] | None:
        """What is known of a chunk; None if nothing."""
        file = self.file(index)
        if file is None or not file.is_file():
            return None
        found = read_json(file)
        if not _is_state(found) or found.get("schema") != SCHEMA or found.get("chunk") != index:
            raise UsageError(f"{file} does not hold the state of chunk {index}: delete it, and it is done again")
        if found.get("key") != self.digest:
            raise UsageError(f"{file} belongs to another evaluation: delete it, and it is done again")
        state: dict[str, Any] = found
        return state

    def write(self, index: int, found: Mapping[str, Any]) -> None:
        file = self.file(index)
        if file is not None:
            with self._writing():
                write_json(file, {**found, "schema": SCHEMA, "chunk": index, "key": self.digest})

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.key), sort_keys=True).encode()).hexdigest()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise UsageError(
                f"{self.folder} cannot hold the state of an evaluation ({problem.strerror}): make room or choose "
                "another folder; what is in it stays"
            ) from None

    def finished(self, count: int, parts: Sequence[str]) -> bool:
        """Whether every one of `count` chunks has been through all attacks."""
        known = [self.read(index) for index in range(count)]
        return all(each is not None and [a["name"] for a in each["attacks"]] == list(parts) for each in known)

    def write_images(self, index: int, part: str, images: Mapping[int, NDArray[Any]]) -> None:
        """The images that an attack turned, by their row in the chunk."""
        if self.folder is not None and images:
            temporary = self.folder / f".images-{index:05d}-{part}-{os.getpid()}.npz"
            with self._writing():
                np.savez(temporary, rows=np.array(list(images), dtype=np.int64), images=np.stack(list(images.values())))
                temporary.replace(self._images(index, part))

    def read_images(self, index: int, part: str) -> dict[int, NDArray[Any]]:
        if self.folder is None or not self._images(index, part).is_file():
            return {}
        try:
            with self._images(index, part).open("rb") as raw, np.load(raw, allow_pickle=False) as kept:
                return dict(zip(kept["rows"].tolist(), kept["images"], strict=True))
        except (OSError, ValueError, EOFError, KeyError, BadZipFile):
            raise UsageError(
                f"{self._images(index, part)} cannot be read: delete the folder to have the images made again"
            ) from None

    def _images(self, index: int, part: str) -> Path:
        return (self.folder or Path()) / f"images-{index:05d}-{part}.npz"

    def file(self, index: int) -> Path | None:
        return None if self.folder is None else self.folder / f"chunk-{index:05d}.json"


def _is_state(found: Any) -> bool:
    """Whether a file holds what `write` was given by the driver."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name), list) for name in ("clean", "attacks")):
        return False
    needed, n = {"name", "broken", "answers", "warnings", "seconds", "largest", "made", "outside"}, len(found["clean"])
    return all(
        isinstance(each, dict)
        and needed <= set(each)
        and len(each["broken"]) == len(each["answers"])
        and all(isinstance(row, int) and 0 <= row < n for row in each["broken"])
        for each in found["attacks"]
    )

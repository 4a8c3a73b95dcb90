"""The state of AutoAttack on disk: a folder with the key of the evaluation and one file for each chunk.

A chunk is a fixed range of images. Its file is replaced atomically after each attack, so a killed evaluation resumes
after the last attack that ended. Processes that share a folder work on different chunks, so never on the same file.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubly.errors import UsageError
from doubly.files import make_folder, remove_leftovers, write_arrays, write_json
from doubly.reading import load_npz, read_json

SCHEMA = 1
ChunkState = dict[str, Any]  # "clean": predictions; "attacks": what each attack found, as the file keeps it
_ATTACK_FIELDS = {"name", "broken", "answers", "warnings", "seconds", "largest", "made", "outside"}


def is_finished(state: ChunkState | None, parts: Sequence[str]) -> bool:
    """Return whether all attacks have run on a chunk."""
    return state is not None and [attack["name"] for attack in state["attacks"]] == list(parts)


@dataclass(frozen=True)
class ChunkFiles:
    """The state of an evaluation's chunks.

    Attributes:
        folder: Where it is kept; None keeps nothing.
        key: Everything that the outcome depends on.
    """

    folder: Path | None
    key: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Checksum of the key."""
        return hashlib.sha256(json.dumps(dict(self.key), sort_keys=True).encode()).hexdigest()

    def open(self) -> None:
        """Create the folder, or check that it belongs to this evaluation.

        Raises:
            UsageError: If it belongs to another evaluation, or cannot be written.
        """
        if self.folder is None:
            return
        file = self.folder / "key.json"
        if file.is_file():
            self._check_key(read_json(file), file)
        else:
            make_folder(self.folder)
            write_json(file, dict(self.key))
        remove_leftovers(self.folder)

    def _check_key(self, saved: Any, file: Path) -> None:
        saved = saved if isinstance(saved, dict) else {}
        for name in {**self.key, **saved}:
            if self.key.get(name) != saved.get(name):
                raise UsageError(
                    f"{file} belongs to another evaluation: its {name} is {saved.get(name)!s:.60}, here it is "
                    f"{self.key.get(name)!s:.60}; choose another folder, or delete that one to start again"
                )

    def path(self, index: int) -> Path | None:
        """Return the file of a chunk."""
        return None if self.folder is None else self.folder / f"chunk-{index:05d}.json"

    def read(self, index: int) -> ChunkState | None:
        """Return the state of a chunk; None if it has not been started.

        Raises:
            UsageError: If its file is damaged or belongs to another evaluation.
        """
        file = self.path(index)
        if file is None or not file.is_file():
            return None
        state: Any = read_json(file)
        if not _is_state(state) or state.get("schema") != SCHEMA or state.get("chunk") != index:
            raise UsageError(f"{file} does not hold the state of chunk {index}: delete it, and it is computed again")
        if "sha256" in state and state["sha256"] != _checksum(state):  # older files have none
            raise UsageError(f"{file} was changed: delete it, and it is computed again")
        if state.get("key") != self.digest:
            raise UsageError(f"{file} belongs to another evaluation: delete it, and it is computed again")
        chunk: ChunkState = state
        return chunk

    def write(self, index: int, state: ChunkState) -> None:
        """Replace the file of a chunk.

        Raises:
            UsageError: If it cannot be written.
        """
        file = self.path(index)
        if file is not None:
            state = {**state, "schema": SCHEMA, "chunk": index, "key": self.digest}
            write_json(file, {**state, "sha256": _checksum(state)})

    def all_finished(self, count: int, parts: Sequence[str]) -> bool:
        """Return whether all attacks have run on each of `count` chunks."""
        return all(is_finished(self.read(index), parts) for index in range(count))

    def write_images(self, index: int, part: str, images: Mapping[int, NDArray[Any]]) -> None:
        """Write the images that an attack broke, by their row in the chunk.

        Raises:
            UsageError: If they cannot be written.
        """
        if self.folder is not None and images:
            arrays = {"rows": np.array(list(images), dtype=np.int64), "images": np.stack(list(images.values()))}
            write_arrays(self.folder / _images_name(index, part), arrays)

    def read_images(self, index: int, part: str) -> dict[int, NDArray[Any]]:
        """Return the images that an attack broke, by their row in the chunk; none if they were not kept.

        Raises:
            UsageError: If the file is damaged.
        """
        if self.folder is None or not (file := self.folder / _images_name(index, part)).is_file():
            return {}
        try:
            arrays = load_npz(file)
            return dict(zip(arrays["rows"].tolist(), arrays["images"], strict=True))
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{file} cannot be read: delete the folder, and the images are made again") from None


def _images_name(index: int, part: str) -> str:
    return f"images-{index:05d}-{part}.npz"


def _is_state(value: Any) -> bool:
    """Return whether a file holds what the driver writes."""
    if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in ("clean", "attacks")):
        return False
    count, clean = len(value["clean"]), value["clean"]
    return all(map(_is_count, clean)) and all(_is_record(attack, count) for attack in value["attacks"])


def _is_record(attack: Any, count: int) -> bool:
    """Return whether a value is what an attack found in a chunk of so many images."""
    if not isinstance(attack, dict) or not set(attack) >= _ATTACK_FIELDS:
        return False
    broken, answers, warnings = (attack[name] for name in ("broken", "answers", "warnings"))
    return (
        all(isinstance(values, list) for values in (broken, answers, warnings))
        and len(broken) == len(answers)
        and all(_is_count(row) and row < count for row in broken)
        and all(map(_is_count, [*answers, attack["made"], attack["outside"]]))
        and all(type(attack[name]) in (int, float) for name in ("seconds", "largest"))
        and all(isinstance(text, str) for text in [attack["name"], *warnings])
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _checksum(state: Mapping[str, Any]) -> str:
    """Return the checksum of a chunk's state, which it holds itself."""
    kept = {name: value for name, value in state.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

"""A dataset's files on disk: where they are looked for, and whether they are the published ones."""

import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from doubly.data.images import Images, Splits
from doubly.data.published import PUBLISHED
from doubly.errors import UsageError


def data_folder(root: Path | None = None) -> Path:
    """The root that was given; else $DOUBLY_CACHE, else a folder in the user's cache."""
    if root is not None:
        return root
    if given := os.environ.get("DOUBLY_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "doubly"


class Files:
    """Looks a dataset's files up in a root, and remembers which were read."""

    def __init__(self, dataset: str, root: Path | None, *places: str) -> None:
        self.dataset, self.root, self.places = dataset, data_folder(root), places
        self.read: list[Path] = []

    def has(self, *names: str, kind: Callable[[Path], bool] = Path.is_file) -> Path | None:
        """The first file of these names, in the first place that has one."""
        places = self.places if self.read else (*self.places, ".")
        candidates = (self.root / place / name for place in places for name in names)
        return next((path for path in candidates if kind(path)), None)

    def file(self, *names: str, remedy: str = "put it there", kind: Callable[[Path], bool] = Path.is_file) -> Path:
        path = self.has(*names, kind=kind)
        if path is not None and not self.read:  # the rest of the set is where its first file is
            self.places = tuple(place for place in (*self.places, ".") if self.root / place in path.parents)[:1]
        if path is None:
            raise UsageError(
                f"{self.dataset} needs {names[0]} in {self.root / self.places[0]}, and it is missing: fetch it with "
                f"`doubly data fetch {self.dataset} --data-root {self.root}`, or {remedy}"
            )
        self.read.append(path)
        return path

    def folder(self, *names: str) -> Path:
        return self.file(*names, kind=Path.is_dir)

    def splits(self, train: Images, test: Images) -> Splits:
        """With a line on what makes these files other than the published ones, if anything does."""
        published = PUBLISHED[self.dataset]
        digests = {path: md5(path) for path in self.read if path.name in published.md5}
        owners = {digest: (other.name, name) for other in PUBLISHED.values() for name, digest in other.md5.items()}
        for path, digest in digests.items():
            owner, name = owners.get(digest, (self.dataset, path.name))
            if (owner, name) != (self.dataset, path.name):
                raise UsageError(
                    f"{path} holds {owner}'s published {name}: give each file its place and its own name again"
                )
        if train.x.shape == test.x.shape and torch.equal(train.x[:], test.x[:]):
            raise UsageError(f"{self.dataset}: train and test hold the same images: put the two files in again")
        said = [
            f"{len(part):,} of the {whole:,} published {name} images"
            for name, part, whole in (("training", train, published.train), ("test", test, published.test))
            if len(part) != whole
        ]
        changed = [path.name for path, digest in digests.items() if digest != published.md5[path.name]]
        if changed:
            said.append(f"{', '.join(changed)} differ from the published files")
        return Splits(train, test, f"{self.dataset} here is not the published set: {'; '.join(said)}" if said else "")


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def content(path: Path, read: Callable[[Path], Any], what: str) -> Any:
    """What `read` finds in the file; whatever a broken one makes it raise becomes a sentence."""
    try:
        return read(path)
    except UsageError:
        raise
    except OSError as problem:
        if disk_full(problem) or problem.errno == errno.EACCES:
            raise
        raise _unreadable(path, what, problem) from None
    except Exception as problem:
        raise _unreadable(path, what, problem) from None


def _unreadable(path: Path, what: str, problem: BaseException) -> UsageError:
    reason = (str(problem).splitlines() or [type(problem).__name__])[0]
    return UsageError(
        f"{path} cannot be read as {what} ({reason:.120}): it is cut short or another file; put it in again"
    )


def disk_full(problem: OSError) -> bool:
    return problem.errno in (errno.ENOSPC, errno.EDQUOT)


def labeled(path: Path, x: Any, y: Any, classes: Sequence[str]) -> Images:
    """Images whose complaints name the file."""
    try:
        return Images.of(x, y, classes)
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}") from None


def words(path: Path) -> list[str]:
    return path.read_text("utf-8").split()


def bytes_of(path: Path) -> NDArray[np.uint8]:
    return np.fromfile(path, dtype=np.uint8)

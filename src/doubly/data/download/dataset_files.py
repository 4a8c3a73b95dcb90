"""The files of a dataset on disk: where to look for them, how to read them, and whether they are the published ones."""

import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from doubly.data.download.published import PUBLISHED
from doubly.data.images import Images, Splits
from doubly.errors import UsageError


def data_folder(root: Path | None = None) -> Path:
    """Return `root`; if it is None, $DOUBLY_CACHE, or else the folder `doubly` in the user's cache."""
    if root is not None:
        return root
    if cache := os.environ.get("DOUBLY_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "doubly"


class DatasetFiles:
    """The files of one dataset, which are looked up in a root folder. It records which were used."""

    def __init__(self, dataset: str, root: Path | None, *folders: str) -> None:
        """Look for files of a dataset.

        Args:
            dataset: Name of the dataset, a key of `PUBLISHED`.
            root: Folder with datasets; None for the default of `data_folder`.
            folders: Folders inside the root where the files may be. The root itself is tried last.
        """
        self.dataset, self.root, self.folders = dataset, data_folder(root), folders
        self.used: list[Path] = []

    def find(self, *names: str, kind: Callable[[Path], bool] = Path.is_file) -> Path | None:
        """Return the first file with one of these names, in the first folder that has one, or None."""
        folders = self.folders if self.used else (*self.folders, ".")
        candidates = (self.root / folder / name for folder in folders for name in names)
        return next((path for path in candidates if kind(path)), None)

    def file(self, *names: str, remedy: str = "put it there", kind: Callable[[Path], bool] = Path.is_file) -> Path:
        """Return the path of a file that the dataset needs.

        Args:
            names: Names that the file may have.
            remedy: What else the user can do if it is missing, for the error message.
            kind: Test that the path must pass.

        Raises:
            UsageError: There is no such file.
        """
        path = self.find(*names, kind=kind)
        if path is not None and not self.used:  # all files of a dataset are read from one folder
            self.folders = tuple(folder for folder in (*self.folders, ".") if self.root / folder in path.parents)[:1]
        if path is None:
            raise UsageError(
                f"{self.dataset} needs {names[0]} in {self.root / self.folders[0]}, and it is missing: fetch it with "
                f"`doubly data fetch {self.dataset} --data-root {self.root}`, or {remedy}"
            )
        self.used.append(path)
        return path

    def folder(self, *names: str) -> Path:
        """Return the path of a folder that the dataset needs."""
        return self.file(*names, kind=Path.is_dir)

    def splits(self, train: Images, test: Images) -> Splits:
        """Return both sets with a note on how the files differ from the published ones.

        Raises:
            UsageError: A file is a published one of another name, or both sets have the same images.
        """
        published = PUBLISHED[self.dataset]
        digests = {path: md5(path) for path in self.used if path.name in published.md5}
        owners = {digest: (other.name, name) for other in PUBLISHED.values() for name, digest in other.md5.items()}
        for path, digest in digests.items():
            owner, name = owners.get(digest, (self.dataset, path.name))
            if (owner, name) != (self.dataset, path.name):
                raise UsageError(
                    f"{path} is the published file {name} of {owner}: move each file back to its folder and its name"
                )
        if train.x.shape == test.x.shape and torch.equal(train.x[:], test.x[:]):
            raise UsageError(f"{self.dataset}: train and test have the same images: replace both with the originals")
        differences = [
            f"{len(images):,} of the {count:,} published {part} images"
            for part, images, count in (("training", train, published.train), ("test", test, published.test))
            if len(images) != count
        ]
        changed = [path.name for path, digest in digests.items() if digest != published.md5[path.name]]
        if changed:
            differences.append(f"{', '.join(changed)} differ from the published files")
        note = f"{self.dataset} here is not the published set: {'; '.join(differences)}" if differences else ""
        return Splits(train, test, note)


def md5(path: Path) -> str:
    """Return the MD5 checksum of a file, as published with the datasets."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def read_file(path: Path, read: Callable[[Path], Any], content: str) -> Any:
    """Return `read(path)`, and turn whatever a broken file makes it raise into one sentence.

    Args:
        path: The file.
        read: Reads it.
        content: What the file should hold, for the error message.

    Raises:
        UsageError: The file cannot be read.
        OSError: The disk is full, or the file may not be read.
    """
    try:
        return read(path)
    except UsageError:
        raise
    except OSError as problem:
        if is_disk_full(problem) or problem.errno == errno.EACCES:
            raise
        raise _unreadable(path, content, problem) from None
    except Exception as problem:
        raise _unreadable(path, content, problem) from None


def _unreadable(path: Path, content: str, problem: BaseException) -> UsageError:
    reason = (str(problem).splitlines() or [type(problem).__name__])[0]
    return UsageError(
        f"{path} cannot be read as {content} ({reason:.120}): it is truncated or another file; replace it with the "
        "original"
    )


def is_disk_full(problem: OSError) -> bool:
    """Return whether an error means that the disk or the user's quota is full."""
    return problem.errno in (errno.ENOSPC, errno.EDQUOT)


def labeled_images(path: Path, x: Any, y: Any, classes: Sequence[str]) -> Images:
    """Return `Images.of(x, y, classes)`, with the name of the file in its error messages."""
    try:
        return Images.of(x, y, classes)
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}") from None


def read_words(path: Path) -> list[str]:
    """Return the words of a text file."""
    return path.read_text("utf-8").split()


def read_bytes(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a file."""
    return np.fromfile(path, dtype=np.uint8)

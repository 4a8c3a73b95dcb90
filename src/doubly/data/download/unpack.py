"""Unpacking of archives that are not trusted: no member leaves its folder, and no partial result is left behind."""

import gzip
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from doubly.data.download.dataset_files import read_file
from doubly.errors import UsageError

BLOCK = 2**18  # bytes


def unpack(archive: Path, folder: Path, goal: Path) -> None:
    """Unpack a part of an archive.

    It is unpacked into a temporary folder and then moved in one step. If `goal` is a folder that exists already, only
    what it lacks is added.

    Args:
        archive: A .zip, .tar or .tar.gz file.
        folder: Folder to which the paths inside the archive are relative.
        goal: File or folder that is wanted, inside `folder`.

    Raises:
        UsageError: The archive is damaged, lacks the goal, or would write outside the folder.
    """
    staging = folder / f".{archive.name}.unpacking"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        _check_members(archive)
        read_file(archive, lambda path: _extract(path, staging), "an archive")
        unpacked = staging / goal.relative_to(folder)
        if not unpacked.exists():
            raise UsageError(
                f"{archive} does not contain {goal.relative_to(folder)}: it is another archive; fetch it again"
            )
        if goal.is_dir():
            for part in unpacked.iterdir():
                if not (goal / part.name).exists():
                    part.replace(goal / part.name)
        else:
            goal.parent.mkdir(parents=True, exist_ok=True)
            unpacked.replace(goal)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_members(archive: Path) -> None:
    for name, is_plain in read_file(archive, _list_members, "an archive"):
        path = PurePosixPath(name.replace("\\", "/"))
        if not is_plain or path.is_absolute() or ".." in path.parts or ":" in "".join(path.parts[:1]):
            raise UsageError(
                f"{archive} has the member '{name}', which would be written outside its folder or is no plain "
                "file: nothing was unpacked; do not trust this archive"
            )


def _list_members(archive: Path) -> list[tuple[str, bool]]:
    """Return the name of each member, and whether it is a plain file or folder."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            return [(info.filename, not stat.S_ISLNK(info.external_attr >> 16)) for info in file.infolist()]
    with gzip.open(archive) if archive.suffix == ".gz" else archive.open("rb") as raw, tarfile.open(fileobj=raw) as tar:
        members = [(member.name, member.isfile() or member.isdir()) for member in tar]
        while raw.read(BLOCK):  # to the end, where gzip has its checksum
            pass
        return members


def _extract(archive: Path, staging: Path) -> None:
    for name, source in _open_members(archive):
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file, BLOCK)


def _open_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the content of each file."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                if not info.is_dir():
                    yield info.filename, file.open(info)
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content

"""Archives unpacked without trusting them: no member leaves its folder, and what is cut short never looks whole."""

import gzip
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from doubly.data.files import content
from doubly.errors import UsageError

BLOCK = 2**18  # bytes


def unpack(archive: Path, into: Path, goal: Path) -> None:
    """Beside its place first, and then moved in one step; of a folder that is there already, only what it lacks."""
    staging = into / f".{archive.name}.unpacking"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        members = content(archive, _names, "an archive")
        for name, plain in members:
            path = PurePosixPath(name.replace("\\", "/"))
            if not plain or path.is_absolute() or ".." in path.parts or ":" in "".join(path.parts[:1]):
                raise UsageError(
                    f"{archive} has the member '{name}', which would be written outside its folder or is no plain "
                    "file: nothing was unpacked; do not trust this archive"
                )
        content(archive, lambda path: _extract(path, staging), "an archive")
        found = staging / goal.relative_to(into)
        if not found.exists():
            raise UsageError(f"{archive} does not hold {goal.relative_to(into)}: it is another archive; fetch it again")
        if goal.is_dir():
            for part in found.iterdir():
                if not (goal / part.name).exists():
                    part.replace(goal / part.name)
        else:
            goal.parent.mkdir(parents=True, exist_ok=True)
            found.replace(goal)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _names(archive: Path) -> list[tuple[str, bool]]:
    """(name, whether it is a plain file or folder) of each member."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            return [(info.filename, not stat.S_ISLNK(info.external_attr >> 16)) for info in file.infolist()]
    with gzip.open(archive) if archive.suffix == ".gz" else archive.open("rb") as raw, tarfile.open(fileobj=raw) as tar:
        found = [(member.name, member.isfile() or member.isdir()) for member in tar]
        while raw.read(BLOCK):  # to the end, where gzip keeps its own checksum
            pass
        return found


def _extract(archive: Path, staging: Path) -> None:
    for name, source in _members(archive):
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file, BLOCK)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, content) of each file."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                if not info.is_dir():
                    yield info.filename, file.open(info)
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                opened = tar.extractfile(member) if member.isfile() else None
                if opened is not None:
                    yield member.name, opened

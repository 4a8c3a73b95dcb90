"""Unpacking of archives that are not trusted: no member leaves its folder, and no partial result is left behind."""

import gzip
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from doubly.data.download.dataset_files import read_file
from doubly.errors import UsageError
from doubly.reading import check_unpacked_size

BLOCK, MAX_READ = 2**18, 2**22  # bytes that are read at a time, and at most


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
            check_unpacked_size(archive, sum(info.file_size for info in file.infolist()))
            return [(info.filename, not stat.S_ISLNK(info.external_attr >> 16)) for info in file.infolist()]
    with _open_tar(archive) as tar:
        members, declared = [], 0
        for member in tar:
            declared += member.size
            check_unpacked_size(archive, declared)  # before the next member is looked for behind this one
            members.append((member.name, member.isfile() or member.isdir()))
        while tar.fileobj is not None and tar.fileobj.read(BLOCK):  # to the end, where gzip has its checksum
            pass
        return members


@contextmanager
def _open_tar(archive: Path) -> Iterator[tarfile.TarFile]:
    with (
        gzip.open(archive) if archive.suffix == ".gz" else archive.open("rb") as raw,
        tarfile.open(fileobj=_Bounded(archive, raw), mode="r:") as tar,  # type: ignore[call-overload]
    ):
        yield tar


class _Bounded:
    """The bytes of an archive as far as it may be unpacked: headers of members, too, can be gigabytes of zeros."""

    def __init__(self, archive: Path, raw: Any) -> None:
        self.archive, self.raw = archive, raw

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_READ:
            raise ValueError("a header in it declares more than a header can hold")
        check_unpacked_size(self.archive, self.raw.tell() + size)
        content: bytes = self.raw.read(size)
        return content

    def seek(self, position: int, whence: int = 0) -> int:
        if whence == 0:
            check_unpacked_size(self.archive, position)
        reached: int = self.raw.seek(position, whence)
        return reached

    def tell(self) -> int:
        position: int = self.raw.tell()
        return position


def _extract(archive: Path, staging: Path) -> None:
    for name, source in open_members(archive):
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file, BLOCK)


def open_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the content of each file."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                if not info.is_dir():
                    yield info.filename, file.open(info)
    else:
        with _open_tar(archive) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content

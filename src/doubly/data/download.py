"""Published files fetched over the network: a cut download is resumed, a wrong one is refused, and an archive is
unpacked beside its place and moved there whole.
"""

import errno
import gzip
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from doubly.data.files import content, disk_full, md5
from doubly.data.published import Download, Published
from doubly.errors import UsageError

if TYPE_CHECKING:
    import requests

ATTEMPTS = 5
BLOCK = 2**18  # bytes


class Watch(NamedTuple):
    say: Callable[[str], None] = lambda line: None
    progress: Callable[[str, int, int | None], None] = lambda name, done, whole: None  # bytes


def fetch(
    published: Published, root: Path, *, offline: bool = False, mirror: str | None = None, watch: Watch | None = None
) -> None:
    """Everything that the dataset needs, in the places where its reader looks. What is there already stays."""
    watch = watch or Watch()
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise UsageError(f"a mirror's address begins with http:// or https://, got {mirror}")
    missing = [item for item in published.downloads if not _goal(item, root).exists()]
    for item in published.downloads:
        goal = _goal(item, root)
        if item not in missing:
            differs = item.unpacked is None and md5(goal) != item.md5
            ending = ", and differs from the published file: delete it to fetch that" if differs else ""
            watch.say(f"{goal} is there already{ending}")
    absent = [item for item in missing if not _archive(item, root).exists()]
    if offline and absent:
        wanted = "; ".join(f"{item.url} into {root / item.into}" for item in absent)
        raise UsageError(f"{published.name} is not here, and --offline forbids fetching it: put {wanted}")
    for item in missing:
        archive, by_hand = _archive(item, root), item not in absent
        if by_hand and md5(archive) != item.md5:
            watch.say(f"{archive} differs from the published file")
        with _room_for(item, root / item.into):
            if not by_hand:
                _download(item, archive, mirror, watch)
            if item.unpacked is not None:
                watch.say(f"unpacking {archive.name}")
                _unpack(archive, root / item.into, _goal(item, root))
                if not by_hand:
                    archive.unlink()
        watch.say(f"{_goal(item, root)} is there now")


def _goal(item: Download, root: Path) -> Path:
    return root / item.unpacked if item.unpacked is not None else _archive(item, root)


def _archive(item: Download, root: Path) -> Path:
    return root / item.into / item.name


def _download(item: Download, target: Path, mirror: str | None, watch: Watch) -> None:
    import pooch
    import requests

    url = item.url if mirror is None else f"{mirror.rstrip('/')}/{item.name}"
    by_hand = f"get {item.name} elsewhere, put it into {target.parent}, and run this again"
    target.parent.mkdir(parents=True, exist_ok=True)
    receive = _Resuming(_part(target), watch)
    pooch.get_logger().setLevel("WARNING")
    try:
        pooch.retrieve(url, f"md5:{item.md5}", target.name, target.parent, downloader=receive)
    except requests.HTTPError as problem:
        raise UsageError(f"{urlsplit(url).netloc} does not give {url} ({problem}): {by_hand}") from None
    except requests.RequestException as problem:
        have = receive.part.stat().st_size if receive.part.exists() else 0
        kept = f"; {have:,} bytes are kept, and the same command goes on from there" if have else ""
        reason = type(problem).__name__
        raise UsageError(
            f"cannot fetch {url}, the network is closed or was cut ({reason}){kept}: or {by_hand}"
        ) from None
    except ValueError:  # pooch's word for another checksum; it has deleted the file
        raise UsageError(
            f"{url} has not the published checksum {item.md5}, and was deleted: the file there is another or was "
            f"damaged on its way; try once more, or {by_hand}"
        ) from None


@contextmanager
def _room_for(item: Download, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if not disk_full(problem):
            raise
        _part(folder / item.name).unlink(missing_ok=True)
        raise UsageError(
            f"the disk is full: {folder} has no room for {item.name}, and nothing half-written was left there; make "
            "room, or name another folder with --data-root"
        ) from None


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


class _Resuming:
    """A downloader for pooch that keeps what it has in a .part file and asks for the rest."""

    def __init__(self, part: Path, watch: Watch) -> None:
        self.part, self.watch = part, watch

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:
        import requests

        for attempt in range(ATTEMPTS):
            before = self._size()
            try:
                self._receive(url)
                break
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
                if attempt == ATTEMPTS - 1 or self._size() == before:  # nothing came: the network is closed
                    raise
        self.part.replace(output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _receive(self, url: str) -> None:
        import requests

        have = self._size()
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
            if have and answer.status_code == requests.codes.requested_range_not_satisfiable:
                # All of it is here, or the file there has become shorter: the checksum tells.
                return
            answer.raise_for_status()
            resumed = answer.status_code == requests.codes.partial_content
            have = have if resumed else 0
            length = answer.headers.get("Content-Length")
            whole = have + int(length) if length else None
            if length and int(length) > shutil.disk_usage(self.part.parent).free:
                raise OSError(errno.ENOSPC, "no room")
            with self.part.open("ab" if resumed else "wb") as file:
                for block in _as_sent(answer):
                    file.write(block)
                    have += len(block)
                    self.watch.progress(self.part.name[1:].removesuffix(".part"), have, whole)
            if whole is not None and have < whole:  # which urllib3 1 does not notice
                raise requests.ConnectionError("the answer is shorter than promised")


def _as_sent(answer: "requests.Response") -> Iterator[bytes]:
    """The bytes of the file: a server may call gzip an encoding, and requests would undo it."""
    import requests
    import urllib3

    try:
        yield from answer.raw.stream(BLOCK, decode_content=False)
    except urllib3.exceptions.HTTPError as problem:
        raise requests.ConnectionError(str(problem)) from None


def _unpack(archive: Path, into: Path, goal: Path) -> None:
    """Beside its place first, and then moved: a goal that is there is whole."""
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

"""Published files fetched over the network: a cut download is resumed, a wrong one is refused, and an archive is
unpacked beside its place and moved there whole.
"""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from doubly.data.files import disk_full, md5
from doubly.data.published import Download, Published
from doubly.data.unpacking import unpack
from doubly.errors import UsageError

if TYPE_CHECKING:
    import requests

ATTEMPTS = 5
BLOCK = 2**18  # bytes


class Listener(NamedTuple):
    say: Callable[[str], None] = lambda line: None
    progress: Callable[[str, int, int | None], None] = lambda name, done, whole: None  # bytes


def fetch(
    published: Published,
    root: Path,
    *,
    offline: bool = False,
    mirror: str | None = None,
    listener: Listener | None = None,
) -> None:
    """Everything that the dataset needs, in the places where its reader looks. What is there already stays."""
    listener = listener or Listener()
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise UsageError(f"a mirror's address begins with http:// or https://, got {mirror}")
    missing = [item for item in published.downloads if not _is_whole(published, _goal(item, root))]
    for item in published.downloads:
        goal = _goal(item, root)
        if item not in missing:
            differs = item.unpacked is None and md5(goal) != item.md5
            ending = ", and differs from the published file: delete it to fetch that" if differs else ""
            listener.say(f"{goal} is there already{ending}")
    absent = [item for item in missing if not _archive(item, root).exists()]
    if offline and absent:
        wanted = "; ".join(f"{item.url} into {root / item.into}" for item in absent)
        raise UsageError(f"{published.name} is not here, and --offline forbids fetching it: put {wanted}")
    for item in missing:
        archive, by_hand = _archive(item, root), item not in absent
        if by_hand and md5(archive) != item.md5:
            listener.say(f"{archive} differs from the published file")
        with _room_for(item, root / item.into):
            if not by_hand:
                _download(item, archive, mirror, listener)
            if item.unpacked is not None:
                listener.say(f"unpacking {archive.name}")
                unpack(archive, root / item.into, _goal(item, root))
                if not by_hand:
                    archive.unlink()
        listener.say(f"{_goal(item, root)} is there now")


def _goal(item: Download, root: Path) -> Path:
    return root / item.unpacked if item.unpacked is not None else _archive(item, root)


def _is_whole(published: Published, goal: Path) -> bool:
    return goal.is_file() or (goal.is_dir() and all((goal / name).is_file() for name in published.md5))


def _archive(item: Download, root: Path) -> Path:
    return root / item.into / item.name


def _download(item: Download, target: Path, mirror: str | None, listener: Listener) -> None:
    import pooch
    import requests

    url = item.url if mirror is None else f"{mirror.rstrip('/')}/{item.name}"
    by_hand = f"get {item.name} elsewhere, put it into {target.parent}, and run this again"
    target.parent.mkdir(parents=True, exist_ok=True)
    receive = _Resuming(_part(target), listener)
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

    def __init__(self, part: Path, listener: Listener) -> None:
        self.part, self.listener = part, listener

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
                    self.listener.progress(self.part.name[1:].removesuffix(".part"), have, whole)
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

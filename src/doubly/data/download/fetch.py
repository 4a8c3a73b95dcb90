"""Download of published files: interrupted downloads are resumed, checksums are verified, archives are unpacked."""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from doubly.data.download.dataset_files import is_disk_full, md5
from doubly.data.download.published import Download, Published
from doubly.data.download.unpack import unpack
from doubly.errors import UsageError

if TYPE_CHECKING:
    import requests

MAX_ATTEMPTS = 5
BLOCK = 2**18  # bytes


class Listener(NamedTuple):
    """Functions that are called as a download proceeds."""

    message: Callable[[str], None] = lambda line: None
    progress: Callable[[str, int, int | None], None] = lambda name, done, total: None  # name of the file, bytes


def fetch(
    published: Published,
    root: Path,
    *,
    offline: bool = False,
    mirror: str | None = None,
    listener: Listener | None = None,
) -> None:
    """Download and unpack everything that a dataset needs, to the places where its reader looks.

    Files that exist are never overwritten, and archives that the user has put there are unpacked.

    Args:
        published: The dataset.
        root: Folder for datasets.
        offline: Use no network: unpack what is there, or say which files are missing.
        mirror: Address of a folder with the same files, instead of the published one.
        listener: Called as the download proceeds.

    Raises:
        UsageError: A file cannot be downloaded, has another checksum, or the disk is full.
    """
    listener = listener or Listener()
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise UsageError(f"a mirror's address begins with http:// or https://, got {mirror}")
    missing = [item for item in published.downloads if not _is_complete(published, _goal(item, root))]
    for item in published.downloads:
        goal = _goal(item, root)
        if item not in missing:
            differs = item.unpacked is None and md5(goal) != item.md5
            ending = ", and differs from the published file: delete it to fetch that" if differs else ""
            listener.message(f"{goal} is there already{ending}")
    absent = [item for item in missing if not _archive(item, root).exists()]
    if offline and absent:
        wanted = "; ".join(f"{item.url} into {root / item.into}" for item in absent)
        raise UsageError(f"{published.name} is not here, and --offline forbids fetching it: put {wanted}")
    for item in missing:
        _fetch_item(item, root, mirror, listener, from_user=item not in absent)


def _fetch_item(item: Download, root: Path, mirror: str | None, listener: Listener, from_user: bool) -> None:
    """Download a file, unless the user has put it there, and unpack it if it is an archive."""
    archive = _archive(item, root)
    if from_user and md5(archive) != item.md5:
        listener.message(f"{archive} differs from the published file")
    with _explain_full_disk(item, root / item.into):
        if not from_user:
            _download(item, archive, mirror, listener)
        if item.unpacked is not None:
            listener.message(f"unpacking {archive.name}")
            unpack(archive, root / item.into, _goal(item, root))
            if not from_user:
                archive.unlink()
    listener.message(f"{_goal(item, root)} is there now")


def _goal(item: Download, root: Path) -> Path:
    return root / item.unpacked if item.unpacked is not None else _archive(item, root)


def _is_complete(published: Published, goal: Path) -> bool:
    return goal.is_file() or (goal.is_dir() and all((goal / name).is_file() for name in published.md5))


def _archive(item: Download, root: Path) -> Path:
    return root / item.into / item.name


def _download(item: Download, target: Path, mirror: str | None, listener: Listener) -> None:
    import pooch
    import requests

    url = item.url if mirror is None else f"{mirror.rstrip('/')}/{item.name}"
    by_hand = f"get {item.name} elsewhere, put it into {target.parent}, and run this again"
    target.parent.mkdir(parents=True, exist_ok=True)
    downloader = _ResumingDownloader(_part(target), listener)
    pooch.get_logger().setLevel("WARNING")
    try:
        pooch.retrieve(url, f"md5:{item.md5}", target.name, target.parent, downloader=downloader)
    except requests.HTTPError as problem:
        raise UsageError(f"{urlsplit(url).netloc} does not give {url} ({problem}): {by_hand}") from None
    except requests.RequestException as problem:
        size = downloader.size()
        saved = f"; {size:,} bytes are saved, and the same command continues from there" if size else ""
        reason = type(problem).__name__
        raise UsageError(
            f"cannot fetch {url}, the network is closed or was interrupted ({reason}){saved}: or {by_hand}"
        ) from None
    except ValueError:  # pooch raises it for another checksum, and has deleted the file
        raise UsageError(
            f"{url} does not have the published checksum {item.md5}, and was deleted: it is another file or was "
            f"damaged on its way; try once more, or {by_hand}"
        ) from None


@contextmanager
def _explain_full_disk(item: Download, folder: Path) -> Iterator[None]:
    """Turn an error about a full disk into one sentence, and remove the partial download."""
    try:
        yield
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        _part(folder / item.name).unlink(missing_ok=True)
        raise UsageError(
            f"the disk is full: {folder} has no room for {item.name}, and nothing half-written was left there; make "
            "room, or name another folder with --data-root"
        ) from None


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


class _ResumingDownloader:
    """A downloader for pooch that collects the bytes in a .part file and asks only for those that are missing."""

    def __init__(self, part: Path, listener: Listener) -> None:
        self.part, self.listener = part, listener

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:
        import requests

        for attempt in range(MAX_ATTEMPTS):
            before = self.size()
            try:
                self._receive(url)
                break
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
                if attempt == MAX_ATTEMPTS - 1 or self.size() == before:  # nothing came: the network is closed
                    raise
        self.part.replace(output_file)

    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _receive(self, url: str) -> None:
        import requests

        received = self.size()
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={received}-"} if received else {})}
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            if received and response.status_code == requests.codes.requested_range_not_satisfiable:
                # All of it is here, or the file on the server has become shorter: the checksum tells.
                return
            response.raise_for_status()
            resumed = response.status_code == requests.codes.partial_content
            received = received if resumed else 0
            length = response.headers.get("Content-Length")
            total = received + int(length) if length else None
            if length and int(length) > shutil.disk_usage(self.part.parent).free:
                raise OSError(errno.ENOSPC, "no room")
            with self.part.open("ab" if resumed else "wb") as file:
                for block in _raw_blocks(response):
                    file.write(block)
                    received += len(block)
                    self.listener.progress(self.part.name[1:].removesuffix(".part"), received, total)
            if total is not None and received < total:  # urllib3 1 does not notice
                raise requests.ConnectionError("the answer is shorter than announced")


def _raw_blocks(response: "requests.Response") -> Iterator[bytes]:
    """Yield the bytes as sent: a server may declare gzip as an encoding, which requests would undo."""
    import requests
    import urllib3

    try:
        yield from response.raw.stream(BLOCK, decode_content=False)
    except urllib3.exceptions.HTTPError as problem:
        raise requests.ConnectionError(str(problem)) from None

"""Downloads from a server in this process, which can make the mistakes that servers make. No other network is used."""

import errno
import hashlib
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import requests

from doubly.data.download import fetch as fetch_module
from doubly.data.download.fetch import Listener, fetch
from doubly.data.download.published import Download, Published
from doubly.errors import UsageError

BLOCK = 1000  # bytes that are received at a time here, so that small files have several blocks
BODY = np.random.default_rng(0).bytes(20 * BLOCK + 77)  # no part of it looks like another


class Request(NamedTuple):
    path: str
    range: str | None
    sent: int  # bytes of content


class Server(ThreadingHTTPServer):
    """Serves `files`, by the last part of the address, and records the requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.cuts: list[int] = []  # bytes after which the next answers break off
        self.ranges = True
        self.status: int | None = None  # instead of the right one
        self.length = True  # whether the answer has a Content-Length
        self.headers: dict[str, str] = {}
        self.answering = threading.Event()  # while it is not set, an answer stops in the middle
        self.answering.set()

    def handle_error(self, request, address): ...  # a client that has gone is no error


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        server, requested = self.server, self.headers.get("Range")
        body = server.files.get(self.path.rpartition("/")[2])
        begin = int(requested.removeprefix("bytes=").removesuffix("-")) if requested and server.ranges else 0
        status = server.status or (404 if body is None else 200 if not begin else 206 if begin < len(body) else 416)
        rest = body[begin:] if status in (200, 206) else b"no"
        sent = rest[: server.cuts.pop(0)] if server.cuts else rest
        server.requests.append(Request(self.path, requested, len(sent) if status in (200, 206) else 0))
        self.send_response(status)
        headers = {"Content-Length": str(len(rest))} if server.length else {}
        for name, value in (headers | server.headers).items():
            self.send_header(name, value)
        self.end_headers()
        half = len(sent) // 2
        self.wfile.write(sent[:half])
        server.answering.wait()
        self.wfile.write(sent[half:])

    def log_message(self, *line): ...


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(fetch_module, "BLOCK", BLOCK)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.answering.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def closed(monkeypatch):
    """The address of a port at which no server listens."""
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as bound:  # bound, not listening: connections are refused, and no other process gets the port
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def dataset(*items):
    return Published("things", 1, 1, items, {})


def plain(server, name="a.bin", body=BODY, into="."):
    server.files[name] = body
    return Download(f"{server.url}/deep/{name}", md5(body), into)


def put(root, name, content):
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


def tree(folder):
    """Every file below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(published, root, **options):
    """Return the message."""
    with pytest.raises(UsageError) as caught:
        fetch(published, root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def messages(published, root, **options):
    lines = []
    fetch(published, root, listener=Listener(lines.append), **options)
    return lines


# --- good files ---


def test_what_is_missing_is_fetched_once(server, root):
    published = dataset(plain(server, "a.bin", into="things"), plain(server, "empty.bin", b""))
    a, empty = root / "things" / "a.bin", root / "empty.bin"
    assert messages(published, root) == [f"{a} is there now", f"{empty} is there now"]
    assert tree(root) == {"things/a.bin": BODY, "empty.bin": b""}
    assert server.requests == [("/deep/a.bin", None, len(BODY)), ("/deep/empty.bin", None, 0)]
    server.requests.clear()
    expected = [f"{a} is there already", f"{empty} is there already"]
    assert messages(published, root) == messages(published, root, offline=True) == expected
    assert server.requests == []
    a.unlink()
    fetch(published, root)
    assert [request.path for request in server.requests] == ["/deep/a.bin"]
    a.write_bytes(b"mine")
    (line, _) = messages(published, root)
    assert line == f"{a} is there already, and differs from the published file: delete it to fetch that"
    assert a.read_bytes() == b"mine"


def test_progress_counts_to_the_total(server, root):
    seen = []
    listener = Listener(progress=lambda *state: seen.append(state))
    server.cuts = [5500]
    fetch(dataset(plain(server)), root, listener=listener)
    assert {name for name, _, _ in seen} == {"a.bin"} and {total for _, _, total in seen} == {len(BODY)}
    counts = [count for _, count, _ in seen]
    assert counts == sorted(counts) and counts[-1] == len(BODY)
    server.length = False  # a server that does not say how long the file is
    fetch(dataset(plain(server, "b.bin")), root, listener=listener)
    assert tree(root) == {"a.bin": BODY, "b.bin": BODY} and seen[-1] == ("b.bin", len(BODY), None)


def test_a_mirror_is_asked_instead_and_its_files_are_checked(server, closed, root):
    item = Download(f"{closed}/far/a.bin", md5(BODY))
    server.files["a.bin"] = BODY[::-1]
    assert item.md5 in refused(dataset(item), root, mirror=f"{server.url}/my/mirror/")
    assert tree(root) == {}
    server.files["a.bin"] = BODY
    fetch(dataset(item), root, mirror=f"{server.url}/my/mirror")
    assert tree(root) == {"a.bin": BODY} and {request.path for request in server.requests} == {"/my/mirror/a.bin"}
    assert "begins with http:// or https://, got /mnt/data" in refused(dataset(item), root, mirror="/mnt/data")


def test_a_server_that_calls_gzip_an_encoding(server, root):
    """As Apache does for .gz files with AddEncoding; the published checksum is that of the bytes sent."""
    server.headers["Content-Encoding"] = "gzip"
    fetch(dataset(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}


# --- interrupted and odd answers ---


def offset(request):
    return int(request.range.removeprefix("bytes=").removesuffix("-"))


def test_an_interrupted_download_continues_inside_one_call(server, root):
    server.cuts = [5500, 3700]
    fetch(dataset(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}
    first, second, third = server.requests
    assert first.range is None and 5500 - BLOCK <= offset(second) <= 5500
    assert offset(second) + 3700 - BLOCK <= offset(third) <= offset(second) + 3700
    assert third.sent == len(BODY) - offset(third)


def test_an_interrupted_download_continues_in_another_call(server, root):
    item = plain(server)
    server.cuts = [5500, 0]  # the second time nothing comes, so the call gives up
    message = refused(dataset(item), root)
    (part,) = tree(root).values()
    assert part == BODY[: len(part)] and 5500 - BLOCK <= len(part) <= 5500
    assert f"{len(part):,} bytes are saved, and the same command continues from there" in message

    def stop(name, received, total):
        if received > 9 * BLOCK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(dataset(item), root, listener=Listener(progress=stop))
    (part,) = tree(root).values()
    assert BODY.startswith(part) and len(part) > 9 * BLOCK
    server.status = 503  # a server in trouble does not cost what is here
    refused(dataset(item), root)
    assert tree(root) == {".a.bin.part": part}
    server.status = None
    fetch(dataset(item), root)
    assert server.requests[-1] == ("/deep/a.bin", f"bytes={len(part)}-", len(BODY) - len(part))
    assert tree(root) == {"a.bin": BODY}


def test_a_connection_that_is_always_cut_is_given_up(server, root):
    server.cuts = [2500] * 50
    assert "bytes are saved" in refused(dataset(plain(server)), root)
    assert len(server.requests) == fetch_module.MAX_ATTEMPTS
    assert set(tree(root)) == {".a.bin.part"}


def test_a_server_that_ignores_range_sends_all_again(server, root):
    server.ranges, server.cuts = False, [9500, 4500]
    fetch(dataset(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}
    assert [request.sent for request in server.requests] == [9500, 4500, len(BODY)] and offset(server.requests[1])


def test_a_complete_part_is_not_sent_again_and_a_wrong_one_costs_one_more_call(server, root):
    item = plain(server)
    put(root, ".a.bin.part", BODY)
    fetch(dataset(item), root)
    assert tree(root) == {"a.bin": BODY} and server.requests == [("/deep/a.bin", f"bytes={len(BODY)}-", 0)]
    for part in (BODY + b"more", BODY[::-1], BODY[:500][::-1]):
        (root / "a.bin").unlink()
        put(root, ".a.bin.part", part)
        assert "does not have the published checksum" in refused(dataset(item), root)
        assert tree(root) == {}
        fetch(dataset(item), root)
        assert tree(root) == {"a.bin": BODY}


def test_a_server_that_announces_more_than_it_has(server, root):
    item = plain(server)
    server.files["a.bin"] = BODY[:5500]
    server.headers["Content-Length"] = str(len(BODY))
    assert item.url in refused(dataset(item), root)
    assert set(tree(root)) <= {".a.bin.part"}
    server.files["a.bin"] = BODY
    server.headers.clear()
    fetch(dataset(item), root)
    assert tree(root) == {"a.bin": BODY}


def test_a_server_that_falls_silent_is_a_closed_network(server, root, monkeypatch):
    get, timeouts = requests.get, []

    def impatient(url, **options):
        timeouts.append(options["timeout"])
        return get(url, **options | {"timeout": 0.1})

    monkeypatch.setattr(requests, "get", impatient)
    server.answering.clear()
    item = plain(server, body=BODY[:50])  # less than a block: nothing of it can be saved
    assert f"cannot fetch {item.url}" in refused(dataset(item), root)
    assert timeouts and all(0 < timeout <= 60 for timeout in timeouts)
    assert tree(root) in ({}, {".a.bin.part": b""})


# --- what cannot be fetched ---


def test_other_content_is_refused_and_deleted(server, root):
    item = plain(server, into="set")
    server.files["a.bin"] = b"<html>please log in</html>"
    message = refused(dataset(item), root)
    assert item.url in message and item.md5 in message and "was deleted" in message
    assert f"get a.bin elsewhere, put it into {root / 'set'}" in message
    assert tree(root) == {}


def test_a_closed_network_says_what_to_do_by_hand(closed, root):
    item = Download(f"{closed}/far/a.bin", md5(BODY), "set")
    message = refused(dataset(item), root)
    assert f"cannot fetch {item.url}, the network is closed or was interrupted (ConnectionError)" in message
    assert f"get a.bin elsewhere, put it into {root / 'set'}, and run this again" in message
    assert "saved" not in message and tree(root) == {}
    put(root / "set", "a.bin", BODY)
    assert messages(dataset(item), root) == [f"{root / 'set' / 'a.bin'} is there already"]


def test_a_file_that_the_server_does_not_have(server, root):
    item = plain(server)
    for status in (403, 404, 416, 500, 503):
        server.status = status
        message = refused(dataset(item), root)
        assert item.url in message and str(status) in message and f"put it into {root}" in message
        assert tree(root) == {}
    assert len(server.requests) == 5


def test_offline_names_the_files_that_are_missing_and_their_folder(root, monkeypatch):
    monkeypatch.delattr(requests.Session, "request")
    items = [Download(f"http://far.example/{name}", md5(BODY), "set") for name in ("a.bin", "b.bin")]
    message = refused(dataset(*items), root, offline=True)
    assert message.startswith("things is not here") and "--offline" in message
    for item in items:
        assert f"{item.url} into {root / 'set'}" in message
    assert not root.exists()
    put(root / "set", "a.bin", BODY)
    message = refused(dataset(*items), root, offline=True)
    assert "b.bin" in message and "a.bin" not in message and tree(root) == {"set/a.bin": BODY}


# --- full disks ---


def test_too_little_room_is_seen_before_anything_is_written(server, root, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=len(BODY) - 1))
    progress = []
    message = refused(dataset(plain(server)), root, listener=Listener(progress=lambda *state: progress.append(state)))
    assert "the disk is full" in message and "a.bin" in message and "--data-root" in message
    assert progress == [] and tree(root) == {}
    put(root, ".a.bin.part", BODY[:3000])  # then there is room for the rest
    fetch(dataset(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}


def test_a_disk_that_fills_up_is_one_sentence_and_other_errors_are_not_hidden(server, root, monkeypatch):
    open_file, numbers = Path.open, [0]

    class Failing:
        """A file that can take 3,500 bytes."""

        def __init__(self, file):
            self.file, self.room = file, 3500

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            self.file.close()

        def write(self, block):
            self.room -= len(block)
            if self.room < 0:
                raise OSError(numbers[0], os.strerror(numbers[0]))
            return self.file.write(block)

    def opened(path, mode="r", *more, **options):
        file = open_file(path, mode, *more, **options)
        return Failing(file) if path.suffix == ".part" and mode in ("wb", "ab") else file

    monkeypatch.setattr(Path, "open", opened)
    for numbers[0] in (errno.ENOSPC, errno.EDQUOT):
        message = refused(dataset(plain(server)), root)
        assert "the disk is full" in message and str(root) in message
        assert tree(root) == {}
    numbers[0] = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        fetch(dataset(plain(server)), root)

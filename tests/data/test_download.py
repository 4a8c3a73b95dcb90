"""Fetching against a server in this process, which can do what servers do wrong. No other network is used."""

import errno
import hashlib
import io
import os
import socket
import stat
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import requests

from doubly.data import download
from doubly.data.download import Listener, fetch
from doubly.data.published import Download, Published
from doubly.errors import UsageError

BLOCK = 1000  # what is written at a time here, so that small files have several blocks
BODY = np.random.default_rng(0).bytes(20 * BLOCK + 77)  # no part of it looks like another


class Request(NamedTuple):
    path: str
    range: str | None
    sent: int  # bytes of content


class Server(ThreadingHTTPServer):
    """Serves `files`, by the last part of the address, and remembers what it was asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.asked: list[Request] = []
        self.cuts: list[int] = []  # bytes after which the next answers break off
        self.ranges = True
        self.status: int | None = None  # instead of the right one
        self.pause = 0.0  # seconds, in the middle of an answer
        self.length = True  # whether the answer says how long it is
        self.headers: dict[str, str] = {}

    def handle_error(self, request, address): ...  # a client that has gone is nothing to talk about


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        body = server.files.get(self.path.rpartition("/")[2])
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        status = server.status or (404 if body is None else 200 if not begin else 206 if begin < len(body) else 416)
        rest = body[begin:] if status in (200, 206) else b"no"
        kept = rest[: server.cuts.pop(0)] if server.cuts else rest
        server.asked.append(Request(self.path, asked, len(kept) if status in (200, 206) else 0))
        self.send_response(status)
        headers = {"Content-Length": str(len(rest))} if server.length else {}
        for name, value in (headers | server.headers).items():
            self.send_header(name, value)
        self.end_headers()
        half = len(kept) // 2
        self.wfile.write(kept[:half])
        time.sleep(server.pause)
        self.wfile.write(kept[half:])

    def log_message(self, *line): ...


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(download, "BLOCK", BLOCK)
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def root(tmp_path):
    """Where the data go; what is written outside lies beside it."""
    return tmp_path / "outer" / "root"


@pytest.fixture
def closed(monkeypatch):
    """The address of a port at which nobody listens."""
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as taken:  # bound, not listening: refused, and nobody else gets it
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def no_network(monkeypatch):
    def get(*arguments, **more):
        raise AssertionError("the network was used")

    monkeypatch.setattr(requests.Session, "request", get)


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def of(*items):
    return Published("things", 1, 1, items, {})


def plain(server, name="a.bin", body=BODY, into="."):
    server.files[name] = body
    return Download(f"{server.url}/deep/{name}", md5(body), into)


def packed(base, name, archive, **places):
    """An archive that leaves the folder `things` behind."""
    return Download(f"{base}/{name}", md5(archive), **{"unpacked": "things"} | places)


def tar(*members):
    """.tar.gz of (name or TarInfo, content)."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as file:
        for member, content in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return whole.getvalue()


def zipped(*members):
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as file:
        for member, content in members:
            file.writestr(member, content)
    return whole.getvalue()


def special(name, kind, to=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, str(to)
    return info


def zip_link(name):
    info = zipfile.ZipInfo(name)
    info.create_system = 3  # Unix, where the upper half of the attributes is the mode
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


THINGS = [("things/one.txt", b"one"), ("things/deep/two.bin", BODY), ("beside.txt", b"not needed")]
UNPACKED = {"things/one.txt": b"one", "things/deep/two.bin": BODY}
ARCHIVES = {"things.tar.gz": tar(*THINGS), "things.zip": zipped(*THINGS)}
both_archives = pytest.mark.parametrize("name", ARCHIVES)


def by_hand(root, name, archive):
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(archive)


def tree(folder):
    """Every file below, hidden ones too, and empty folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink() or not any(path.iterdir())
    }


def refused(published, root, **options):
    """The sentence."""
    with pytest.raises(UsageError) as problem:
        fetch(published, root, **options)
    said = str(problem.value)
    assert "\n" not in said
    return said


def told(published, root, **options):
    lines = []
    fetch(published, root, listener=Listener(lines.append), **options)
    return lines


class Failing:
    """A file that takes so many bytes, and then fails."""

    def __init__(self, file, room, problem):
        self.file, self.room, self.problem = file, room, problem

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self.file.close()

    def write(self, block):
        self.room -= len(block)
        if self.room < 0:
            raise self.problem
        return self.file.write(block)


def fail_to_write(monkeypatch, where, room, problem):
    """Files with `where` in their path fail after `room` bytes each."""
    real = Path.open

    def opened(path, mode="r", *more, **options):
        file = real(path, mode, *more, **options)
        return Failing(file, room, problem) if where in str(path) and mode in ("wb", "ab") else file

    monkeypatch.setattr(Path, "open", opened)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- good files ------------------------------------------------------------------------------------------------------


def test_a_plain_file_is_put_in_its_place(server, root):
    assert told(of(plain(server, into="things")), root) == [f"{root / 'things' / 'a.bin'} is there now"]
    assert tree(root) == {"things/a.bin": BODY}
    assert server.asked == [("/deep/a.bin", None, len(BODY))]


@both_archives
def test_an_archive_is_unpacked_and_removed(server, root, name):
    server.files[name] = ARCHIVES[name]
    lines = told(of(packed(server.url, name, ARCHIVES[name])), root)
    assert lines == [f"unpacking {name}", f"{root / 'things'} is there now"]
    assert tree(root) == UNPACKED  # no archive, no .part, no staging folder, and nothing that was not asked for


@both_archives
def test_a_goal_deep_in_an_archive_that_is_unpacked_in_a_folder(server, root, name):
    server.files[name] = ARCHIVES[name]
    item = packed(server.url, name, ARCHIVES[name], into="set", unpacked="set/things/deep")
    fetch(of(item), root)
    assert tree(root) == {"set/things/deep/two.bin": BODY}


def test_a_goal_may_be_a_file_of_an_archive(server, root):
    server.files["a.zip"] = ARCHIVES["things.zip"]
    fetch(of(packed(server.url, "a.zip", ARCHIVES["things.zip"], unpacked="beside.txt")), root)
    assert tree(root) == {"beside.txt": b"not needed"}


def test_archives_that_share_a_folder_do_not_disturb_each_other(server, root):
    parts = {"one.zip": zipped(("set/one/a", b"a")), "two.zip": zipped(("set/two/b", b"b"))}
    server.files |= parts
    fetch(of(*(packed(server.url, f"{n}.zip", parts[f"{n}.zip"], unpacked=f"set/{n}") for n in ("one", "two"))), root)
    assert tree(root) == {"set/one/a": b"a", "set/two/b": b"b"}


def test_a_file_without_content(server, root):
    fetch(of(plain(server, body=b"")), root)
    assert tree(root) == {"a.bin": b""}


def test_folders_and_long_names_in_an_archive(server, root):
    long = f"things/{'n' * 120}/{'m' * 120}"  # beyond the 100 bytes of the oldest format
    archive = tar((special("things", tarfile.DIRTYPE), b""), (long, b"x"))
    server.files["a.tar.gz"] = archive
    fetch(of(packed(server.url, "a.tar.gz", archive)), root)
    assert tree(root) == {long: b"x"}


def test_progress_counts_to_the_whole(server, root):
    seen = []
    server.cuts = [5500]
    fetch(of(plain(server)), root, listener=Listener(progress=lambda *state: seen.append(state)))
    assert {name for name, _, _ in seen} == {"a.bin"} and {whole for _, _, whole in seen} == {len(BODY)}
    done = [count for _, count, _ in seen]
    assert done == sorted(done) and done[-1] == len(BODY)


def test_a_server_that_does_not_say_how_long_a_file_is(server, root):
    seen = []
    server.length = False
    fetch(of(plain(server)), root, listener=Listener(progress=lambda *state: seen.append(state)))
    assert tree(root) == {"a.bin": BODY} and seen[-1] == ("a.bin", len(BODY), None)


def test_a_second_fetch_asks_nobody(server, root):
    server.files |= ARCHIVES
    published = of(plain(server), packed(server.url, "things.zip", ARCHIVES["things.zip"]))
    fetch(published, root)
    before, server.asked = tree(root), []
    expected = [f"{root / 'a.bin'} is there already", f"{root / 'things'} is there already"]
    assert told(published, root) == told(published, root, offline=True) == expected
    assert tree(root) == before and server.asked == []


def test_only_what_is_missing_is_fetched(server, root):
    published = of(plain(server, "a.bin"), plain(server, "b.bin", BODY[::-1]))
    fetch(published, root)
    (root / "b.bin").unlink()
    server.asked = []
    fetch(published, root)
    assert [request.path for request in server.asked] == ["/deep/b.bin"]
    assert tree(root) == {"a.bin": BODY, "b.bin": BODY[::-1]}


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_mirror_is_asked_instead(server, closed, root, ending):
    server.files["a.bin"] = BODY
    fetch(of(Download(f"{closed}/far/a.bin", md5(BODY))), root, mirror=f"{server.url}/my/mirror{ending}")
    assert tree(root) == {"a.bin": BODY} and [request.path for request in server.asked] == ["/my/mirror/a.bin"]


def test_what_a_mirror_sends_is_judged_too(server, root):
    item = plain(server)
    server.files["a.bin"] = BODY[::-1]
    assert item.md5 in refused(of(item), root, mirror=f"{server.url}/mirror")
    assert tree(root) == {}


# --- cut, slow and odd answers ---------------------------------------------------------------------------------------


def kept(request):
    return int(request.range.removeprefix("bytes=").removesuffix("-"))


def test_a_cut_download_goes_on_inside_one_call(server, root):
    server.cuts = [5500, 3700]
    fetch(of(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}
    first, second, third = server.asked
    assert first.range is None and 5500 - BLOCK <= kept(second) <= 5500
    assert kept(second) + 3700 - BLOCK <= kept(third) <= kept(second) + 3700
    assert third.sent == len(BODY) - kept(third)


def test_a_cut_download_goes_on_in_another_call(server, root):
    item = plain(server)
    server.cuts = [5500, 0]  # the second time nothing comes, so the call gives up
    said = refused(of(item), root)
    (part,) = tree(root).values()
    assert part == BODY[: len(part)] and 5500 - BLOCK <= len(part) <= 5500
    assert f"{len(part):,} bytes are kept, and the same command goes on from there" in said and item.url in said
    server.asked = []
    fetch(of(item), root)
    assert server.asked == [("/deep/a.bin", f"bytes={len(part)}-", len(BODY) - len(part))]
    assert tree(root) == {"a.bin": BODY}


def test_a_connection_that_is_always_cut_is_given_up(server, root):
    server.cuts = [2500] * 50
    assert "bytes are kept" in refused(of(plain(server)), root)
    assert len(server.asked) == download.ATTEMPTS
    assert [path for path in tree(root) if not path.endswith(".part")] == []


def test_interrupted_by_hand_the_part_stays(server, root):
    published = of(plain(server))

    def stop(name, done, whole):
        if done > 5 * BLOCK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(published, root, listener=Listener(progress=stop))
    (part,) = tree(root).values()
    assert BODY.startswith(part) and len(part) > 5 * BLOCK
    fetch(published, root)
    assert server.asked[-1] == ("/deep/a.bin", f"bytes={len(part)}-", len(BODY) - len(part))
    assert tree(root) == {"a.bin": BODY}


def test_a_server_that_ignores_range_sends_all_again(server, root):
    server.ranges, server.cuts = False, [5500]
    fetch(of(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}
    assert [request.sent for request in server.asked] == [5500, len(BODY)] and kept(server.asked[1])


def test_a_server_that_ignores_range_and_is_cut_earlier(server, root):
    server.ranges, server.cuts = False, [9500, 4500]
    fetch(of(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}


def test_a_part_that_is_whole_is_not_sent_again(server, root):
    item = plain(server)
    by_hand(root, ".a.bin.part", BODY)
    fetch(of(item), root)
    assert tree(root) == {"a.bin": BODY} and server.asked == [("/deep/a.bin", f"bytes={len(BODY)}-", 0)]


@pytest.mark.parametrize("part", [BODY + b"more", BODY[::-1], BODY[:500][::-1]], ids=["longer", "as long", "shorter"])
def test_a_part_of_another_file_costs_one_more_call(server, root, part):
    item = plain(server)
    by_hand(root, ".a.bin.part", part)
    assert "has not the published checksum" in refused(of(item), root)
    assert tree(root) == {}
    fetch(of(item), root)
    assert tree(root) == {"a.bin": BODY}


def test_a_server_that_answers_416_to_everything(server, root):
    item = plain(server)
    server.status = 416
    assert item.url in refused(of(item), root)
    assert tree(root) == {}


def test_a_server_that_promises_more_than_it_has(server, root):
    """Whether it ends in a cut or, asked for the rest, in 416: no short file is taken for the whole one."""
    item = plain(server)
    server.files["a.bin"] = BODY[:5500]
    server.headers["Content-Length"] = str(len(BODY))
    assert item.url in refused(of(item), root)
    assert set(tree(root)) <= {".a.bin.part"}
    server.files["a.bin"] = BODY
    server.headers.clear()
    fetch(of(item), root)
    assert tree(root) == {"a.bin": BODY}


def test_a_slow_server_is_waited_for(server, root):
    server.pause = 0.3
    fetch(of(plain(server)), root)
    assert tree(root) == {"a.bin": BODY} and len(server.asked) == 1


def test_a_server_that_falls_silent_is_a_closed_network(server, root, monkeypatch):
    real, server.pause, waits = requests.get, 1.0, []

    def impatient(url, **options):
        waits.append(options["timeout"])
        return real(url, **options | {"timeout": 0.1})

    monkeypatch.setattr(requests, "get", impatient)
    item = plain(server, body=BODY[:50])  # less than a block: nothing of it can be kept
    assert f"cannot fetch {item.url}" in refused(of(item), root)
    assert waits and all(0 < wait <= 60 for wait in waits)
    assert tree(root) in ({}, {".a.bin.part": b""})


def test_a_server_that_calls_gzip_an_encoding(server, root):
    """Apache does so for .gz where AddEncoding is set; the published checksum is of what was sent."""
    archive = ARCHIVES["things.tar.gz"]
    server.files["things.tar.gz"] = archive
    server.headers["Content-Encoding"] = "gzip"
    fetch(of(packed(server.url, "things.tar.gz", archive)), root)
    assert tree(root) == UNPACKED


# --- what cannot be had ----------------------------------------------------------------------------------------------


def test_another_content_is_refused_and_deleted(server, root):
    item = plain(server, into="set")
    server.files["a.bin"] = b"<html>please log in</html>"
    said = refused(of(item), root)
    assert item.url in said and item.md5 in said and "was deleted" in said
    assert f"get a.bin elsewhere, put it into {root / 'set'}" in said
    assert [path for path, content in tree(root).items() if content is not None] == []


def test_a_wrong_archive_is_not_unpacked(server, root):
    server.files |= ARCHIVES
    item = packed(server.url, "things.zip", ARCHIVES["things.tar.gz"])
    said = refused(of(item), root)
    assert item.url in said and item.md5 in said and tree(root) == {}


def test_a_closed_network(closed, root):
    item = Download(f"{closed}/far/a.bin", md5(BODY), "set")
    said = refused(of(item), root)
    assert f"cannot fetch {item.url}, the network is closed or was cut (ConnectionError)" in said
    assert f"get a.bin elsewhere, put it into {root / 'set'}, and run this again" in said and "kept" not in said
    assert [path for path, content in tree(root).items() if content is not None] == []


def test_what_is_put_in_by_hand_after_that_is_taken(closed, root):
    item = Download(f"{closed}/far/a.bin", md5(BODY))
    refused(of(item), root)
    by_hand(root, "a.bin", BODY)
    assert told(of(item), root) == [f"{root / 'a.bin'} is there already"]


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_file_that_the_server_has_not(server, root, status):
    item = plain(server)
    server.status = status
    said = refused(of(item), root)
    assert item.url in said and str(status) in said and f"put it into {root}" in said
    assert tree(root) == {} and len(server.asked) == 1


def test_a_server_in_trouble_does_not_cost_what_is_here(server, root):
    item = plain(server)
    by_hand(root, ".a.bin.part", BODY[:3000])
    server.status = 503
    refused(of(item), root)
    assert tree(root) == {".a.bin.part": BODY[:3000]}


def test_a_mirror_that_is_no_address(root):
    said = refused(of(Download("http://127.0.0.1:9/a.bin", md5(BODY))), root, mirror="/mnt/data")
    assert "begins with http:// or https://, got /mnt/data" in said and tree(root) == {}


def test_offline_names_every_file_and_its_folder(root, no_network):
    items = [Download(f"http://far.example/{name}", md5(BODY), "set") for name in ("a.bin", "b.bin")]
    said = refused(of(*items), root, offline=True)
    assert said.startswith("things is not here") and "--offline" in said
    for item in items:
        assert f"{item.url} into {root / 'set'}" in said
    assert not root.exists()


def test_offline_names_only_what_is_absent(root, no_network):
    by_hand(root, "a.bin", BODY)
    items = [Download(f"http://far.example/{name}", md5(BODY)) for name in ("a.bin", "b.bin")]
    said = refused(of(*items), root, offline=True)
    assert "b.bin" in said and "a.bin" not in said and tree(root) == {"a.bin": BODY}


def test_offline_does_not_ask_for_an_archive_that_waits_to_be_unpacked(root, no_network):
    by_hand(root, "things.zip", ARCHIVES["things.zip"])
    items = packed("http://far.example", "things.zip", ARCHIVES["things.zip"]), Download("http://far.example/b.bin", "")
    said = refused(of(*items), root, offline=True)
    assert "b.bin" in said and "things.zip" not in said
    assert tree(root) == {"things.zip": ARCHIVES["things.zip"]}


# --- put in by hand --------------------------------------------------------------------------------------------------


@both_archives
@pytest.mark.parametrize("offline", [False, True])
def test_an_archive_put_in_by_hand_is_unpacked_and_kept(root, no_network, name, offline):
    by_hand(root, name, ARCHIVES[name])
    lines = told(of(packed("http://far.example", name, ARCHIVES[name])), root, offline=offline)
    assert lines == [f"unpacking {name}", f"{root / 'things'} is there now"]
    assert tree(root) == UNPACKED | {name: ARCHIVES[name]}


def test_another_archive_with_the_right_folder_is_unpacked_and_said_to_differ(root, no_network):
    by_hand(root, "things.zip", ARCHIVES["things.zip"])
    lines = told(of(packed("http://far.example", "things.zip", b"published")), root, offline=True)
    assert f"{root / 'things.zip'} differs from the published file" in lines
    assert tree(root) == UNPACKED | {"things.zip": ARCHIVES["things.zip"]}


def test_a_plain_file_that_differs_stays_and_is_said_to_differ(root, no_network):
    by_hand(root, "a.bin", b"mine")
    (line,) = told(of(Download("http://far.example/a.bin", md5(BODY))), root)
    path = root / "a.bin"
    assert line == f"{path} is there already, and differs from the published file: delete it to fetch that"
    assert tree(root) == {"a.bin": b"mine"}


@both_archives
def test_an_archive_without_the_promised_folder(root, no_network, name):
    by_hand(root, name, ARCHIVES[name])
    item = packed("http://far.example", name, ARCHIVES[name], unpacked="others")
    said = refused(of(item), root, offline=True)
    assert f"{root / name} does not hold others" in said
    assert tree(root) == {name: ARCHIVES[name]}


@both_archives
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.97])
def test_a_truncated_archive_put_in_by_hand(root, no_network, name, share):
    whole = ARCHIVES[name]
    cut = whole[: int(share * len(whole))]
    by_hand(root, name, cut)
    said = refused(of(packed("http://far.example", name, whole)), root, offline=True)
    assert f"{root / name} cannot be read as an archive" in said and "cut short or another file" in said
    assert tree(root) == {name: cut}


def damaged(root, name):
    """One byte in the middle of an archive is another."""
    changed = bytearray(ARCHIVES[name])
    changed[len(changed) // 2] ^= 255
    by_hand(root, name, bytes(changed))
    return bytes(changed)


def test_a_damaged_zip_put_in_by_hand(root, no_network):
    archive = damaged(root, "things.zip")
    said = refused(of(packed("http://far.example", "things.zip", ARCHIVES["things.zip"])), root, offline=True)
    assert "cannot be read as an archive" in said and tree(root) == {"things.zip": archive}


def test_a_damaged_tar_put_in_by_hand_is_at_least_said_to_differ(root, no_network):
    """tarfile stops before gzip's checksum, so a damage in the middle may come through."""
    damaged(root, "things.tar.gz")
    lines = []
    try:
        fetch(
            of(packed("http://far.example", "things.tar.gz", ARCHIVES["things.tar.gz"])),
            root,
            listener=Listener(lines.append),
        )
    except UsageError:
        assert not (root / "things").exists()
    assert lines[0] == f"{root / 'things.tar.gz'} differs from the published file"


# --- archives that would write elsewhere -----------------------------------------------------------------------------

ELSEWHERE = ["../evil", "things/../../evil", "/{outer}/evil", "C:\\evil", "C:/evil", "..\\..\\evil", "\\evil"]
NOT_PLAIN = {
    "symbolic link": (tarfile.SYMTYPE, "../../evil"),
    "symbolic link inside": (tarfile.SYMTYPE, "one.txt"),
    "hard link": (tarfile.LNKTYPE, "things/one.txt"),
    "character device": (tarfile.CHRTYPE, ""),
    "block device": (tarfile.BLKTYPE, ""),
    "pipe": (tarfile.FIFOTYPE, ""),
}


def not_unpacked(root, name, archive, monkeypatch):
    """The sentence; nothing was written, not even for a moment, and nothing beside the root."""
    by_hand(root, name, archive)
    outer = root.parent
    fail_to_write(monkeypatch, "unpacking", 0, AssertionError("something was unpacked"))
    said = refused(of(packed("http://far.example", name, archive)), root, offline=True)
    assert tree(outer) == {f"root/{name}": archive} and not (outer.parent / "evil").exists()
    return said


@pytest.mark.parametrize("member", ELSEWHERE)
@pytest.mark.parametrize(("name", "pack"), [("a.tar.gz", tar), ("a.zip", zipped)], ids=["tar", "zip"])
def test_a_member_outside_its_folder(root, no_network, monkeypatch, name, pack, member):
    member = member.replace("/{outer}", str(root.parent))
    said = not_unpacked(root, name, pack(*THINGS, (member, b"evil")), monkeypatch)
    assert f"'{member}'" in said and "nothing was unpacked; do not trust this archive" in said


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_member_that_is_no_plain_file(root, no_network, monkeypatch, kind):
    archive = tar(*THINGS, (special("things/odd", *NOT_PLAIN[kind]), b""))
    assert "'things/odd'" in not_unpacked(root, "a.tar.gz", archive, monkeypatch)


def test_a_file_behind_a_link_of_the_archive(root, no_network, monkeypatch):
    """The classic: a link to elsewhere, and then a file that is written through it."""
    archive = tar((special("things", tarfile.SYMTYPE, root.parent), b""), ("things/evil", b"evil"))
    assert "'things'" in not_unpacked(root, "a.tar.gz", archive, monkeypatch)


def test_a_link_in_a_zip(root, no_network, monkeypatch):
    archive = zipped(*THINGS, (zip_link("things/odd"), b"../../evil"))
    assert "'things/odd'" in not_unpacked(root, "a.zip", archive, monkeypatch)


def test_an_evil_archive_of_the_right_checksum(server, root):
    archive = tar(*THINGS, ("../evil", b"evil"))
    server.files["a.tar.gz"] = archive
    assert "'../evil'" in refused(of(packed(server.url, "a.tar.gz", archive)), root)
    assert set(tree(root.parent)) <= {"root/a.tar.gz"}


def test_an_archive_that_was_made_of_a_dot(root, no_network):
    """`tar -czf a.tar.gz .` begins with the member '.'."""
    archive = tar((special(".", tarfile.DIRTYPE), b""), *((f"./{name}", content) for name, content in THINGS))
    by_hand(root, "a.tar.gz", archive)
    fetch(of(packed("http://far.example", "a.tar.gz", archive)), root, offline=True)
    assert tree(root) == UNPACKED | {"a.tar.gz": archive}


def test_a_folder_that_lacks_a_file_gets_that_and_keeps_the_others(root, no_network):
    archive = ARCHIVES["things.tar.gz"]
    by_hand(root, "things.tar.gz", archive)
    by_hand(root / "things", "one.txt", b"mine")
    needed = of(packed("http://far.example", "things.tar.gz", archive))
    fetch(needed._replace(md5={"one.txt": ""}), root, offline=True)
    assert tree(root / "things") == {"one.txt": b"mine"}  # nothing that is needed is missing
    fetch(needed._replace(md5={"one.txt": "", "two": ""}), root, offline=True)
    assert tree(root / "things") == {"one.txt": b"mine", "deep/two.bin": BODY}


def test_a_member_that_is_a_file_and_a_folder(root, no_network):
    archive = tar(*THINGS, ("things/one.txt/evil", b"evil"))
    by_hand(root, "a.tar.gz", archive)
    refused(of(packed("http://far.example", "a.tar.gz", archive)), root, offline=True)
    assert tree(root) == {"a.tar.gz": archive}


# --- full disks and sudden ends --------------------------------------------------------------------------------------


def test_too_little_room_is_seen_before_anything_is_written(server, root, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=len(BODY) - 1))
    progress = []
    said = refused(of(plain(server)), root, listener=Listener(progress=lambda *state: progress.append(state)))
    assert "the disk is full" in said and "a.bin" in said and "--data-root" in said
    assert progress == [] and tree(root) == {}


def test_enough_room_for_the_rest_is_enough(server, root, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=len(BODY) - 3000))
    by_hand(root, ".a.bin.part", BODY[:3000])
    fetch(of(plain(server)), root)
    assert tree(root) == {"a.bin": BODY}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_disk_fills_during_the_download(server, root, monkeypatch, number):
    fail_to_write(monkeypatch, ".part", 3500, OSError(number, os.strerror(number)))
    said = refused(of(plain(server)), root)
    assert "the disk is full" in said and str(root) in said
    assert tree(root) == {}


@both_archives
def test_the_disk_fills_during_unpacking(server, root, monkeypatch, name):
    server.files[name] = ARCHIVES[name]
    published = of(packed(server.url, name, ARCHIVES[name]))
    with monkeypatch.context() as patch:
        fail_to_write(patch, "unpacking", 3500, FULL)
        assert "the disk is full" in refused(published, root)
    assert set(tree(root)) <= {name}  # whole, so that it need not be fetched again
    fetch(published, root)
    assert {path: content for path, content in tree(root).items() if path != name} == UNPACKED


def test_another_trouble_with_the_disk_is_not_called_full(server, root, monkeypatch):
    fail_to_write(monkeypatch, ".part", 3500, OSError(errno.EIO, "I/O error"))
    with pytest.raises(OSError, match="I/O error"):
        fetch(of(plain(server)), root)


@both_archives
@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(1), MemoryError()], ids=lambda end: type(end).__name__)
def test_killed_while_unpacking_there_is_no_goal(root, no_network, monkeypatch, name, end):
    by_hand(root, name, ARCHIVES[name])
    published = of(packed("http://far.example", name, ARCHIVES[name]))
    with monkeypatch.context() as patch, pytest.raises((type(end), UsageError)):
        fail_to_write(patch, "unpacking", 3500, end)
        fetch(published, root)
    assert tree(root) == {name: ARCHIVES[name]}
    fetch(published, root)
    assert tree(root) == UNPACKED | {name: ARCHIVES[name]}


def test_what_a_killed_process_left_is_cleared_away(root, no_network, monkeypatch):
    """kill -9 leaves no time to tidy up: here the tidying fails as well."""
    by_hand(root, "things.zip", ARCHIVES["things.zip"])
    published = of(packed("http://far.example", "things.zip", ARCHIVES["things.zip"]))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", lambda *arguments, **options: None)
        fail_to_write(patch, "unpacking", 3500, KeyboardInterrupt())
        fetch(published, root)
    (left,) = root.glob(".*")
    assert left.is_dir() and not (root / "things").exists()
    (left / "things" / "stale").write_bytes(b"stale")
    fetch(published, root)
    assert tree(root) == UNPACKED | {"things.zip": ARCHIVES["things.zip"]}

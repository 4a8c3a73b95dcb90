"""Archives, downloaded or from the user, are unpacked in full or not at all, and never outside their folder."""

import errno
import hashlib
import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import requests

from doubly.data.download import fetch as fetch_module
from doubly.data.download.fetch import Listener, fetch
from doubly.data.download.published import Download, Published
from doubly.errors import UsageError

BODY = np.random.default_rng(0).bytes(20_000)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.delattr(requests.Session, "request")


@pytest.fixture
def root(tmp_path):
    """The folder for data; what is written outside would lie beside it."""
    return tmp_path / "outer" / "root"


def tar(*members):
    """Return a .tar.gz of (name or TarInfo, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for member, content in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zipped(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members:
            archive.writestr(member, content)
    return file.getvalue()


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, str(target)
    return info


def zip_link(name):
    info = zipfile.ZipInfo(name)
    info.create_system = 3  # Unix, where the upper half of the attributes is the mode
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


THINGS = [("things/one.txt", b"one"), ("things/deep/two.bin", BODY), ("beside.txt", b"not needed")]
UNPACKED = {"things/one.txt": b"one", "things/deep/two.bin": BODY}
ARCHIVES = {"things.tar.gz": tar(*THINGS), "things.zip": zipped(*THINGS)}
PACKERS = (("a.tar.gz", tar), ("a.zip", zipped))


def dataset(name, archive, **options):
    """A dataset with one archive, of which the folder `things` is needed."""
    digest = hashlib.md5(archive, usedforsecurity=False).hexdigest()
    item = Download(f"http://far.example/{name}", digest, **{"unpacked": "things"} | options)
    return Published("things", 1, 1, (item,), {})


def put(root, name, content):
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


def tree(folder):
    """Every file and link below a folder, hidden ones too, and empty folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink() or not any(path.iterdir())
    }


def refused(published, root):
    with pytest.raises(UsageError) as caught:
        fetch(published, root, offline=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fail_to_write(monkeypatch, room, problem):
    """Make files that are unpacked fail after `room` bytes each."""
    open_file = Path.open

    class Failing:
        def __init__(self, file):
            self.file, self.room = file, room

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            self.file.close()

        def write(self, block):
            self.room -= len(block)
            if self.room < 0:
                raise problem
            return self.file.write(block)

    def opened(path, mode="r", *more, **options):
        file = open_file(path, mode, *more, **options)
        return Failing(file) if "unpacking" in str(path) and mode == "wb" else file

    monkeypatch.setattr(Path, "open", opened)


def test_a_downloaded_archive_is_unpacked_and_removed(root, monkeypatch):
    for name, archive in ARCHIVES.items():
        lines = []

        def download(item, target, mirror, listener, archive=archive):
            put(target.parent, target.name, archive)

        monkeypatch.setattr(fetch_module, "_download", download)
        folder = root / name
        fetch(dataset(name, archive), folder, listener=Listener(lines.append))
        assert lines == [f"unpacking {name}", f"{folder / 'things'} is there now"]
        assert tree(folder) == UNPACKED  # no archive, no staging folder, and nothing that is not needed


def test_an_archive_of_the_user_is_unpacked_and_stays(root):
    for name, archive in ARCHIVES.items():
        for offline in (False, True):
            folder, lines = root / name / str(offline), []
            put(folder, name, archive)
            fetch(dataset(name, archive), folder, offline=offline, listener=Listener(lines.append))
            assert lines == [f"unpacking {name}", f"{folder / 'things'} is there now"]
            assert tree(folder) == UNPACKED | {name: archive}
    put(root / "other", "things.zip", archive)
    lines = []
    fetch(dataset("things.zip", b"published"), root / "other", listener=Listener(lines.append))
    assert f"{root / 'other' / 'things.zip'} differs from the published file" in lines


def test_any_file_or_folder_of_an_archive_can_be_the_goal(root):
    for name, archive in ARCHIVES.items():
        for number, (options, expected) in enumerate(
            (
                ({"unpacked": "beside.txt"}, {"beside.txt": b"not needed", name: archive}),
                (
                    {"into": "set", "unpacked": "set/things/deep"},
                    {"set/things/deep/two.bin": BODY, f"set/{name}": archive},
                ),
            )
        ):
            folder = root / f"{name}-{number}"
            put(folder / options.get("into", "."), name, archive)
            fetch(dataset(name, archive, **options), folder, offline=True)
            assert tree(folder) == expected


def test_archives_that_share_a_folder_do_not_disturb_each_other(root):
    parts = {"one.zip": zipped(("set/one/a", b"a")), "two.zip": zipped(("set/two/b", b"b"))}
    items = []
    for name, archive in parts.items():
        put(root, name, archive)
        items += dataset(name, archive, unpacked=f"set/{name[:3]}").downloads
    fetch(Published("things", 1, 1, tuple(items), {}), root, offline=True)
    assert tree(root) == {"set/one/a": b"a", "set/two/b": b"b"} | parts


def test_folders_long_names_and_a_leading_dot_in_an_archive(root):
    long = f"things/{'n' * 120}/{'m' * 120}"  # more than the 100 bytes of the oldest format
    dots = [(special(".", tarfile.DIRTYPE), b""), *((f"./{name}", content) for name, content in THINGS)]
    for name, archive, expected in (
        ("long.tar.gz", tar((special("things", tarfile.DIRTYPE), b""), (long, b"x")), {long: b"x"}),
        ("dot.tar.gz", tar(*dots), UNPACKED),  # made by `tar -czf dot.tar.gz .`
    ):
        put(root / name, name, archive)
        fetch(dataset(name, archive), root / name, offline=True)
        assert tree(root / name) == expected | {name: archive}


def test_a_folder_that_lacks_a_file_gets_that_and_keeps_the_others(root):
    archive = ARCHIVES["things.tar.gz"]
    put(root, "things.tar.gz", archive)
    put(root / "things", "one.txt", b"mine")
    published = dataset("things.tar.gz", archive)
    fetch(published._replace(md5={"one.txt": ""}), root, offline=True)
    assert tree(root / "things") == {"one.txt": b"mine"}  # nothing that is needed is missing
    fetch(published._replace(md5={"one.txt": "", "two": ""}), root, offline=True)
    assert tree(root / "things") == {"one.txt": b"mine", "deep/two.bin": BODY}


def test_offline_does_not_ask_for_an_archive_that_waits_to_be_unpacked(root):
    archive = ARCHIVES["things.zip"]
    put(root, "things.zip", archive)
    items = (*dataset("things.zip", archive).downloads, Download("http://far.example/b.bin", ""))
    message = refused(Published("things", 1, 1, items, {}), root)
    assert "b.bin" in message and "things.zip" not in message
    assert tree(root) == {"things.zip": archive}


def test_damaged_and_other_archives_leave_nothing(root):
    for name, archive in ARCHIVES.items():
        folder = root / name
        for share in (0.0, 0.01, 0.5, 0.97):
            cut = archive[: int(share * len(archive))]
            put(folder, name, cut)
            message = refused(dataset(name, archive), folder)
            assert f"{folder / name} cannot be read as an archive" in message and "truncated or another file" in message
            assert tree(folder) == {name: cut}
        flipped = bytearray(archive)
        flipped[len(flipped) // 2] ^= 255
        put(folder, name, bytes(flipped))
        assert "cannot be read as an archive" in refused(dataset(name, archive), folder)
        put(folder, name, archive)
        assert f"{folder / name} does not contain others" in refused(dataset(name, archive, unpacked="others"), folder)
        assert tree(folder) == {name: archive}
    both = tar(*THINGS, ("things/one.txt/evil", b"evil"))  # a member that is a file and a folder
    put(root / "both", "a.tar.gz", both)
    refused(dataset("a.tar.gz", both), root / "both")
    assert tree(root / "both") == {"a.tar.gz": both}


def test_members_outside_their_folder_or_that_are_no_plain_files_are_not_unpacked(root, monkeypatch):
    outer = root.parent
    fail_to_write(monkeypatch, 0, AssertionError("something was unpacked"))
    elsewhere = ["../evil", "things/../../evil", f"{outer}/evil", "C:\\evil", "C:/evil", "..\\..\\evil", "\\evil"]
    cases = [(name, pack(*THINGS, (member, b"evil")), member) for name, pack in PACKERS for member in elsewhere]
    for kind, target in (
        (tarfile.SYMTYPE, "../../evil"),
        (tarfile.SYMTYPE, "one.txt"),
        (tarfile.LNKTYPE, "things/one.txt"),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""),
    ):
        cases.append(("a.tar.gz", tar(*THINGS, (special("things/odd", kind, target), b"")), "things/odd"))
    cases.append(("a.zip", zipped(*THINGS, (zip_link("things/odd"), b"../../evil")), "things/odd"))
    # The classic: a link to elsewhere, and then a file that is written through it.
    cases.append(
        ("a.tar.gz", tar((special("things", tarfile.SYMTYPE, outer), b""), ("things/evil", b"evil")), "things")
    )
    for name, archive, member in cases:
        put(root, name, archive)
        message = refused(dataset(name, archive), root)
        assert f"'{member}'" in message and "nothing was unpacked; do not trust this archive" in message
        assert tree(outer) == {f"root/{name}": archive} and not (outer.parent / "evil").exists()
        (root / name).unlink()


def test_an_interruption_while_unpacking_leaves_no_goal(root, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for name, archive in ARCHIVES.items():
        folder, published = root / name, dataset(name, archive)
        put(folder, name, archive)
        for problem in (KeyboardInterrupt(), SystemExit(1), MemoryError(), full):
            with monkeypatch.context() as patch, pytest.raises((type(problem), UsageError)) as caught:
                fail_to_write(patch, 3500, problem)
                fetch(published, folder)
            assert problem is not full or "the disk is full" in str(caught.value)
            assert tree(folder) == {name: archive}
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("shutil.rmtree", lambda *arguments, **options: None)  # killed: no time to clean up
            fail_to_write(patch, 3500, KeyboardInterrupt())
            fetch(published, folder)
        (leftover,) = folder.glob(".*")
        assert leftover.is_dir() and not (folder / "things").exists()
        (leftover / "things" / "stale").write_bytes(b"stale")
        fetch(published, folder)
        assert tree(folder) == UNPACKED | {name: archive}

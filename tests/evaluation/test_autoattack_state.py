"""The state of AutoAttack on disk: read back as written, refused if it is another evaluation's or damaged."""

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest

from doubly.errors import UsageError
from doubly.evaluation.autoattack.state import ChunkFiles

KEY = {"model": "abc", "epsilon": 8 / 255, "norm": "Linf", "chunk": 250, "parts": ["apgd-ce"], "compiled": False}
RECORD = {"name": "apgd-ce", "broken": [0], "answers": [2], "made": 1, "largest": 1.0, "outside": 0}
STATE = {"clean": [1, 0], "attacks": [{**RECORD, "warnings": [], "seconds": 0.5}]}


@pytest.fixture
def files(tmp_path):
    files = ChunkFiles(tmp_path / "deep" / "state", KEY)
    files.open()
    return files


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_is_read(files):
    assert files.read(3) is None
    files.write(3, {"clean": [], "attacks": []})
    files.write(3, STATE)
    again = ChunkFiles(files.folder, dict(reversed(KEY.items())))
    again.open()
    state = again.read(3)
    assert {name: state[name] for name in STATE} == STATE and again.read(4) is None
    assert sorted(contents(files.folder)) == ["chunk-00003.json", "key.json"]


def test_all_chunks_are_finished_when_all_attacks_have_run_on_each(files):
    files.write(0, STATE)
    assert files.all_finished(1, ["apgd-ce"])
    assert not files.all_finished(2, ["apgd-ce"]) and not files.all_finished(1, ["apgd-ce", "square"])


def test_images_are_read_back_bit_for_bit(files):
    images = {5: np.random.default_rng(0).random((1, 3, 3), dtype=np.float32), 2: np.zeros((1, 3, 3), np.float32)}
    files.write_images(0, "fab-t", images)
    result = files.read_images(0, "fab-t")
    assert list(result) == [5, 2] and all(np.array_equal(result[row], images[row]) for row in images)
    assert files.read_images(0, "square") == {} == files.read_images(1, "fab-t")
    assert not any(name.startswith(".") for name in contents(files.folder))


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ChunkFiles(None, KEY)
    files.open()
    files.write(0, STATE)
    files.write_images(0, "square", {1: np.zeros((1, 2, 2))})
    assert files.read(0) is None and files.read_images(0, "square") == {}
    assert list(tmp_path.iterdir()) == []


def test_the_state_of_another_evaluation_is_refused_and_kept(files):
    files.write(0, STATE)
    before = contents(files.folder)
    without = {name: value for name, value in KEY.items() if name != "compiled"}
    for key, words in (
        ({**KEY, "model": "xyz"}, ["model is abc", "here it is xyz"]),
        ({**KEY, "epsilon": 0.1}, ["epsilon is 0.03", "here it is 0.1"]),
        ({**KEY, "parts": ["square"]}, ["parts is ['apgd-ce']"]),
        ({**KEY, "compiled": True}, ["compiled is False"]),
        ({**KEY, "new": 1}, ["new is None"]),
        (without, ["compiled is False, here it is None"]),
    ):
        with pytest.raises(UsageError) as error:
            ChunkFiles(files.folder, key).open()
        message = str(error.value)
        assert all(word in message for word in [*words, "another folder", "delete"]) and "\n" not in message
        assert contents(files.folder) == before


def test_a_chunk_of_another_evaluation_is_refused(files, tmp_path):
    """Copied from another folder, or left in this one after its key was deleted."""
    files.write(0, STATE)
    other = ChunkFiles(tmp_path / "other", {**KEY, "epsilon": 0.1})
    other.open()
    (other.folder / "chunk-00000.json").write_bytes((files.folder / "chunk-00000.json").read_bytes())
    (files.folder / "key.json").unlink()
    same_folder = ChunkFiles(files.folder, {**KEY, "epsilon": 0.1})
    same_folder.open()
    for one in (other, same_folder):
        with pytest.raises(UsageError, match="another evaluation"):
            one.read(0)


def test_damaged_files_are_refused_and_may_be_deleted(files):
    files.write(0, STATE)
    files.write(1, STATE)
    chunk, key = files.folder / "chunk-00000.json", files.folder / "key.json"
    whole, attack = json.loads(chunk.read_text()), STATE["attacks"][0]
    for content in (
        *(chunk.read_bytes()[:length] for length in (0, 1, 20, -3)),
        b"\xff\xfe\x00{",
        *(json.dumps(value).encode() for value in ([], 3, {}, {"schema": 0, "chunk": 0}, {"schema": 1, "chunk": 1})),
        *(
            json.dumps({**whole, **change}).encode()
            for change in (
                {"schema": 99},
                {"clean": None},
                {"attacks": None},
                {"attacks": [{name: value for name, value in attack.items() if name != "broken"}]},
                {"attacks": [{**attack, "broken": [99]}]},
                {"attacks": [{**attack, "answers": []}]},
                {"attacks": [{**attack, "answers": 0.5}]},
                {"attacks": [{**attack, "largest": None}]},
                {"attacks": [{**attack, "answers": [1]}]},
                {"clean": [{}, 0]},
            )
        ),
    ):
        chunk.write_bytes(content)
        with pytest.raises(UsageError, match=r"chunk-00000\.json.*delete"):
            files.read(0)
    assert files.read(1)["clean"] == STATE["clean"]
    for text in ("", "{", '{"model": "ab', "[]", "null", "\x00\x01", '"key"'):
        key.write_text(text)
        with pytest.raises(UsageError, match=r"key\.json.*delete") as error:
            files.open()
        assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # numpy does not close a file that it cannot read
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_truncated_images_are_refused(files):
    files.write_images(0, "fab-t", {0: np.zeros((1, 3, 3), np.float32)})
    file = files.folder / "images-00000-fab-t.npz"
    content = file.read_bytes()
    for length in (0, 10, -10):
        file.write_bytes(content[:length])
        with pytest.raises(UsageError, match=rf"{file.name}.*delete"):
            files.read_images(0, "fab-t")
    gc.collect()


def unwritable(*arguments, **options):
    raise PermissionError(13, "Permission denied")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, files, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for below in ("", "state", "state/deeper"):
        with pytest.raises(UsageError, match=r"cannot be written: .*choose another"):
            ChunkFiles(tmp_path / "file" / below, KEY).open()
    assert (tmp_path / "file").read_text() == "mine"
    monkeypatch.setattr(Path, "write_bytes", unwritable)
    monkeypatch.setattr(np, "savez", unwritable)
    for call in (
        lambda: ChunkFiles(tmp_path / "new", KEY).open(),
        lambda: files.write(1, STATE),
        lambda: files.write_images(1, "square", {0: np.zeros(1)}),
    ):
        with pytest.raises(UsageError, match=r"Permission denied.*choose another folder"):
            call()


def test_a_write_that_fails_leaves_the_earlier_state(files, monkeypatch):
    files.write(0, {"clean": [1], "attacks": []})
    before = contents(files.folder)
    for failing in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, unwritable)
            with pytest.raises((OSError, UsageError)):
                files.write(0, STATE)
        assert contents(files.folder) == before

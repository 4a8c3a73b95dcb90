import gc
import json
import os

import numpy as np
import pytest

from doubly.errors import UsageError
from doubly.evaluation.autoattack.state import Chunks

KEY = {"model": "abc", "epsilon": 8 / 255, "norm": "Linf", "chunk": 250, "parts": ["apgd-ce"], "compiled": False}
OUTCOME = {"name": "apgd-ce", "broken": [0], "answers": [2], "made": 1, "largest": 1.0, "outside": 0}
FOUND = {"clean": [1, 0], "attacks": [{**OUTCOME, "warnings": [], "seconds": 0.5}]}


@pytest.fixture
def chunks(tmp_path):
    made = Chunks(tmp_path / "deep" / "state", KEY)
    made.open()
    return made


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_is_read(chunks):
    assert chunks.read(3) is None
    chunks.write(3, FOUND)
    again = Chunks(chunks.folder, dict(reversed(KEY.items())))
    again.open()
    found = again.read(3)
    assert {name: found[name] for name in FOUND} == FOUND
    assert again.read(4) is None


def test_a_later_state_takes_the_place_of_an_earlier_one_and_nothing_else_is_left(chunks):
    chunks.write(0, {"clean": [], "attacks": []})
    chunks.write(0, FOUND)
    assert chunks.read(0)["attacks"] == FOUND["attacks"]
    assert sorted(files(chunks.folder)) == ["chunk-00000.json", "key.json"]


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chunks = Chunks(None, KEY)
    chunks.open()
    chunks.write(0, FOUND)
    chunks.write_images(0, "square", {1: np.zeros((1, 2, 2))})
    assert chunks.read(0) is None and chunks.read_images(0, "square") == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model": "xyz"}, ["model is abc", "here it is xyz"]),
        ({"epsilon": 0.1}, ["epsilon is 0.03", "here it is 0.1"]),
        ({"norm": "L2"}, ["norm is Linf"]),
        ({"chunk": 100}, ["chunk is 250"]),
        ({"parts": ["square"]}, ["parts is ['apgd-ce']"]),
        ({"compiled": True}, ["compiled is False"]),
        ({"new": 1}, ["new is None"]),
    ],
)
def test_the_state_of_another_evaluation_is_refused_and_kept(other, words, chunks):
    chunks.write(0, FOUND)
    before = files(chunks.folder)
    with pytest.raises(UsageError) as problem:
        Chunks(chunks.folder, {**KEY, **other}).open()
    text = str(problem.value)
    assert all(word in text for word in [*words, "another folder", "delete"]) and "\n" not in text
    assert files(chunks.folder) == before


def test_a_key_with_more_in_it_is_another_evaluation(chunks):
    with pytest.raises(UsageError, match="compiled is False, here it is None"):
        Chunks(chunks.folder, {name: value for name, value in KEY.items() if name != "compiled"}).open()


@pytest.mark.parametrize("text", ["", "{", '{"model": "ab', "[]", "null", "\x00\x01", '"key"'])
def test_a_garbled_key_is_a_sentence(text, chunks):
    (chunks.folder / "key.json").write_text(text)
    with pytest.raises(UsageError, match=r"key\.json.*delete") as problem:
        chunks.open()
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("length", [0, 1, 20, -3])
def test_a_truncated_state_is_a_sentence_and_the_others_stay(length, chunks):
    chunks.write(0, FOUND)
    chunks.write(1, FOUND)
    file = chunks.folder / "chunk-00000.json"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UsageError, match=r"chunk-00000\.json.*delete"):
        chunks.read(0)
    assert chunks.read(1)["clean"] == FOUND["clean"]


@pytest.mark.parametrize(
    "content",
    [[], 3, {}, {"schema": 0, "chunk": 0}, {"schema": 1, "chunk": 1}, {"schema": 99, "chunk": 0, **FOUND}],
)
def test_a_state_that_is_none_is_a_sentence(content, chunks):
    (chunks.folder / "chunk-00000.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"chunk-00000\.json.*delete it"):
        chunks.read(0)


def test_bytes_that_are_no_text_are_a_sentence(chunks):
    (chunks.folder / "chunk-00000.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(UsageError, match=r"chunk-00000\.json.*delete"):
        chunks.read(0)


@pytest.mark.parametrize("below", ["", "state", "state/deeper"])
def test_a_folder_that_cannot_be_is_a_sentence(below, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=r"cannot hold the state.*choose another folder"):
        Chunks(tmp_path / "file" / below, KEY).open()
    assert (tmp_path / "file").read_text() == "mine"


def unwritable(*arguments, **options):
    raise PermissionError(13, "Permission denied")


def test_a_folder_that_may_not_be_written_to_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("doubly.evaluation.autoattack.state.write_json", unwritable)
    with pytest.raises(UsageError, match=r"Permission denied.*choose another folder"):
        Chunks(tmp_path, KEY).open()


@pytest.mark.parametrize("images", [False, True])
def test_a_folder_that_may_no_longer_be_written_to_is_a_sentence(images, chunks, monkeypatch):
    chunks.write(0, FOUND)
    chunks.open()
    monkeypatch.setattr("doubly.evaluation.autoattack.state.write_json", unwritable)
    monkeypatch.setattr(np, "savez", unwritable)
    with pytest.raises(UsageError, match="Permission denied"):
        if images:
            chunks.write_images(1, "square", {0: np.zeros(1)})
        else:
            chunks.write(1, FOUND)


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_earlier_state_whole(failing, chunks, monkeypatch):
    chunks.write(0, {"clean": [1], "attacks": []})
    before = files(chunks.folder)
    monkeypatch.setattr(os, failing, unwritable)
    with pytest.raises((OSError, UsageError)):
        chunks.write(0, FOUND)
    assert files(chunks.folder) == before


def test_images_come_back_bit_for_bit(chunks):
    images = {5: np.random.default_rng(0).random((1, 3, 3), dtype=np.float32), 2: np.zeros((1, 3, 3), np.float32)}
    chunks.write_images(0, "fab-t", images)
    found = chunks.read_images(0, "fab-t")
    assert list(found) == [5, 2] and all(np.array_equal(found[row], images[row]) for row in images)
    assert chunks.read_images(0, "square") == {} == chunks.read_images(1, "fab-t")
    assert not any(name.startswith(".") for name in files(chunks.folder))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # numpy leaves the file open that it cannot read
@pytest.mark.parametrize("length", [0, 10, -10])
def test_truncated_images_are_a_sentence(length, chunks):
    chunks.write_images(0, "fab-t", {0: np.zeros((1, 3, 3), np.float32)})
    file = chunks.folder / "images-00000-fab-t.npz"
    file.write_bytes(file.read_bytes()[:length])
    try:
        chunks.read_images(0, "fab-t")
        problem = ""
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    gc.collect()
    assert problem.startswith("UsageError") and file.name in problem and "delete" in problem


@pytest.mark.parametrize("way", ["the key is gone", "the file is copied"])
def test_a_chunk_of_another_evaluation_is_refused(way, chunks, tmp_path):
    """A garbled key is to be deleted, says its message; the chunks beside it may be anybody's."""
    chunks.write(0, FOUND)
    other = Chunks(tmp_path / "other" if way == "the file is copied" else chunks.folder, {**KEY, "epsilon": 0.1})
    if way == "the file is copied":
        other.open()
        (other.folder / "chunk-00000.json").write_bytes((chunks.folder / "chunk-00000.json").read_bytes())
    else:
        (chunks.folder / "key.json").unlink()
    with pytest.raises(UsageError, match="another evaluation"):
        other.open()
        other.read(0)

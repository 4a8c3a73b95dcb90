"""Whatever the moment at which the process dies, a whole checkpoint stands: the old one or the new one."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from doubly.checkpoints.files import SCHEMA, find, load, save
from doubly.errors import UsageError
from doubly.rundir import read_json, sha256, write_json

WATCHED = [
    (safetensors.torch, "save_file"),
    (os, "fsync"),
    (os, "replace"),
    (Path, "mkdir"),
    (Path, "rename"),
    (shutil, "rmtree"),
]


class Crash(BaseException):
    pass


def write(folder, number):
    """Checkpoint `number`: every part of it says which one it is."""
    tensors = {"model": {"w": torch.full((3, 2), float(number))}, "state": {"n": torch.tensor(number)}}
    save(folder, "last", tensors, {"epoch": number})


def standing(folder):
    """The number of the checkpoint that stands; all its parts agree."""
    tensors, info = load(find(folder, "last"))
    numbers = {info["epoch"], tensors["state"]["n"].item(), *tensors["model"]["w"].flatten().tolist()}
    assert len(numbers) == 1
    return numbers.pop()


def count_moments(patch, die=None, moment=None):
    """Number the instants before and after every call that touches the disk; die at one of them."""
    seen = []

    def tick():
        seen.append(None)
        if len(seen) - 1 == moment:
            die()

    def watched(original):
        def call(*arguments, **options):
            tick()
            result = original(*arguments, **options)
            tick()
            return result

        return call

    for owner, name in WATCHED:
        patch.setattr(owner, name, watched(getattr(owner, name)))
    return seen


def moments(folder):
    write(folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        seen = count_moments(patch)
        write(folder, 2)
    assert standing(folder) == 2
    return len(seen)


def test_an_error_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    def die():
        raise Crash

    outcomes = []
    for moment in range(moments(tmp_path / "count")):
        folder = tmp_path / str(moment)
        write(folder, 1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            count_moments(patch, die, moment)
            write(folder, 2)
        outcomes.append(standing(folder))
        write(folder, 3)
        assert standing(folder) == 3 and [p.name for p in folder.iterdir()] == ["last"]
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}


DYING = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import pytest, test_checkpoint as t

folder = Path(sys.argv[1])
for moment in range(t.moments(folder / "count")):
    t.write(folder / str(moment), 1)
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            t.count_moments(patch, lambda: os._exit(9), moment)
            t.write(folder / str(moment), 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    print(t.standing(folder / str(moment)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_vanishes_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    command = [sys.executable, "-c", DYING, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split()
    assert len(outcomes) > 20 and outcomes == sorted(outcomes) and set(outcomes) == {"1", "2"}


@pytest.mark.parametrize("group", ["model", "state"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, group):
    write(tmp_path, 1)
    original = safetensors.torch.save_file

    def full(tensors, file, *rest):
        if file.stem == group:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, file, *rest)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    assert standing(tmp_path) == 1
    monkeypatch.undo()
    write(tmp_path, 3)
    assert standing(tmp_path) == 3 and [p.name for p in tmp_path.iterdir()] == ["last"]


def test_a_first_checkpoint_that_was_cut_does_not_count(tmp_path, monkeypatch):
    def die(*_):
        raise Crash

    monkeypatch.setattr(safetensors.torch, "save_file", die)
    with pytest.raises(Crash):
        write(tmp_path, 1)
    assert find(tmp_path, "last") is None


def test_tensors_come_back_to_the_bit(tmp_path, same_bits):
    shared = torch.rand(4, 5)
    tensors = {
        "double": torch.tensor([1 / 3, 5e-324, float("inf")], dtype=torch.float64),
        "scalar": torch.tensor(7),
        "half": torch.rand(3).bfloat16(),
        "empty": torch.empty(0, 2),
        "transposed": shared.T,
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "tied": shared,
        "tied too": shared,
        "parameter": torch.nn.Parameter(torch.rand(2)),
    }
    save(tmp_path, "last", {"model": tensors, "state": {}}, {"third": 1 / 3, "best": None})
    found, info = load(tmp_path / "last")
    assert same_bits(found["model"], {name: tensor.detach() for name, tensor in tensors.items()})
    assert found["state"] == {} and info["third"] == 1 / 3 and info["best"] is None


def damage(file, how):
    data = file.read_bytes()
    if how == "removed":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        file.write_bytes(b"")
    else:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["removed", "cut", "emptied", "one bit"])
def test_damage_is_noticed_and_named(tmp_path, name, how):
    write(tmp_path, 1)
    if (name, how) == ("state.json", "one bit"):  # its last byte is a line break
        text = (tmp_path / "last" / name).read_text()
        (tmp_path / "last" / name).write_text(text.replace('"checksums"', '"checksumz"'))
    else:
        damage(tmp_path / "last" / name, how)
    with pytest.raises(UsageError) as problem:
        load(find(tmp_path, "last"))
    assert str(tmp_path / "last") in str(problem.value) and "\n" not in str(problem.value)


def test_a_file_that_is_no_safetensors_is_named_even_with_its_checksum(tmp_path):
    write(tmp_path, 1)
    path = tmp_path / "last"
    (path / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n.")
    info = read_json(path / "state.json")
    write_json(path / "state.json", info | {"checksums": {"model.safetensors": sha256(path / "model.safetensors")}})
    with pytest.raises(UsageError, match=r"damaged \(model\.safetensors"):
        load(path)


@pytest.mark.parametrize("content", [{}, [], 3, {"checksums": []}, {"step": 7, "optimizer": "adam"}])
def test_a_foreign_directory_is_no_checkpoint(tmp_path, content):
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "state.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="no checkpoint of doubly"):
        load(find(tmp_path, "last"))


def test_a_newer_schema_says_who_can_read_it(tmp_path):
    write(tmp_path, 1)
    file = tmp_path / "last" / "state.json"
    write_json(file, read_json(file) | {"schema": SCHEMA + 1})
    with pytest.raises(UsageError, match=f"schema {SCHEMA + 1}, this version reads {SCHEMA}"):
        load(tmp_path / "last")


def test_checksums_cannot_lead_out_of_the_directory(tmp_path):
    write(tmp_path, 1)
    secret = tmp_path / "secret.safetensors"
    safetensors.torch.save_file({"key": torch.ones(1)}, secret)
    file = tmp_path / "last" / "state.json"
    write_json(file, read_json(file) | {"checksums": {"../secret.safetensors": sha256(secret)}})
    with pytest.raises(UsageError, match="damaged"):
        load(tmp_path / "last")

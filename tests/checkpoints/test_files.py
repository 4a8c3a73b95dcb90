"""Whenever the process dies, there is a complete checkpoint: the old one or the new one."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from doubly.checkpoints.files import (
    SCHEMA,
    SEAL,
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    load_checkpoint_or_previous,
    save_checkpoint,
    seal_checkpoint,
)
from doubly.errors import UsageError
from doubly.rundir import read_json, sha256, write_json

COUNTED = [
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
    """Save checkpoint `number`; every part of it holds the number."""
    tensors = {"model": {"w": torch.full((3, 2), float(number))}, "state": {"n": torch.tensor(number)}}
    save_checkpoint(folder, "last", Checkpoint(tensors, {"epoch": number}))


def saved_number(folder):
    """Return the number of the checkpoint that is found; all its parts hold the same."""
    tensors, info = load_checkpoint(find_checkpoint(folder, "last"))
    numbers = {info["epoch"], tensors["state"]["n"].item(), *tensors["model"]["w"].flatten().tolist()}
    assert len(numbers) == 1
    return numbers.pop()


def count_moments(patch, die=None, moment=None):
    """Count the moments before and after every call that touches the disk; die at one of them."""
    ticks = []

    def tick():
        ticks.append(None)
        if len(ticks) - 1 == moment:
            die()

    def counted(original):
        def call(*arguments, **options):
            tick()
            result = original(*arguments, **options)
            tick()
            return result

        return call

    for owner, name in COUNTED:
        patch.setattr(owner, name, counted(getattr(owner, name)))
    return ticks


def moments(folder):
    write(folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        ticks = count_moments(patch)
        write(folder, 2)
    assert saved_number(folder) == 2
    return len(ticks)


def test_an_error_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    def die():
        raise Crash

    outcomes = []
    for moment in range(moments(tmp_path / "count")):
        folder = tmp_path / str(moment)
        write(folder, 1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            count_moments(patch, die, moment)
            write(folder, 2)
        outcomes.append(saved_number(folder))
        write(folder, 3)
        assert saved_number(folder) == 3 and [p.name for p in folder.iterdir()] == ["last"]
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}


DYING = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import pytest, test_files as t

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
    print(t.saved_number(folder / str(moment)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    command = [sys.executable, "-c", DYING, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split()
    assert len(outcomes) > 20 and outcomes == sorted(outcomes) and set(outcomes) == {"1", "2"}


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    original = safetensors.torch.save_file
    for group in ("model", "state"):
        folder = tmp_path / group
        write(folder, 1)

        def full(tensors, file, *rest, group=group):
            if file.stem == group:
                file.write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            original(tensors, file, *rest)

        monkeypatch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            write(folder, 2)
        assert saved_number(folder) == 1
        monkeypatch.undo()
        write(folder, 3)
        assert saved_number(folder) == 3 and [p.name for p in folder.iterdir()] == ["last"]


def test_a_first_checkpoint_that_was_interrupted_is_not_found(tmp_path, monkeypatch):
    def die(*_):
        raise Crash

    monkeypatch.setattr(safetensors.torch, "save_file", die)
    with pytest.raises(Crash):
        write(tmp_path, 1)
    assert find_checkpoint(tmp_path, "last") is None


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
    save_checkpoint(tmp_path, "last", Checkpoint({"model": tensors, "state": {}}, {"third": 1 / 3, "best": None}))
    loaded, info = load_checkpoint(tmp_path / "last")
    assert same_bits(loaded["model"], {name: tensor.detach() for name, tensor in tensors.items()})
    assert loaded["state"] == {} and info["third"] == 1 / 3 and info["best"] is None


def damage(file, kind):
    data = file.read_bytes()
    if kind == "removed":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif kind == "emptied":
        file.write_bytes(b"")
    elif file.suffix == ".json":  # its last byte is a line break
        file.write_bytes(data.replace(b'"checksums"', b'"checksumz"'))
    else:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_damage_is_noticed_and_named(tmp_path):
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        for kind in ("removed", "cut", "emptied", "one bit"):
            folder = tmp_path / name / kind
            folder.mkdir(parents=True)
            write(folder, 1)
            damage(folder / "last" / name, kind)
            with pytest.raises(UsageError) as error:
                load_checkpoint(find_checkpoint(folder, "last"))
            assert str(folder / "last") in str(error.value) and "\n" not in str(error.value)


def test_any_changed_byte_of_the_small_files_is_noticed(tmp_path):
    write(tmp_path, 1)
    path = tmp_path / "last"
    for name in ("state.json", SEAL):
        file = path / name
        data = file.read_bytes()
        for position in range(len(data)):
            file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            with pytest.raises(UsageError):
                load_checkpoint(path)
        file.write_bytes(data)
    load_checkpoint(path)


def test_the_checkpoint_before_a_damaged_one_is_taken_where_it_stands(tmp_path):
    write(tmp_path, 1)
    assert load_checkpoint_or_previous(tmp_path, "best") is None
    shutil.copytree(tmp_path / "last", tmp_path / ".last.previous")
    before = load_checkpoint(tmp_path / ".last.previous").info
    (tmp_path / "last" / "state.json").write_text("{}")
    path, checkpoint, damage = load_checkpoint_or_previous(tmp_path, "last")
    assert path.name == ".last.previous" and checkpoint.info == before and "checksums" in damage
    shutil.rmtree(path)
    with pytest.raises(UsageError, match="checksums"):
        load_checkpoint_or_previous(tmp_path, "last")


def test_files_of_others_are_refused(tmp_path):
    write(tmp_path, 1)
    path = tmp_path / "last"
    state, info = path / "state.json", read_json(path / "state.json")
    secret = tmp_path / "secret.safetensors"
    safetensors.torch.save_file({"key": torch.ones(1)}, secret)
    (path / "pickle.safetensors").write_bytes(b"\x80\x04cos\nsystem\n.")
    pickled = {"checksums": {"pickle.safetensors": sha256(path / "pickle.safetensors")}}
    for content, message in [
        *((other, "no checkpoint of doubly") for other in ({}, [], 3, {"checksums": []}, {"optimizer": "adam"})),
        ({**info, "schema": SCHEMA + 1}, f"schema {SCHEMA + 1}, this version reads {SCHEMA}"),
        ({**info, **pickled}, r"damaged \(pickle\.safetensors"),  # even with its checksum
        ({**info, "checksums": {"../secret.safetensors": sha256(secret)}}, "damaged"),  # outside of the directory
    ]:
        write_json(state, content)
        seal_checkpoint(path)
        with pytest.raises(UsageError, match=message):
            load_checkpoint(path)

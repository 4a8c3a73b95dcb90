"""Hostile data and weights: damaged originals, bombs, and pickles that would leave a mark if they were executed."""

import gzip
import io
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from tests.chaos.damage import damage_bytes, damage_npz
from tests.chaos.outcomes import Outcome, judge_call
from torch import nn

import dataset_writers as write
from doubly import reading
from doubly.data import DATASETS, ImageFolder, load_splits
from doubly.data.config import Data
from doubly.data.download.unpack import unpack
from doubly.data.sources.arrays import Arrays
from doubly.models.weights import load_weights

CANARY = Path("executed")
BOUND, BOMB = 2**20, 2**22  # bytes that may always be unpacked here, and what a bomb declares or becomes


class Trap:
    """Unpickling it leaves a mark."""

    def __init__(self, draw: random.Random) -> None:
        path = str(CANARY.absolute())
        self.call = draw.choice(((open, (path, "w")), (os.mkdir, (path,)), (exec, (f"open({path!r}, 'w')",))))

    def __reduce__(self) -> Any:
        return self.call


def hostile_data(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Damage a file of a dataset, an archive or weights, or replace it by a bomb or a trap, and read it."""
    draw, root = random.Random(seed), Path("root")
    reading.MAX_UNPACKED_BYTES = BOUND
    originals = Path("originals")
    write_originals(originals)
    for _ in range(count):
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree("unpacked", ignore_errors=True)
        name = draw.choice(sorted(os.listdir(originals)))
        shutil.copytree(originals / name, root)
        file = draw.choice(sorted(path for path in root.rglob("*") if path.is_file()))
        what = _spoil(file, draw)
        outcome, _ = judge_call(_reader(name, root, file), f"{name}, {file.name}: {what}")
        for mark in (CANARY, Path("outside"), Path("../outside")):  # the others: archives that write elsewhere
            if mark.exists():
                outcome = Outcome("executed", f"{name}, {file.name}: {what}: {mark}")
                mark.rmdir() if mark.is_dir() else mark.unlink()
        yield outcome


def _reader(name: str, root: Path, file: Path) -> Callable[[], object]:
    if name == "weights":
        return lambda: load_weights(network(), file)
    if name == "archives":
        Path("unpacked").mkdir()
        return lambda: unpack(
            file, Path("unpacked"), Path("unpacked") / ("folder" if "tar" in file.name else "data.npz")
        )
    sources = {"arrays": Arrays("data.npz"), "safetensors": Arrays("data.safetensors"), "folder": ImageFolder("images")}
    source = sources.get(name) or DATASETS[name]()
    return lambda: load_splits(Data(source), root)


def _spoil(file: Path, draw: random.Random) -> str:
    kind = draw.choice(("bytes", "bytes", "bytes", "values", "pickle", "bomb", "other"))
    content = file.read_bytes()
    if kind == "values" and file.suffix == ".npz":
        content, kind = damage_npz(content, draw)
    elif kind == "values" and file.suffix == ".gz" and "idx" in file.name:
        inner, kind = damage_bytes(gzip.decompress(content)[:64], draw)
        content = gzip.compress(inner + gzip.decompress(content)[64:])
    elif kind == "pickle":
        content, kind = _trap(draw)
    elif kind == "bomb":
        content, kind = draw.choice(BOMBS)(), "bomb"
    elif kind == "other":
        content = draw.choice((b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"MATLAB 5.0", b"\x80\x04.", b"{}", b"\x1f\x8b"))
        content += draw.randbytes(draw.randrange(200))
    else:
        content, kind = damage_bytes(content, draw)
    file.write_bytes(content)
    return kind


def _trap(draw: random.Random) -> tuple[bytes, str]:
    """Return a file that executes something in a reader that trusts it."""
    trap: Any = draw.choice((Trap, lambda d: {"data": Trap(d)}, lambda d: [Trap(d)] * 3, lambda d: {Trap(d): 1}))(draw)
    stream, kind = io.BytesIO(), draw.choice(("pickle", "torch", "torch before 1.6", "npz", "npy"))
    if kind == "pickle":
        stream.write(pickle.dumps(trap, protocol=draw.randrange(6)))
    elif kind == "npy":
        np.save(stream, np.array([trap], dtype=object), allow_pickle=True)
    elif kind == "npz":
        values = np.array([trap, 1], dtype=object)
        np.savez(stream, **dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), values))
    else:
        torch.save({"1.weight": trap}, stream, _use_new_zipfile_serialization=kind == "torch")
    return stream.getvalue(), f"trap in {kind}"


def _zip_bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x_train.npy", "archive/data.pkl", "../../outside"):
            archive.writestr(name, bytes(BOMB))
    return stream.getvalue()


def _tar_bomb() -> bytes:
    member = tarfile.TarInfo("../outside")
    member.size = BOMB
    return gzip.compress(member.tobuf() + bytes(BOMB), 1)


def _idx_bomb() -> bytes:
    return gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**20, 2**10, 2**10) + bytes(BOMB), 1)


def _image_bomb() -> bytes:
    stream = io.BytesIO()
    Image.new("L", (30_000, 1000)).save(stream, "PNG")
    return stream.getvalue()


def _header_bomb() -> bytes:
    head = b'{"1.weight": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}'
    return struct.pack("<Q", len(head)) + head


BOMBS = (_zip_bomb, _tar_bomb, _idx_bomb, _image_bomb, _header_bomb, lambda: gzip.compress(bytes(BOMB)))


def network() -> nn.Module:
    """Return the network that weights are read into."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def write_originals(folder: Path) -> None:
    """Write a small valid copy of every format, each in a folder of its own."""
    small, color, large = (1, 28, 28), (3, 32, 32), (3, 96, 96)
    write.cifar10_python(folder / "cifar10", [write.part(k, 10) for k in range(5)], write.part(9, 10))
    write.cifar100_python(folder / "cifar100", write.part(0, 50, color, 100), write.part(1, 50, color, 100))
    write.svhn(folder / "svhn", write.part(0, 20), write.part(1, 10))
    write.stl10(folder / "stl10", write.part(0, 20, large), write.part(1, 10, large))
    write.mnist(folder / "mnist", write.part(0, 20, small), write.part(1, 10, small))
    frames = [write.sign(k, k % 43, k // 43) for k in range(43)]
    write.gtsrb_mirror(folder / "gtsrb", frames, frames[:5])
    (x, y), (x_test, y_test) = write.part(0, 20), write.part(1, 10)
    arrays = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}
    for name in ("arrays", "safetensors", "weights", "archives"):
        (folder / name).mkdir()
    np.savez(folder / "arrays" / "data.npz", **arrays)
    tensors = {name: torch.as_tensor(value) for name, value in arrays.items()}
    safetensors.torch.save_file(tensors, folder / "safetensors" / "data.safetensors")
    safetensors.torch.save_file(network().state_dict(), folder / "weights" / "net.safetensors")
    torch.save(network().state_dict(), folder / "weights" / "net.pt")
    torch.save(network().state_dict(), folder / "weights" / "old.pt", _use_new_zipfile_serialization=False)
    for number in range(8):
        place = folder / "folder" / "images" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[number].transpose(1, 2, 0)).save(place / f"{number}.{'png' if number % 4 else 'jpg'}")
    with tarfile.open(folder / "archives" / "data.tar.gz", "w:gz") as archive:
        archive.add(folder / "folder", "folder")
    with zipfile.ZipFile(folder / "archives" / "data.zip", "w") as zipped:
        zipped.write(folder / "arrays" / "data.npz", "data.npz")

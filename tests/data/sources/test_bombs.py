"""Small files that declare gigabytes, and matrices of other kinds: a sentence, before anything is unpacked."""

import gzip
import io
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import csc_matrix

from doubly import reading
from doubly.data.download.unpack import unpack
from doubly.data.sources.arrays import Arrays
from doubly.data.sources.mnist import MNIST
from doubly.data.sources.svhn import SVHN
from doubly.errors import UsageError

SIZE = 2**23  # of a bomb; the bound is 2**20 here, and 2**28 elsewhere
ZEROS = bytes(SIZE)


def mat(count, inner=14, name=b"X", kind=9, data=SIZE):
    """Return a MATLAB file with one compressed matrix of zeros."""
    flags, shape = struct.pack("<4I", 6, 8, kind, 0), struct.pack("<2I4i", 5, 16, 32, 32, 3, SIZE // 3072)
    label = struct.pack("<2I", 1 | len(name) << 16, int.from_bytes(name, "little"))
    begin, tag = struct.pack("<2I", inner, count), struct.pack("<2I", 2, data)
    packed = zlib.compress(begin + flags + shape + label + tag + ZEROS)
    return b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + struct.pack("<2I", 15, len(packed)) + packed


def tar(kind=tarfile.REGTYPE, size=SIZE, behind=ZEROS):
    member = tarfile.TarInfo("goal/file")
    member.size, member.type = size, kind
    return gzip.compress(member.tobuf() + behind, 1)


def zipped(name="goal/file"):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, ZEROS)
    return stream.getvalue()


def idx(*shape):
    return gzip.compress(bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + ZEROS, 1)


def test_files_that_would_fill_memory_or_disk_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_UNPACKED_BYTES", 2**20)
    svhn, mnist = "svhn/train_32x32.mat", "mnist/train-images-idx3-ubyte.gz"
    too_large = "would become .*nothing was unpacked"
    sources = {"a.npz": Arrays("a.npz"), svhn: SVHN(), mnist: MNIST()}
    for number, (file, content, sentence) in enumerate([
        ("a.npz", zipped("x_train.npy"), too_large),
        (mnist, idx(SIZE // 784, 28, 28), too_large),
        (mnist, idx(10, 28, 28), "truncated: its header says"),  # more than it declares, of which one byte is read
        (svhn, mat(SIZE), too_large),
        (svhn, mat(0), too_large),  # the matrix declares nothing, its data do
        (svhn, mat(100, name=b"X", kind=5), "X is sparse"),
        (svhn, mat(100, inner=1), "damaged"),
        (svhn, mat(100)[:200], "damaged"),
        (svhn, b"MATLAB 5.0".ljust(200), "not of version 5"),
        ("a.zip", zipped(), too_large),
        ("a.tar.gz", tar(), too_large),
        ("b.tar.gz", tar(tarfile.XHDTYPE), "more than a header can hold"),
        ("c.tar.gz", tar(tarfile.GNUTYPE_LONGNAME), "more than a header can hold"),
        ("d.tar.gz", tar(size=0), too_large),  # zeros behind the end
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_bytes(content)
        for other in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            (folder / "mnist").mkdir(exist_ok=True)
            (folder / "mnist" / f"{other}-ubyte.gz").touch()
        (folder / "svhn").mkdir(exist_ok=True)
        (folder / "svhn" / "test_32x32.mat").touch()
        with pytest.raises(UsageError, match=sentence) as refusal:
            if file in sources:
                sources[file].load(folder)
            else:
                unpack(folder / file, folder, folder / "goal")
        assert (folder / file).name in str(refusal.value), file
        assert not (folder / "goal").exists()


def test_matrices_of_other_kinds_are_refused(tmp_path):
    x, y = np.zeros((32, 32, 3, 4), np.uint8), np.ones((4, 1), np.uint8)
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "test_32x32.mat").touch()
    for change in ({"y": csc_matrix(y.astype(float))}, {"y": y * 1j}, {"y": {"a": 1}}, {"X": np.array(["x"])}):
        for compressed in (False, True):
            file = tmp_path / "svhn" / "train_32x32.mat"
            savemat(file, {"X": x, "y": y, **change}, do_compression=compressed)
            name = next(iter(change))
            with pytest.raises(UsageError, match=rf"train_32x32.*{name} is sparse, complex, or no matrix"):
                SVHN().load(tmp_path)

"""MATLAB files (version 5), checked before scipy unpacks them: what their headers declare must fit the file."""

import struct
import zlib
from pathlib import Path
from typing import IO, Any

from doubly.reading import check_unpacked_size

HEADER, MATRIX, COMPRESSED = 128, 14, 15  # bytes of the file's header; types of its elements
NUMERIC = range(6, 16)  # classes of matrices that hold plain numbers
COMPLEX = 0x0800  # flag of a matrix
MAX_HEAD = 2**16  # bytes of an element in which its flags, shape and name must lie


def read_matrices(path: Path, names: list[str]) -> dict[str, Any]:
    """Return the named matrices of a file.

    Raises:
        UsageError: If one would become very much larger when it is unpacked.
        ValueError: If the file is no MATLAB file of version 5, is damaged, or one is sparse, a struct or the like.
    """
    from scipy.io import loadmat

    with path.open("rb") as file:
        _check(path, file, names)
    matrices: dict[str, Any] = loadmat(path, variable_names=names)
    return matrices


def _check(path: Path, file: IO[bytes], names: list[str]) -> None:
    header, size = file.read(HEADER), path.stat().st_size
    order = {b"IM": "<", b"MI": ">"}.get(header[126:128])
    if order is None:
        raise ValueError("it is not of version 5")
    while len(tag := file.read(8)) == 8:
        kind, count = struct.unpack(f"{order}2I", tag)
        start = file.tell()
        if kind not in (MATRIX, COMPRESSED) or start + count > size:
            raise ValueError("it is damaged or truncated")
        head = file.read(min(count, MAX_HEAD))
        if kind == COMPRESSED:
            head = zlib.decompressobj().decompress(head, MAX_HEAD)
            inner, declared = struct.unpack(f"{order}2I", head[:8])
            if inner != MATRIX:
                raise ValueError("it is damaged")
            check_unpacked_size(path, declared, count)
            head = head[8:]
        _check_matrix(path, head, order, names, count)
        file.seek(start + count)


def _check_matrix(path: Path, head: bytes, order: str, names: list[str], packed: int) -> None:
    """Check the matrix whose flags, shape, name and first data begin at `head`, if it is one that is wanted."""
    flags, head = _element(head, order)
    _, head = _element(head, order)
    name, head = _element(head, order)
    if name.decode("latin1") not in names:
        return
    flag = struct.unpack(f"{order}I", flags[:4])[0]
    if flag & 0xFF not in NUMERIC or flag & COMPLEX:
        raise ValueError(f"{name.decode('latin1')} is sparse, complex, or no matrix of numbers")
    kind, count = struct.unpack(f"{order}2I", head[:8])
    if not kind >> 16:  # else the few bytes stand in the tag
        check_unpacked_size(path, count, packed)


def _element(head: bytes, order: str) -> tuple[bytes, bytes]:
    """Return the content of the first element, and what follows."""
    if len(head) < 8:
        raise ValueError("it is damaged")
    kind, count = struct.unpack(f"{order}2I", head[:8])
    if kind >> 16:
        return head[4 : 4 + min(4, kind >> 16)], head[8:]
    end = 8 + -(-count // 8) * 8
    if end > len(head):
        raise ValueError("it is damaged")
    return head[8 : 8 + count], head[end:]

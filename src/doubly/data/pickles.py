"""CIFAR's python batches, which are pickles, read without executing any: the three things of numpy that they name are
stood in for by classes of our own, every other name is refused, and the array is made from its bytes afterwards.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from doubly.errors import UsageError


def read_batch(path: Path) -> dict[str, Any]:
    """The dictionary of a batch: byte strings, lists of them or of integers, and uint8 arrays."""

    class Array:
        state: Any = None

        def __setstate__(self, state: Any) -> None:
            self.state = state

    class Dtype:
        def __init__(self, code: Any = None, *_: Any) -> None:
            self.code = code

        def __setstate__(self, state: Any) -> None:
            pass  # byte order and the like: one byte has none

    def reconstruct(*_: Any) -> Array:
        return Array()

    stand_ins: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Dtype,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,  # its name where numpy 2 has written the file
    }  # made anew for each file: a pickle can set attributes of what it names

    class Batch(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in stand_ins:
                named = f"{module}.{name}".encode("unicode_escape").decode("ascii")
                raise UsageError(
                    f"{path} names {named}, which no CIFAR batch contains: nothing was executed; "
                    "do not trust this file, and fetch it anew"
                )
            return stand_ins[module, name]

    def value(found: Any) -> Any:
        if not isinstance(found, Array):
            return found
        _, shape, dtype, fortran, raw = found.state
        if not isinstance(dtype, Dtype) or dtype.code not in (b"u1", "u1"):
            raise ValueError("an array in it is not of bytes")
        pixels = np.frombuffer(raw, np.uint8)
        return pixels.reshape(shape, order="F" if fortran else "C")

    with path.open("rb") as file:
        found = Batch(file, encoding="bytes").load()
    if not isinstance(found, dict):
        raise ValueError("it holds no dictionary")
    return {_text(key): value(item) for key, item in found.items()}


def _text(word: Any) -> str:
    return word.decode("latin1") if isinstance(word, bytes) else str(word)

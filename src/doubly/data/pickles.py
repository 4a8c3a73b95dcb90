"""CIFAR's python batches, which are pickles, read without executing any: the three things of numpy that they name are
stood in for by classes of our own, every other name is refused, and the array is made from its bytes afterwards.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubly.errors import UsageError


class _Array:
    """What is known of an array: the state that numpy would have set."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> NDArray[np.uint8]:
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _Dtype) or dtype.code not in (b"u1", "u1"):
            raise ValueError("an array in it is not of bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Dtype:
    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like: one byte has none


def _stand_ins() -> dict[tuple[str, str], Any]:
    """Made anew for each file: a pickle can set attributes of what it names."""

    class Array(_Array): ...

    class Dtype(_Dtype): ...

    def reconstruct(*_: Any) -> Array:
        return Array()

    return {
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Dtype,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,  # its name where numpy 2 has written the file
    }


def read_batch(path: Path) -> dict[str, Any]:
    """The dictionary of a batch: byte strings, lists of them or of integers, and uint8 arrays."""
    stand_ins = _stand_ins()

    class Batch(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in stand_ins:
                named = f"{module}.{name}".encode("unicode_escape").decode("ascii")
                raise UsageError(
                    f"{path} names {named}, which no CIFAR batch contains: nothing was executed; "
                    "do not trust this file, and fetch it anew"
                )
            return stand_ins[module, name]

    with path.open("rb") as file:
        found = Batch(file, encoding="bytes").load()
    if not isinstance(found, dict):
        raise ValueError("it holds no dictionary")
    return {_text(key): item.value() if isinstance(item, _Array) else item for key, item in found.items()}


def _text(word: Any) -> str:
    return word.decode("latin1") if isinstance(word, bytes) else str(word)

"""CIFAR's Python batches, which are pickles, read without executing any code.

A batch names three things of numpy. They are replaced by inert classes defined here, every other name is refused, and
the array is made from its bytes afterwards.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubly.errors import UsageError


class _Array:
    """Replacement of an array: it stores the state that numpy would have set."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> NDArray[np.uint8]:
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _Dtype) or dtype.code not in (b"u1", "u1"):
            raise ValueError("an array in it is not of bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Dtype:
    """Replacement of a dtype: it stores the code, such as "u1"."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like, which single bytes do not have


def _replacements() -> dict[tuple[str, str], Any]:
    """Return new replacements for each file, since a pickle can set attributes of what it names."""

    class Array(_Array): ...

    class Dtype(_Dtype): ...

    def reconstruct(*_: Any) -> Array:
        return Array()

    return {
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Dtype,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,  # its name in files written by numpy 2
    }


def read_batch(path: Path) -> dict[str, Any]:
    """Return the dictionary of a batch: byte strings, lists of them or of integers, and uint8 arrays.

    Raises:
        UsageError: The pickle names anything else, which could be code to execute.
        ValueError: It is no dictionary, or an array is not of bytes.
    """
    replacements = _replacements()

    class Batch(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in replacements:
                full_name = f"{module}.{name}".encode("unicode_escape").decode("ascii")
                raise UsageError(
                    f"{path} names {full_name}, which no CIFAR batch contains: nothing was executed; "
                    "do not trust this file, and fetch it anew"
                )
            return replacements[module, name]

    with path.open("rb") as file:
        content = Batch(file, encoding="bytes").load()
    if not isinstance(content, dict):
        raise ValueError("it holds no dictionary")
    return {_text(key): item.value() if isinstance(item, _Array) else item for key, item in content.items()}


def _text(word: Any) -> str:
    return word.decode("latin1") if isinstance(word, bytes) else str(word)

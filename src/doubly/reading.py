"""Read files that may be damaged or hostile: JSON, and arrays whose size is bounded before unpacking. No torch."""

import json
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doubly.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_JSON_BYTES = 2**28
MAX_JSON_DEPTH = 64
MAX_INTEGER = 2**64
MAX_UNPACKED_BYTES, MAX_RATIO = 2**28, 100  # what may be unpacked always, and how many times the packed size


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        UsageError: If the file is missing, cannot be read, is not valid JSON, or holds what no file of ours does: a
            nesting of more than 64 levels, integers of more than 64 bits, NaN.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give a run directory that contains this file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give a readable file") from None
    try:
        return parse_json(content)
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): restore it, or delete it and redo that part") from None


def read_tree(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file that holds an object.

    Raises:
        UsageError: As `read_json`, and if the file holds anything but an object.
    """
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UsageError(f"{path} holds a {type(tree).__name__}, not named fields: restore it or redo that part")
    return tree


def parse_json(content: bytes | str, any_number: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        content: The text.
        any_number: Whether NaN, infinity and integers of any size pass, for readers that check each number.

    Raises:
        ValueError: If it is not valid, too long, nested too deeply, or a number is too large; the message says what.
    """
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it is longer than {MAX_JSON_BYTES // 2**20} MiB")
    too_deep = f"it is nested more than {MAX_JSON_DEPTH} levels deep"
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(too_deep) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python converts no integers of more than 4,300 digits
        raise ValueError("it holds an integer of thousands of digits") from None
    level, depth = [value], 0
    while level:
        for item in () if any_number else level:
            _check_number(item)
        containers = [item.values() if isinstance(item, dict) else item for item in level if type(item) in (dict, list)]
        level, depth = [item for container in containers for item in container], depth + 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(too_deep)
    return value


def _check_number(value: Any) -> None:
    if type(value) is int and not -MAX_INTEGER < value < MAX_INTEGER:
        raise ValueError(f"it holds an integer of {len(str(abs(value))):,} digits")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"it holds the number {value}, which JSON does not have")


def check_unpacked_size(path: Path, unpacked: int, packed: int | None = None) -> None:
    """Refuse a file that would become very much larger when it is unpacked.

    Args:
        path: The file.
        unpacked: Bytes that its contents declare.
        packed: Bytes that they take in the file; the size of the file if None.

    Raises:
        UsageError: If so. Images and weights shrink to a tenth at best; only repeated bytes shrink to a hundredth.
    """
    packed = path.stat().st_size if packed is None else packed
    if unpacked > max(MAX_UNPACKED_BYTES, MAX_RATIO * packed):
        raise UsageError(
            f"{path} would become {unpacked / 2**20:,.0f} MiB, and has {packed / 2**20:,.1f} MiB: such a file is made "
            "to fill the memory or the disk; nothing was unpacked: do not trust it, and fetch the original"
        )


def check_zip(path: Path) -> None:
    """Refuse a zip file, such as an .npz, that would become very much larger when it is unpacked; see above."""
    with zipfile.ZipFile(path) as archive:
        check_unpacked_size(path, sum(member.file_size for member in archive.infolist()))


def load_npz(path: Path, wanted: Iterable[str] | None = None) -> "dict[str, NDArray[Any]]":
    """Return the arrays of an .npz file, without executing anything that is in it.

    Args:
        path: The file.
        wanted: Names of the arrays; those that the file lacks are left out. None is all.

    Raises:
        UsageError: If it would become very much larger when it is unpacked.
        ValueError: If it is damaged in any way; OSError if it cannot be opened.
    """
    import numpy as np

    with path.open("rb") as raw:
        try:
            check_zip(path)
            with np.load(raw, allow_pickle=False) as archive:
                names = archive.files if wanted is None else [name for name in wanted if name in archive.files]
                arrays = {name: archive[name] for name in names}
        except UsageError:
            raise
        except Exception as error:  # numpy and zipfile raise a dozen kinds for damaged files
            raise ValueError(f"{type(error).__name__}: {error!s:.60}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"TypeError: {name:.20} is no array")
    return arrays

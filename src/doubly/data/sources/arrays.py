"""Arrays in one file, .npz or .safetensors: x_train, y_train, x_test, y_test, or MedMNIST's train_images and so on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubly.data.download.dataset_files import read_file
from doubly.data.images import DataSource, Images, Splits
from doubly.data.pixels import MAX_CHANNELS
from doubly.errors import UsageError
from doubly.reading import load_npz, parse_json
from doubly.settings import Settings

NAMES = {part: ((f"x_{part}", f"y_{part}"), (f"{part}_images", f"{part}_labels")) for part in ("train", "test")}
MAX_LABEL = 100_000  # of a file that does not name its classes


@dataclass(frozen=True)
class Arrays(Settings, DataSource):
    """Images and labels from one .npz or .safetensors file; channels first or last, uint8 or floats in [0,1]."""

    file: str = "data.npz"
    """the file, inside the data root"""
    classes: tuple[str, ...] = ()
    """names of the classes; by default `classes` in the file, or else numbers"""

    def load(self, root: Path | None = None) -> Splits:
        path = Path(root or ".") / self.file
        if not path.is_file():
            raise UsageError(f"there is no file {path}: name its folder with --data-root, and the file inside that")
        read = _read_safetensors if path.suffix == ".safetensors" else load_npz
        arrays = read_file(path, read, "arrays without pickles")
        try:
            classes = list(self.classes) or _class_names(arrays.get("classes"))
            pairs = {part: _pixels_and_labels(arrays, part) for part in NAMES}
            if classes is None:
                classes = [str(k) for k in range(1 + max(_highest_label(y) for _, y in pairs.values()))]
                _check_first_label([y for _, y in pairs.values()])
            train, test = (Images.of(x, y, classes) for x, y in pairs.values())
            return Splits(train, test)
        except UsageError as problem:
            raise UsageError(f"{path}: {problem}") from None


def _class_names(names: Any) -> list[str] | None:
    if names is None:
        return None
    if np.ndim(names) != 1:
        raise UsageError("`classes` must be a list of names")
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names]


def _check_first_label(parts: Sequence[NDArray[Any]]) -> None:
    """Refuse labels that begin at 1: class 0 would have no image."""
    if all(y.dtype.kind in "iu" and y.ndim == 1 and len(y) and int(y.min()) >= 1 for y in parts):
        low, high = min(int(y.min()) for y in parts), max(int(y.max()) for y in parts)
        raise UsageError(
            f"labels run from {low} to {high}, and no image has label 0: number the classes from 0, as in y - {low}"
        )


def _highest_label(labels: NDArray[Any]) -> int:
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or not len(labels):
        return 0  # `Images.of` says what is wrong
    highest = int(labels.max())
    if highest > MAX_LABEL:
        raise UsageError(f"a label of {highest:,} would make as many classes: number the classes from 0")
    return highest


def _pixels_and_labels(arrays: Mapping[str, Any], part: str) -> tuple[NDArray[Any], NDArray[Any]]:
    for pixels, labels in NAMES[part]:
        if pixels in arrays and labels in arrays:
            x, y = arrays[pixels], arrays[labels]
            channels_last = x.ndim == 4 and x.shape[3] <= MAX_CHANNELS < x.shape[1]
            if x.ndim == 4 and min(x.shape[1], x.shape[3]) > MAX_CHANNELS:
                raise UsageError(f"images must have 1 to {MAX_CHANNELS} channels, first or last, got shape {x.shape}")
            return x.transpose(0, 3, 1, 2) if channels_last else x, y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    wanted = " or ".join(f"{x} and {y}" for x, y in NAMES[part])
    raise UsageError(f"it needs {wanted}, and has {', '.join(sorted(arrays))}")


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Return the arrays of the file, with the class names from its metadata, where they are a JSON list."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        names = (file.metadata() or {}).get("classes")
    return arrays if names is None else {**arrays, "classes": parse_json(names)}

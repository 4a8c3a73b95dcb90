"""Arrays in one file, .npz or .safetensors: x_train, y_train, x_test, y_test, or MedMNIST's train_images and so on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubly.data.files import content
from doubly.data.images import Images, Splits
from doubly.errors import UsageError

NAMES = {part: ((f"x_{part}", f"y_{part}"), (f"{part}_images", f"{part}_labels")) for part in ("train", "test")}


@dataclass(frozen=True)
class Arrays:
    """Images and labels from one .npz or .safetensors file; channels first or last, bytes or floats in [0,1]."""

    file: str = "data.npz"
    """the file, inside the data root"""
    classes: tuple[str, ...] = ()
    """names of the classes; numbers if there are none here and no `classes` in the file"""

    def load(self, root: Path | None = None) -> Splits:
        path = Path(root or ".") / self.file
        if not path.is_file():
            raise UsageError(f"there is no file {path}: name its folder with --data-root, and the file inside that")
        arrays = content(path, _safetensors if path.suffix == ".safetensors" else _npz, "arrays without pickles")
        try:
            classes = list(self.classes) or _names(arrays.get("classes"))
            pairs = {part: _pair(arrays, part) for part in NAMES}
            if classes is None:
                classes = [str(k) for k in range(1 + max(_highest(y) for _, y in pairs.values()))]
            train, test = (Images.of(x, y, classes) for x, y in pairs.values())
            return Splits(train, test)
        except UsageError as problem:
            raise UsageError(f"{path}: {problem}") from None


def _names(found: Any) -> list[str] | None:
    if found is None:
        return None
    if np.ndim(found) != 1:
        raise UsageError("`classes` is a list of names")
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in found]


def _highest(labels: NDArray[Any]) -> int:
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or not len(labels):
        return 0  # and `Images.of` says what is wrong
    highest = int(labels.max())
    if highest > 100_000:
        raise UsageError(f"a label of {highest:,} would make as many classes: number them from 0")
    return highest


def _pair(arrays: Mapping[str, Any], part: str) -> tuple[NDArray[Any], NDArray[Any]]:
    for pixels, labels in NAMES[part]:
        if pixels in arrays and labels in arrays:
            x, y = arrays[pixels], arrays[labels]
            channels_last = x.ndim == 4 and x.shape[3] <= 4 < x.shape[1]
            if x.ndim == 4 and min(x.shape[1], x.shape[3]) > 4:
                raise UsageError(f"images have 1 to 4 channels, first or last, got shape {x.shape}")
            return x.transpose(0, 3, 1, 2) if channels_last else x, y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    wanted = " or ".join(f"{x} and {y}" for x, y in NAMES[part])
    raise UsageError(f"it needs {wanted}, and has {', '.join(sorted(arrays))}")


def _npz(path: Path) -> dict[str, Any]:
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return dict(file)


def _safetensors(path: Path) -> dict[str, Any]:
    """Class names are a JSON list in the file's metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        names = (file.metadata() or {}).get("classes")
    return found if names is None else {**found, "classes": json.loads(names)}

"""STL-10 (Coates et al., 2011): 96x96 color images in binary files, column by column, with labels from 1."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from doubly.data.files import Files, bytes_of, content, labeled, words
from doubly.data.images import Images, Splits
from doubly.errors import UsageError

CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
PIXELS = 3 * 96 * 96


@dataclass(frozen=True)
class STL10:
    """13,000 labeled photographs of 10 things; 500 training and 800 test images of each."""

    def load(self, root: Path | None = None) -> Splits:
        files = Files("stl10", root, "stl10_binary")
        names = files.has("class_names.txt")
        classes = content(names, words, "class names") if names else CLASSES
        return files.splits(
            *(_images(files.file(f"{part}_X.bin"), files.file(f"{part}_y.bin"), classes) for part in ("train", "test"))
        )


def _images(pixels: Path, labels: Path, classes: list[str]) -> Images:
    raw, y = content(pixels, bytes_of, "STL-10 images"), content(labels, bytes_of, "STL-10 labels")
    if len(raw) % PIXELS or len(raw) != len(y) * PIXELS:
        raise UsageError(
            f"{pixels} and {labels.name} do not belong together: {len(raw):,} bytes are {len(raw) / PIXELS:.2f} "
            f"images, and there are {len(y):,} labels; one is cut short or swapped, put both in again"
        )
    if len(y) and not (y.min() >= 1 and y.max() <= len(classes)):
        raise UsageError(
            f"{labels} has labels from {y.min()} to {y.max()}, STL-10's are 1 to {len(classes)}: put it in again"
        )
    # Columns come first in the file.
    return labeled(pixels, raw.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2), y.astype(np.int64) - 1, classes)

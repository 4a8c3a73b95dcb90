"""STL-10 (Coates et al., 2011): 96x96 color images in binary files, column by column, with labels from 1."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from doubly.data.download.dataset_files import DatasetFiles, labeled_images, read_bytes, read_file, read_words
from doubly.data.images import DataSource, Images, Splits
from doubly.errors import UsageError
from doubly.settings import Settings

CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
PIXELS = 3 * 96 * 96


@dataclass(frozen=True)
class STL10(Settings, DataSource):
    """13,000 labeled color photographs, 96x96, of 10 classes; 500 training and 800 test images of each."""

    def load(self, root: Path | None = None) -> Splits:
        files = DatasetFiles("stl10", root, "stl10_binary")
        names = files.find("class_names.txt")
        classes = read_file(names, read_words, "class names") if names else CLASSES
        return files.splits(
            *(
                _read_images(files.file(f"{part}_X.bin"), files.file(f"{part}_y.bin"), classes)
                for part in ("train", "test")
            )
        )


def _read_images(pixels: Path, labels: Path, classes: list[str]) -> Images:
    raw, y = read_file(pixels, read_bytes, "STL-10 images"), read_file(labels, read_bytes, "STL-10 labels")
    if len(raw) % PIXELS or len(raw) != len(y) * PIXELS:
        raise UsageError(
            f"{pixels} and {labels.name} do not belong together: {len(raw):,} bytes are {len(raw) / PIXELS:.2f} "
            f"images, and there are {len(y):,} labels; one is truncated or swapped: replace both with the originals"
        )
    if len(y) and not (y.min() >= 1 and y.max() <= len(classes)):
        raise UsageError(
            f"{labels} has labels from {y.min()} to {y.max()}, STL-10's are 1 to {len(classes)}: replace it with the "
            "original"
        )
    # The file has columns first.
    return labeled_images(pixels, raw.reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2), y.astype(np.int64) - 1, classes)

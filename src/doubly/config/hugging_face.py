"""Hugging Face datasets on disk, as `dataset.save_to_disk(folder)` writes them; needs the extra doubly[huggingface]."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.data import DataSource, Images, Splits
from doubly.data.holdout import holdout
from doubly.errors import UsageError

SIGNS = ("dataset_dict.json", "dataset_info.json")  # files of a folder that save_to_disk wrote
TEST = ("test", "validation", "valid", "val")


def is_hugging_face(folder: Path) -> bool:
    """Return whether `save_to_disk` of the package datasets wrote this folder."""
    return any((folder / name).is_file() for name in SIGNS)


@dataclass(frozen=True)
class HuggingFace(DataSource):
    """A folder that `save_to_disk` of the package datasets wrote, with one column of images and one of labels."""

    path: str = "."
    """folder, inside the data root"""
    test_share: float = 0.2
    """part of each class that is the test set where there is no split test or validation; always the same images"""

    def load(self, root: Path | None = None) -> Splits:
        folder = Path(root or ".") / self.path
        try:
            from datasets import load_from_disk  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise UsageError(
                f"{folder} is a Hugging Face dataset, which needs the package datasets: pip install doubly[huggingface]"
            ) from None
        try:
            loaded = load_from_disk(str(folder))
        except Exception as error:  # whatever the package raises
            raise UsageError(
                f"{folder} cannot be read ({type(error).__name__}: {error!s:.120}): save it again"
            ) from None
        if not isinstance(loaded, dict):
            images = _images(loaded)
            train, test = holdout(images.y, self.test_share, seed=0)
            return Splits(images.subset(train), images.subset(test))
        names = [name for name in TEST if name in loaded]
        if "train" not in loaded or not names:
            raise UsageError(f"{folder} has the splits {', '.join(loaded)}: it needs train, and test or validation")
        return Splits(_images(loaded["train"]), _images(loaded[names[0]]))


def _images(table: Any) -> Images:
    """Return the rows of a table that has one column of images and one of labels."""
    kinds = {name: type(feature).__name__ for name, feature in table.features.items()}
    pictures = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    if len(pictures) != 1 or len(labels) != 1:
        raise UsageError(
            f"a dataset needs one column of images and one of class labels, got {kinds}: cast them with "
            "cast_column(name, Image()) and class_encode_column(name)"
        )
    return Images.from_dataset(_Pairs(table, pictures[0], labels[0], tuple(table.features[labels[0]].names)))


@dataclass(frozen=True)
class _Pairs:
    """The rows of a table as (image, label) pairs."""

    table: Any
    picture: str
    label: str
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, position: int) -> Any:
        row = self.table[position]
        return row[self.picture], row[self.label]

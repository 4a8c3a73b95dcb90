"""Your own images: one directory per class, any size and format."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from doubly.data.decoding import SUFFIXES, Fit, decoded, decoded_all
from doubly.data.files import data_folder
from doubly.data.holdout import holdout
from doubly.data.images import Images, Splits
from doubly.data.mapped import key, mapped
from doubly.errors import UsageError

TRAIN, TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")


@dataclass(frozen=True)
class ImageFolder:
    """ROOT/train/CLASS/*.png and ROOT/test/CLASS/*.png; or ROOT/CLASS/*.png, of which a part becomes the test set."""

    path: str = "."
    """folder, inside the data root"""
    size: int | None = None
    """make every image so many pixels wide and high; none takes them as they are, all alike"""
    fit: Fit = "crop"
    """how an image becomes square. crop: cut from its middle; stretch: pulled into shape"""
    test_share: float = 0.2
    """part of each class that is the test set where there is no folder `test` or `val`; always the same images"""
    memory: float | None = None
    """GiB that the images may take; more of them are read from files that are built once; none is half of the machine's
    free memory"""

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise UsageError(f"size is a number of pixels above 0, got {self.size}")
        if not 0 < self.test_share < 1:
            raise UsageError(f"test_share lies inside (0, 1), got {self.test_share}")
        if self.memory is not None and not self.memory >= 0:
            raise UsageError(f"memory is a number of GiB, got {self.memory}")

    def load(self, root: Path | None = None) -> Splits:
        place = Path(root or ".") / self.path
        if not place.is_dir():
            raise UsageError(f"there is no folder {place}: name it with --data-root, or as the path inside that")
        train, test = _part(place, TRAIN), _part(place, TEST)
        if train is None or test is None:
            files, y, classes = _listed(place)
            images = self._images(files, y, classes)
            kept, held = holdout(images.y, self.test_share, seed=0)
            return Splits(images.subset(kept), images.subset(held))
        listed, tested = _listed(train), _listed(test)
        if listed[2] != tested[2]:
            odd = sorted(set(listed[2]) ^ set(tested[2]))[0]
            raise UsageError(
                f"{train} and {test} have different classes, '{odd}' is in one of them only: add it to the other, or "
                "remove it"
            )
        return Splits(self._images(*listed), self._images(*tested))

    def _images(self, files: list[Path], y: Tensor, classes: tuple[str, ...]) -> Images:
        shape = decoded(files[0], self.size, self.fit).shape
        chunks = decoded_all(files, self.size, self.fit)
        if len(files) * math.prod(shape) <= (_free_memory() / 2 if self.memory is None else self.memory * 2**30):
            x = torch.empty(len(files), *shape, dtype=torch.uint8)
            filled = 0
            for chunk in chunks:
                x[filled : filled + len(chunk)] = torch.from_numpy(chunk)
                filled += len(chunk)
            return Images(x, y, classes)
        stats = ((str(path.resolve()), path.stat()) for path in files)
        name = key((self.size, self.fit, *((where, stat.st_size, stat.st_mtime_ns) for where, stat in stats)))
        return Images(mapped(data_folder() / "shards" / name, chunks, len(files)), y, classes)


def _part(place: Path, names: Sequence[str]) -> Path | None:
    """The first folder of these names, however capitalised."""
    found = {path.name.lower(): path for path in sorted(place.iterdir()) if path.is_dir()}
    return next((found[name] for name in names if name in found), None)


def _listed(place: Path) -> tuple[list[Path], Tensor, tuple[str, ...]]:
    """(files, labels, classes), in the order of their names."""
    classes = sorted(p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
    splits = [name for name in classes if name.lower() in {*TRAIN, *TEST}]
    # A class may be called train, among bus and tram; but then it holds images, not folders of them.
    if splits and (len(splits) == len(classes) or any(p.is_dir() for name in splits for p in (place / name).iterdir())):
        raise UsageError(f"{place} holds {', '.join(splits)}, which is no class: name the parts train and test")
    if len(classes) < 2:
        raise UsageError(
            f"{place} needs a directory for each of two or more classes, it has {len(classes)}: one directory per class"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        mine = sorted(_image_files(place / name))
        if not mine:
            raise UsageError(f"{place / name} has no images ({', '.join(sorted(SUFFIXES))}): add some or remove it")
        files += mine
        labels += [label] * len(mine)
    return files, torch.tensor(labels), tuple(classes)


def _image_files(place: Path) -> Iterator[Path]:
    return (
        path
        for path in place.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(place).parts)
    )


def _free_memory() -> float:
    """In bytes, with what the system would give back; a cautious guess where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return 4.0 * 2**30

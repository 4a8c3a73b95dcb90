"""GTSRB, German traffic signs (Stallkamp et al., 2012): the 39,209 images of Final_Training and 12,630 test images.

Training images come as tracks, about 30 frames of one sign; a hold-out keeps them together (`Images.groups`).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from doubly.data.decoding import decoded_all
from doubly.data.files import Files, content, labeled
from doubly.data.images import Images, Splits
from doubly.errors import UsageError

SPEEDS = (20, 30, 50, 60, 70, 80)
CLASSES = (
    *(f"speed limit {speed}" for speed in SPEEDS),
    "end of speed limit 80",
    "speed limit 100",
    "speed limit 120",
    "no overtaking",
    "no overtaking by lorries",
    "priority at the next junction",
    "priority road",
    "give way",
    "stop",
    "no vehicles",
    "no lorries",
    "no entry",
    "danger",
    "bend to the left",
    "bend to the right",
    "double bend",
    "uneven road",
    "slippery road",
    "road narrows on the right",
    "road works",
    "traffic lights",
    "pedestrians",
    "children",
    "bicycles",
    "ice or snow",
    "wild animals",
    "end of all limits",
    "turn right ahead",
    "turn left ahead",
    "straight on only",
    "straight on or right",
    "straight on or left",
    "keep right",
    "keep left",
    "roundabout",
    "end of no overtaking",
    "end of no overtaking by lorries",
)
TRUTH = ("", "GTSRB/", "GTSRB/Final_Test/Images/", "Final_Test/Images/")  # where people put the test labels


class _Row(NamedTuple):
    path: Path
    label: int
    track: int


@dataclass(frozen=True)
class GTSRB:
    """51,839 photographs of 43 traffic signs, from 210 to 2,250 training images of each, made square."""

    size: int = 32
    """pixels; the originals have 15 to 250"""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"size is a number of pixels above 0, got {self.size}")

    def load(self, root: Path | None = None) -> Splits:
        files = Files("gtsrb", root, "gtsrb", "GTSRB")
        if files.has("Train.csv", "train.csv"):
            train, test = (
                _mirrored(files.file(f"{part}.csv", f"{part.lower()}.csv"), tracked=part == "Train")
                for part in ("Train", "Test")
            )
        else:
            train = _original_train(files.folder("GTSRB/Final_Training/Images", "Final_Training/Images"))
            folder = files.folder("GTSRB/Final_Test/Images", "Final_Test/Images")
            test = _original_test(files.file(*(f"{place}GT-final_test.csv" for place in TRUTH)), folder)
        return files.splits(self._images(train, tracked=True), self._images(test, tracked=False))

    def _images(self, rows: list[_Row], tracked: bool) -> Images:
        x = np.concatenate(list(decoded_all([row.path for row in rows], self.size, "stretch")))
        images = labeled(rows[0].path.parent, x, [row.label for row in rows], CLASSES)
        groups = torch.tensor([row.track for row in rows]) if tracked else None
        return replace(images, groups=groups)


def _original_train(folder: Path) -> list[_Row]:
    """000xx/GT-000xx.csv beside TRACK_FRAME.ppm."""
    rows: list[_Row] = []
    for label in range(len(CLASSES)):
        table = folder / f"{label:05d}" / f"GT-{label:05d}.csv"
        for line in _table(table, "Filename", "ClassId"):
            rows.append(
                _row(table, table.parent / line["Filename"], line["ClassId"], (label, line["Filename"].split("_")[0]))
            )
            if rows[-1].label != label:
                raise UsageError(f"{table} speaks of class {rows[-1].label}: give each file its own name again")
    return rows


def _original_test(table: Path, folder: Path) -> list[_Row]:
    return [
        _row(table, folder / line["Filename"], line["ClassId"], (0, 0)) for line in _table(table, "Filename", "ClassId")
    ]


def _mirrored(table: Path, tracked: bool) -> list[_Row]:
    """Width,Height,…,ClassId,Path, the file being CLASS_TRACK_FRAME.png in training."""
    rows = []
    for line in _table(table, "Path", "ClassId"):
        path = table.parent / line["Path"]
        track = path.stem.split("_")[:2] if tracked else (0, 0)
        rows.append(_row(table, path, line["ClassId"], track))
    return rows


def _row(table: Path, path: Path, label: str, track: Sequence[int | str]) -> _Row:
    if not path.is_file():
        raise UsageError(f"{table} names {path.name}, and it is missing in {path.parent}: unpack the archive again")
    try:
        row = _Row(path, int(label), int(track[0]) * 100_000 + int(track[1]))
    except (ValueError, IndexError):
        raise UsageError(
            f"{table}: '{path.name}' of class '{label}' is not numbered as GTSRB's images are: put it in again"
        ) from None
    if not 0 <= row.label < len(CLASSES):
        raise UsageError(f"{table} has the class {row.label}, GTSRB's are 0 to {len(CLASSES) - 1}: put it in again")
    return row


def _table(path: Path, *columns: str) -> list[dict[str, str]]:
    """The lines of a CSV, with commas or semicolons."""

    def read(path: Path) -> list[dict[str, str]]:
        text = path.read_text("utf-8-sig")
        return list(csv.DictReader(text.splitlines(), delimiter=";" if ";" in text.partition("\n")[0] else ","))

    lines: list[dict[str, str]] = content(path, read, "a table")
    if not lines or any(not line.get(column) for line in lines for column in columns):
        raise UsageError(
            f"{path} has no lines with {' and '.join(columns)}, or one that is cut short; the file without classes is "
            "not the ground truth: put GTSRB's own in again (GTSRB_Final_Test_GT.zip for the test images)"
        )
    return lines

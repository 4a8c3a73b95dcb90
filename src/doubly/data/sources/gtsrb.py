"""GTSRB, German traffic signs (Stallkamp et al., 2012): the 39,209 images of Final_Training and 12,630 test images.

Training images come in tracks, about 30 frames of one sign, which are the groups of the images (`Images.groups`).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from doubly.data.download.dataset_files import DatasetFiles, labeled_images, read_file
from doubly.data.images import DataSource, Images, Splits
from doubly.data.sources.decoding import decode_images
from doubly.errors import UsageError
from doubly.settings import Settings

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
TEST_TABLES = tuple(  # where people put the table of test labels
    f"{folder}GT-final_test.csv" for folder in ("", "GTSRB/", "GTSRB/Final_Test/Images/", "Final_Test/Images/")
)


class _Row(NamedTuple):
    """An image as a table lists it."""

    path: Path
    label: int
    track: int


@dataclass(frozen=True)
class GTSRB(Settings, DataSource):
    """51,839 photographs of 43 traffic signs, resized to a square; 210 to 2,250 training images of each."""

    size: int = 32
    """width and height in pixels; the original images have 15 to 250"""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"size is a number of pixels above 0, got {self.size}")

    def load(self, root: Path | None = None) -> Splits:
        files = DatasetFiles("gtsrb", root, "gtsrb", "GTSRB")
        if files.find("Train.csv", "train.csv"):
            train, test = (
                _read_mirror(files.file(f"{part}.csv", f"{part.lower()}.csv"), has_tracks=part == "Train")
                for part in ("Train", "Test")
            )
        else:
            train = _read_original_train(files.folder("GTSRB/Final_Training/Images", "Final_Training/Images"))
            folder = files.folder("GTSRB/Final_Test/Images", "Final_Test/Images")
            test = _read_original_test(files.file(*TEST_TABLES), folder)
        return files.splits(self._read_images(train, has_tracks=True), self._read_images(test, has_tracks=False))

    def _read_images(self, rows: list[_Row], has_tracks: bool) -> Images:
        x = np.concatenate(list(decode_images([row.path for row in rows], self.size, "stretch")))
        images = labeled_images(rows[0].path.parent, x, [row.label for row in rows], CLASSES)
        groups = torch.tensor([row.track for row in rows]) if has_tracks else None
        return replace(images, groups=groups)


def _read_original_train(folder: Path) -> list[_Row]:
    """Read the tables 000xx/GT-000xx.csv, beside images called TRACK_FRAME.ppm."""
    rows: list[_Row] = []
    for label in range(len(CLASSES)):
        table = folder / f"{label:05d}" / f"GT-{label:05d}.csv"
        for line in _read_table(table, "Filename", "ClassId"):
            name = line["Filename"]
            rows.append(_row(table, table.parent / name, line["ClassId"], (label, name.split("_")[0])))
            if rows[-1].label != label:
                raise UsageError(
                    f"{table} lists images of class {rows[-1].label}: rename the files to their original names"
                )
    return rows


def _read_original_test(table: Path, folder: Path) -> list[_Row]:
    return [
        _row(table, folder / line["Filename"], line["ClassId"], (0, 0))
        for line in _read_table(table, "Filename", "ClassId")
    ]


def _read_mirror(table: Path, has_tracks: bool) -> list[_Row]:
    """Read Width,Height,…,ClassId,Path; the training images are called CLASS_TRACK_FRAME.png."""
    rows = []
    for line in _read_table(table, "Path", "ClassId"):
        path = table.parent / line["Path"]
        track = path.stem.split("_")[:2] if has_tracks else (0, 0)
        rows.append(_row(table, path, line["ClassId"], track))
    return rows


def _row(table: Path, path: Path, label: str, track: Sequence[int | str]) -> _Row:
    """Check a line of a table; `track` is the class and the number of the track inside it."""
    if not path.is_file():
        raise UsageError(f"{table} lists {path.name}, and it is missing in {path.parent}: unpack the archive again")
    try:
        row = _Row(path, int(label), int(track[0]) * 100_000 + int(track[1]))
    except (ValueError, IndexError):
        raise UsageError(
            f"{table}: '{path.name}' of class '{label}' is not numbered as GTSRB's images are: replace it with the "
            "original"
        ) from None
    if not 0 <= row.label < len(CLASSES):
        raise UsageError(
            f"{table} has the class {row.label}, GTSRB's are 0 to {len(CLASSES) - 1}: replace it with the original"
        )
    return row


def _read_table(path: Path, *columns: str) -> list[dict[str, str]]:
    """Return the lines of a CSV file with commas or semicolons, which must have these columns."""

    def read(path: Path) -> list[dict[str, str]]:
        text = path.read_text("utf-8-sig")
        return list(csv.DictReader(text.splitlines(), delimiter=";" if ";" in text.partition("\n")[0] else ","))

    lines: list[dict[str, str]] = read_file(path, read, "a table")
    if not lines or any(not line.get(column) for line in lines for column in columns):
        raise UsageError(
            f"{path} has no lines with {' and '.join(columns)}, or one that is truncated; the file without classes is "
            "not the ground truth: replace it with GTSRB's original (GTSRB_Final_Test_GT.zip for the test images)"
        )
    return lines

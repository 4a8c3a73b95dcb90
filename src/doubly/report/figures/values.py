"""Data for the figures, read from the files of the runs: numbers over seeds, and labels that can be drawn."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doubly.errors import UsageError
from doubly.reading import load_npz
from doubly.report.protocol import attack_name
from doubly.report.run_result import RunResult
from doubly.text import shorten

ByMethod = Mapping[str, Sequence[RunResult]]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Up to 50 classes are all drawn, of more only the 40 weakest: their names must stay readable.
MAX_CLASSES, MAX_DRAWN_CLASSES = 50, 40


def with_legend_labels(results_by_method: ByMethod) -> dict[str, Sequence[RunResult]]:
    """Return the methods that have runs, under labels that fit a legend and stay distinct."""
    labeled: dict[str, Sequence[RunResult]] = {}
    for label, runs in results_by_method.items():
        name = shorten(label, 40)
        name = f" {name}" if name.startswith("_") else name  # matplotlib leaves such labels out of the legend
        while name in labeled:
            name += "'"
        if runs:
            labeled[name] = runs
    return labeled


def over_seeds(table: Sequence[Sequence[float]] | Sequence[Floats]) -> tuple[Floats, Floats]:
    """Return mean and sample sd of each column, without the NaNs in it; the sd of a single value is 0."""
    values = np.asarray(table, dtype=float)
    present = ~np.isnan(values)
    count = present.sum(axis=0)
    mean = np.where(present, values, 0).sum(axis=0) / np.where(count, count, np.nan)
    squares = np.where(present, (values - mean) ** 2, 0).sum(axis=0)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1))


def to_percent(share: float | None) -> float:
    """Return a share in percent, and NaN for None, which JSON has in place of NaN."""
    return np.nan if share is None else 100 * share


def class_names(run: RunResult) -> list[str]:
    """Return the names of the classes in the order of their labels."""
    return list(run.evaluation["per_class"])


def class_accuracies(run: RunResult) -> Floats:
    """Return the accuracy of each class under the attack in percent."""
    return np.array([to_percent(entry["ra_pgd"]) for entry in run.evaluation["per_class"].values()])


def weakest(accuracies: Floats, room: int = MAX_CLASSES) -> Ints:
    """Return the indices of the classes with the lowest accuracy, sorted; classes without a value count as highest.

    Args:
        accuracies: Accuracy of each class.
        room: How many classes can be drawn at most.
    """
    count = min(room, MAX_CLASSES if len(accuracies) <= MAX_CLASSES else MAX_DRAWN_CLASSES)
    return np.sort(np.argsort(accuracies, kind="stable")[:count])


def attack_of(runs: Iterable[RunResult]) -> str:
    """Return the name of the attack; several only where settings with different attacks stand side by side."""
    return " / ".join(dict.fromkeys(attack_name(run.evaluation["protocol"]) for run in runs))


def arrays(file: Path, wanted: Iterable[str]) -> dict[str, npt.NDArray[Any]] | None:
    """Return those of the wanted arrays that an npz file holds; None if the file does not exist.

    Raises:
        UsageError: If the file cannot be read.
    """
    if not file.is_file():
        return None
    try:
        return load_npz(file, wanted)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise damaged(file, str(error)) from None


def damaged(file: Path, why: str) -> UsageError:
    """Return the error for a file that is damaged."""
    return UsageError(f"{file} is damaged ({why}): delete it and run `doubly evaluate {file.parent}` again")

"""What the pictures show, taken from the files of the runs: numbers over seeds, and names that can be drawn."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from doubly.errors import UsageError
from doubly.report.protocol import attack_name
from doubly.report.run_result import RunResult

ByMethod = Mapping[str, Sequence[RunResult]]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ALL_CLASSES, MOST_CLASSES = 50, 40  # up to so many are all drawn, of more only the weakest: names must be readable
DAMAGE = (OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, SyntaxError, MemoryError)


def named(results_by_method: ByMethod) -> dict[str, Sequence[RunResult]]:
    """The methods that have runs, under names that fit a legend and stay distinct."""
    shown: dict[str, Sequence[RunResult]] = {}
    for label, runs in results_by_method.items():
        name = short(label, 40)
        name = f" {name}" if name.startswith("_") else name  # matplotlib would leave it out of the legend
        while name in shown:
            name += "'"
        if runs:
            shown[name] = runs
    return shown


def short(text: str, most: int = 24) -> str:
    """One line without what no font or XML can hold; of a long name both ends, where names differ."""
    line = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split()) or "?"
    end = (most - 1) // 3
    return line if len(line) <= most else f"{line[: most - 1 - end]}…{line[-end:]}"


def over_seeds(table: Sequence[Sequence[float]] | Sequence[Floats]) -> tuple[Floats, Floats]:
    """Mean and sample sd of each column; a missing value counts for nothing, and one value has no spread."""
    values = np.asarray(table, dtype=float)
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    mean = np.where(known, values, 0).sum(axis=0) / np.where(count, count, np.nan)
    squares = np.where(known, (values - mean) ** 2, 0).sum(axis=0)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1))


def percent(share: float | None) -> float:
    """JSON has no NaN: what was not measured is null."""
    return np.nan if share is None else 100 * share


def class_names(run: RunResult) -> list[str]:
    return list(run.evaluation["per_class"])


def class_accuracies(run: RunResult) -> Floats:
    """Percent under the attack, in the order of the classes."""
    return np.array([percent(entry["ra_pgd"]) for entry in run.evaluation["per_class"].values()])


def weakest(accuracies: Floats, room: int = ALL_CLASSES) -> Ints:
    """The classes of least accuracy, in their own order; one that was not measured comes last."""
    most = min(room, ALL_CLASSES if len(accuracies) <= ALL_CLASSES else MOST_CLASSES)
    return np.sort(np.argsort(accuracies, kind="stable")[:most])


def attack_of(runs: Iterable[RunResult]) -> str:
    """Of the runs of one comparison, all alike; several only where settings are put side by side."""
    return " / ".join(dict.fromkeys(attack_name(run.evaluation["protocol"]) for run in runs))


def arrays(file: Path, wanted: Iterable[str]) -> dict[str, npt.NDArray[Any]] | None:
    """Those of the wanted arrays that the file holds; None where there is no file."""
    if not file.is_file():
        return None
    try:
        with file.open("rb") as raw, np.load(raw, allow_pickle=False) as kept:
            return {name: kept[name] for name in wanted if name in kept.files}
    except (*DAMAGE, NotImplementedError, BadZipFile, zlib.error) as problem:
        raise damaged(file, f"{type(problem).__name__}") from None


def damaged(file: Path, why: str) -> UsageError:
    return UsageError(f"{file} is damaged ({why}): delete it and run `doubly evaluate {file.parent}` again")

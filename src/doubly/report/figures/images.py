"""The images themselves, clean and attacked, with what the model made of them (fig. 4 and 6 of the paper)."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from doubly.report.figures.style import finish, style
from doubly.report.figures.values import arrays, attack_of, class_names, damaged, short
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir

PAIRS, COLUMNS = 12, 4
PAIR = 2.3  # inches
FIELDS = ("clean", "attacked", "labels", "answers_clean", "answers_attacked", "weights", "hard", "r")
Kept = dict[str, npt.NDArray[Any]]


def gallery(run: RunResult, path: Path, which: Literal["easy", "hard"]) -> bool:
    """The images of least or of largest weight: each clean and attacked, with label, answers and weight."""
    file = RunDir(run.path).gallery
    kept = arrays(file, FIELDS)
    if kept is None:
        return False
    _check(kept, file, len(class_names(run)))
    of_kind = np.flatnonzero(kept["hard"] == (which == "hard"))
    towards = -kept["weights"] if which == "hard" else kept["weights"]
    picked = of_kind[np.argsort(towards[of_kind], kind="stable")][:PAIRS]
    if not len(picked) or kept["clean"].shape[3] not in (1, 3):
        return False
    pairs = [_pair(kept["clean"][index], kept["attacked"][index]) for index in picked]
    columns = min(COLUMNS, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    tall = min(2 * PAIR, PAIR * pairs[0].shape[0] / pairs[0].shape[1])
    with style(path):
        size = (max(5.6, columns * (PAIR + 0.1)), rows * (tall + 0.6) + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        for place, (index, pair) in enumerate(zip(picked, pairs, strict=True)):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.imshow(pair, interpolation="none")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            axes.set_xlabel(_caption(kept, index, class_names(run)), fontsize=8.5)
        figure.suptitle(
            f"{short(run.method)}, seed {run.seed}: {which} images, the {'largest' if which == 'hard' else 'smallest'} "
            f"weights at r = {kept['r'].item():g}\nleft clean, right under {attack_of([run])}; the mean weight is 1",
            fontsize=10,
        )
        return finish(figure, [], path, grid=None)


def _check(kept: Kept, file: Path, classes: int) -> None:
    lacking = [name for name in FIELDS if name not in kept]
    if lacking:
        raise damaged(file, f"it lacks {', '.join(lacking)}")
    clean, count = kept["clean"], len(np.atleast_1d(kept["weights"]))
    whole = clean.ndim == 4 and clean.size and clean.shape == kept["attacked"].shape and kept["r"].size == 1
    lists = [kept[name] for name in FIELDS[2:-1]]
    if not whole or clean.dtype != np.uint8 or any(values.shape != (count,) for values in [*lists, clean[:, 0, 0, 0]]):
        raise damaged(file, "its arrays do not fit each other")
    if any(((values < 0) | (values >= classes)).any() for values in lists[:3]):
        raise damaged(file, f"it names a class outside the {classes} of the evaluation")


def _pair(clean: npt.NDArray[Any], attacked: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Side by side in color with a clear gap, which shows the page's own background."""
    gap = max(1, clean.shape[1] // 16)
    pair = np.zeros((clean.shape[0], 2 * clean.shape[1] + gap, 4), dtype=np.uint8)
    for image, start in ((clean, 0), (attacked, clean.shape[1] + gap)):
        pair[:, start : start + clean.shape[1], :3] = image
        pair[:, start : start + clean.shape[1], 3] = 255
    return pair


def _caption(kept: Kept, index: int, names: list[str]) -> str:
    clean, attacked = (short(names[kept[field][index]], 12) for field in ("answers_clean", "answers_attacked"))
    return (
        f"label {short(names[kept['labels'][index]])}\nanswer {clean} → {attacked}\nweight {kept['weights'][index]:.2g}"
    )

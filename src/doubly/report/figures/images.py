"""Single images, clean and attacked, with the predictions of the network (figures 4 and 6 of the paper)."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from doubly.report.figures.style import finish, style
from doubly.report.figures.values import arrays, attack_of, class_names, damaged
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir
from doubly.text import shorten

MAX_PAIRS, MAX_COLUMNS = 12, 4
PAIR_WIDTH = 2.3  # inches
FIELDS = ("clean", "attacked", "labels", "answers_clean", "answers_attacked", "weights", "hard", "r")
BROKEN_FIELDS = ("broken_clean", "broken_attacked", "broken_labels", "broken_answers")
Arrays = dict[str, npt.NDArray[Any]]


def gallery(run: RunResult, path: Path, kind: Literal["easy", "hard"]) -> bool:
    """Draw the images with the largest or the smallest weights: clean, attacked, label, predictions and weight.

    Raises:
        UsageError: If gallery.npz is damaged.
    """
    saved = read_gallery(run)
    if saved is None:
        return False
    candidates = np.flatnonzero(saved["hard"] == (kind == "hard"))
    order = -saved["weights"] if kind == "hard" else saved["weights"]
    picked = candidates[np.argsort(order[candidates], kind="stable")][:MAX_PAIRS]
    if not len(picked):
        return False
    pairs = [_pair(saved["clean"][index], saved["attacked"][index]) for index in picked]
    columns = min(MAX_COLUMNS, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    height = min(2 * PAIR_WIDTH, PAIR_WIDTH * pairs[0].shape[0] / pairs[0].shape[1])
    with style(path):
        size = (max(5.6, columns * (PAIR_WIDTH + 0.1)), rows * (height + 0.6) + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        for position, (index, pair) in enumerate(zip(picked, pairs, strict=True)):
            axes = figure.add_subplot(rows, columns, position + 1)
            axes.imshow(pair, interpolation="none")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            axes.set_xlabel(_caption(saved, index, class_names(run)), fontsize=8.5)
        extreme = "largest" if kind == "hard" else "smallest"
        figure.suptitle(
            f"{shorten(run.method)}, seed {run.seed}: {kind} images, {extreme} weights "
            f"at r = {saved['r'].item():g}\nleft clean, right under {attack_of([run])}; the mean weight is 1",
            fontsize=10,
        )
        return finish(figure, [], path, grid=None)


def read_gallery(run: RunResult) -> Arrays | None:
    """Return the arrays of gallery.npz; None if there is none, or its images are neither gray nor RGB.

    Raises:
        UsageError: If gallery.npz is damaged.
    """
    file = RunDir(run.path).gallery
    saved = arrays(file, (*FIELDS, *BROKEN_FIELDS))
    if saved is None:
        return None
    _check(saved, file, len(class_names(run)))
    return saved if saved["clean"].shape[3] in (1, 3) else None


def _check(saved: Arrays, file: Path, classes: int) -> None:
    missing = [name for name in FIELDS if name not in saved]
    if missing:
        raise damaged(file, f"it lacks {', '.join(missing)}")
    clean, count = saved["clean"], len(np.atleast_1d(saved["weights"]))
    fits = (
        clean.ndim == 4
        and clean.size
        and clean.shape == saved["attacked"].shape
        and saved["r"].size == 1
        and saved["r"].dtype.kind in "fiu"
    )
    lists = [saved[name] for name in FIELDS[2:-1]]
    kinds = zip(lists, ("iu", "iu", "iu", "f", "b"), strict=True)
    if {clean.dtype, saved["attacked"].dtype} != {np.dtype(np.uint8)} or any(v.dtype.kind not in k for v, k in kinds):
        raise damaged(file, "its arrays are of other types")
    if not fits or any(values.shape != (count,) for values in [*lists, clean[:, 0, 0, 0]]):
        raise damaged(file, "its arrays do not fit each other")
    if any(((values < 0) | (values >= classes)).any() for values in lists[:3]):
        raise damaged(file, f"it names a class outside the {classes} of the evaluation")


def read_broken(saved: Arrays, file: Path, classes: int) -> list[tuple[npt.NDArray[Any], ...]]:
    """Return clean image, attacked image, label and prediction of images that the attack breaks.

    Raises:
        UsageError: If the arrays do not fit each other.
    """
    if "broken_clean" not in saved:  # an evaluation of an earlier version, or no image was broken
        return []
    clean, attacked, labels, answers = (np.asarray(saved.get(name, 0)) for name in BROKEN_FIELDS)
    fits = clean.ndim == 4 and clean.shape == attacked.shape and clean.shape[1:] == saved["clean"].shape[1:]
    if not fits or clean.dtype != np.uint8 or attacked.dtype != np.uint8 or not clean.size:
        raise damaged(file, "its broken images do not fit each other")
    for values in (labels, answers):
        if values.shape != (len(clean),) or values.dtype.kind != "i" or not ((values >= 0) & (values < classes)).all():
            raise damaged(file, "its broken images have labels that are no classes")
    return list(zip(clean, attacked, labels, answers, strict=True))


def _pair(clean: npt.NDArray[Any], attacked: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return both images side by side as RGBA, with a transparent gap that shows the background of the page."""
    gap = max(1, clean.shape[1] // 16)
    pair = np.zeros((clean.shape[0], 2 * clean.shape[1] + gap, 4), dtype=np.uint8)
    for image, start in ((clean, 0), (attacked, clean.shape[1] + gap)):
        pair[:, start : start + clean.shape[1], :3] = image
        pair[:, start : start + clean.shape[1], 3] = 255
    return pair


def _caption(saved: Arrays, index: int, names: list[str]) -> str:
    clean, attacked = (shorten(names[saved[field][index]], 12) for field in ("answers_clean", "answers_attacked"))
    label, weight = shorten(names[saved["labels"][index]]), saved["weights"][index]
    return f"label {label}\nprediction {clean} → {attacked}\nweight {weight:.2g}"

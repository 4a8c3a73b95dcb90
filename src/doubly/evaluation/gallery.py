"""The hardest and the easiest images of an evaluation, clean and as PGD left them, for figures: gallery.npz."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.evaluation.examples import gray_levels
from doubly.evaluation.io import write_arrays
from doubly.evaluation.metrics import Floats, Ints
from doubly.evaluation.result import EvalResult
from doubly.rundir import RunDir

MOST = 12  # of each kind
BYTES = 4_000_000  # that the pixels may take: of large images there are fewer
R = 1.0  # of the weights


@dataclass
class Gallery:
    """The candidates among the images seen so far: at the end the same ones, whatever the chunks."""

    rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # rising
    losses: Floats = field(default_factory=lambda: np.empty(0))
    attacked: list[NDArray[np.uint8]] = field(default_factory=list)  # (H, W, C) each

    def see(self, attack: str, first: int, losses: Tensor, points: Tensor) -> None:
        """A chunk that begins with the image at `first`: what cannot be among the extremes any more is let go."""
        if attack != "pgd":
            return
        count, joint = len(self.rows), np.concatenate([self.losses, losses.double().cpu().numpy()])
        kept = _extremes(joint, most(points.shape[1:].numel()))
        old, new = kept[kept < count], kept[kept >= count] - count
        fresh = gray_levels(points[torch.from_numpy(new).to(points.device)])
        self.attacked = [*(self.attacked[index] for index in old), *fresh]
        self.rows, self.losses = np.concatenate([self.rows[old], first + new]), joint[kept]

    def write(self, folder: Path, result: EvalResult, clean: Tensor) -> None:
        """`clean`: the images at `rows`. Hard ones first, hardest first; then the easy ones, easiest first."""
        size = most(clean.shape[1:].numel())
        falling = np.argsort(-self.losses, kind="stable")
        hard, easy = falling[: min(size, (len(falling) + 1) // 2)], falling[::-1][: min(size, len(falling) // 2)]
        shown = np.concatenate([hard, easy])
        rows = self.rows[shown]
        arrays: dict[str, Any] = {
            "clean": gray_levels(clean)[shown],
            "attacked": np.stack(self.attacked)[shown],
            "ids": (np.arange(result.n) if result.ids is None else result.ids)[rows].astype(np.int64),
            "labels": result.y[rows].astype(np.int64),
            "answers_clean": result.answers["clean"][rows].astype(np.int64),
            "answers_attacked": result.answers["pgd"][rows].astype(np.int64),
            "weights": result.weights(R, "mean_one").weights[rows],
            "hard": np.arange(len(shown)) < len(hard),
            "r": np.float64(R),
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_arrays(RunDir(folder).gallery, arrays)


def most(values: int) -> int:
    """How many hard and how many easy images of so many values each there may be."""
    return min(MOST, max(1, BYTES // (4 * values)))  # hard and easy, clean and attacked


def _extremes(losses: Floats, size: int) -> Ints:
    """Positions of the `size` largest and smallest, rising; of equal losses the first ones count as larger."""
    falling = np.argsort(-losses, kind="stable")
    return np.sort(falling if len(falling) <= 2 * size else np.concatenate([falling[:size], falling[-size:]]))

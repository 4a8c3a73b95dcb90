"""Images of an evaluation, clean and attacked by PGD: the hardest, the easiest, and some that the attack breaks."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.evaluation.examples import gray_levels
from doubly.evaluation.metrics import Floats, Ints
from doubly.evaluation.result import EvalResult

MAX_IMAGES = 12  # of each kind
MAX_BROKEN = 6  # images that are right without and wrong under the attack
MAX_BYTES = 4_000_000  # for all pixels: there are fewer images if they are large
R = 1.0  # temperature of the weights


@dataclass
class Gallery:
    """The images of largest and smallest loss under PGD among those seen so far.

    Attributes:
        rows: Positions of the candidates, rising.
        losses: Their losses.
        attacked: Their attacked images in gray levels, (H, W, C) each.
        broken: Positions of the first images that the attack turns from right to wrong, at most one of each class.
        broken_attacked: Their attacked images.
    """

    rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    losses: Floats = field(default_factory=lambda: np.empty(0))
    attacked: list[NDArray[np.uint8]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    broken_attacked: list[NDArray[np.uint8]] = field(default_factory=list)
    broken_labels: list[int] = field(default_factory=list)

    def add_chunk(
        self, attack: str, start: int, losses: Tensor, attacked: Tensor, broken_classes: Tensor | None = None
    ) -> None:
        """Take the candidates of a chunk, and drop those that are no longer among the extremes.

        Args:
            attack: Name of the attack; all but pgd are ignored.
            start: Position of the first image.
            losses: Loss of each image.
            attacked: The attacked images.
            broken_classes: The label of each image that the attack turns from right to wrong, -1 of the others.
        """
        if attack != "pgd":
            return
        self._add_broken(start, attacked, broken_classes)
        count, all_losses = len(self.rows), np.concatenate([self.losses, losses.double().cpu().numpy()])
        extreme = _extremes(all_losses, max_images(attacked.shape[1:].numel()))
        old, new = extreme[extreme < count], extreme[extreme >= count] - count
        levels = gray_levels(attacked[torch.from_numpy(new).to(attacked.device)])
        self.attacked = [*(self.attacked[index] for index in old), *levels]
        self.rows, self.losses = np.concatenate([self.rows[old], start + new]), all_losses[extreme]

    def _add_broken(self, start: int, attacked: Tensor, classes: Tensor | None) -> None:
        size = min(MAX_BROKEN, max_images(attacked.shape[1:].numel()))
        for row, label in [] if classes is None else enumerate(classes.tolist()):
            if label >= 0 and label not in self.broken_labels and len(self.broken) < size:
                self.broken.append(start + row)
                self.broken_labels.append(label)
                self.broken_attacked += [*gray_levels(attacked[row : row + 1])]

    def arrays(self, result: EvalResult, clean: Tensor, broken_clean: Tensor | None = None) -> dict[str, Any]:
        """Return the contents of gallery.npz: hard images, hardest first, then easy ones, easiest first.

        Args:
            result: The result that the images belong to.
            clean: The clean images at `rows`.
            broken_clean: Those at `broken`.
        """
        size = max_images(clean.shape[1:].numel())
        falling = np.argsort(-self.losses, kind="stable")
        hard, easy = falling[: min(size, (len(falling) + 1) // 2)], falling[::-1][: min(size, len(falling) // 2)]
        shown = np.concatenate([hard, easy])
        rows, broken = self.rows[shown], np.array(self.broken, dtype=np.int64)
        extra = (
            {}
            if broken_clean is None or not len(broken)
            else {
                "broken_clean": gray_levels(broken_clean),
                "broken_attacked": np.stack(self.broken_attacked),
                "broken_labels": result.y[broken].astype(np.int64),
                "broken_answers": result.predictions["pgd"][broken].astype(np.int64),
            }
        )
        return {
            **extra,
            "clean": gray_levels(clean)[shown],
            "attacked": np.stack(self.attacked)[shown],
            "ids": (np.arange(result.n) if result.ids is None else result.ids)[rows].astype(np.int64),
            "labels": result.y[rows].astype(np.int64),
            "answers_clean": result.predictions["clean"][rows].astype(np.int64),
            "answers_attacked": result.predictions["pgd"][rows].astype(np.int64),
            "weights": result.weights(R, "mean_one").weights[rows],
            "hard": np.arange(len(shown)) < len(hard),
            "r": np.float64(R),
        }


def max_images(values: int) -> int:
    """Return how many hard, and how many easy, images of so many values each a gallery may have."""
    return min(MAX_IMAGES, max(1, MAX_BYTES // (4 * values)))  # hard and easy, clean and attacked


def _extremes(losses: Floats, size: int) -> Ints:
    """Return the positions of the `size` largest and smallest losses, rising; of equal ones the first are larger."""
    falling = np.argsort(-losses, kind="stable")
    return np.sort(falling if len(falling) <= 2 * size else np.concatenate([falling[:size], falling[-size:]]))

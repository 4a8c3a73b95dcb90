"""Clean and attacked images side by side, as parts of the page that a phone can show below each other."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from doubly.report.figures.images import read_broken, read_gallery
from doubly.report.figures.values import class_names
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir

MAX_EXAMPLES = 6


@dataclass(frozen=True)
class Example:
    """An image before and after the attack, with what the network makes of it."""

    clean: str
    attacked: str
    label: str
    before: str
    after: str

    @property
    def sentence(self) -> str:
        """What the network makes of the image, without and under the attack."""
        if self.before != self.label:
            again = "with and without attack" if self.after == self.before else f"under attack for {self.after}"
            return f"taken for {self.before}{' ' if self.after == self.before else ', '}{again}"
        return "recognized, also under attack" if self.after == self.label else f"taken for {self.after} under attack"


def examples(run: RunResult) -> list[Example]:
    """Return images of a run, first those that the attack turns from right to wrong, hardest first.

    Raises:
        UsageError: If gallery.npz is damaged.
    """
    saved = read_gallery(run)
    if saved is None:
        return []
    names, labels = class_names(run), saved["labels"]
    broken = [
        Example(_data_uri(clean), _data_uri(attacked), names[label], names[label], names[answer])
        for clean, attacked, label, answer in read_broken(saved, RunDir(run.path).gallery, len(names))
    ]
    if broken:
        return broken[:MAX_EXAMPLES]
    fooled = (saved["answers_clean"] == labels) & (saved["answers_attacked"] != labels)
    order = np.lexsort((-saved["weights"], ~saved["hard"].astype(bool), ~fooled))[:MAX_EXAMPLES]
    return [
        Example(
            *(_data_uri(saved[field][index]) for field in ("clean", "attacked")),
            *(names[saved[field][index]] for field in ("labels", "answers_clean", "answers_attacked")),
        )
        for index in order
    ]


def _data_uri(pixels: npt.NDArray[Any]) -> str:
    """Return an image of bytes, gray or RGB, as a PNG inside an address."""
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"

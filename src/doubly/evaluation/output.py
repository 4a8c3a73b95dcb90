"""What an evaluation leaves in its folder: its numbers, the gallery, attacked images. The first process writes."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doubly.data import Images
from doubly.distributed import collectives as parallel
from doubly.distributed.rank_zero import first
from doubly.errors import UsageError
from doubly.evaluation.examples import Format, check_format, save_examples
from doubly.evaluation.gallery import Gallery
from doubly.evaluation.result import EvalResult
from doubly.rundir import RunDir
from doubly.threat import NormBall


class Kept(NamedTuple):
    """Attacked images, and which images they were."""

    name: str
    rows: Tensor
    points: Tensor
    ball: NormBall | None


@dataclass(frozen=True)
class Output:
    folder: Path | None
    format: Format | None  # of attacked images
    more: Mapping[str, Any]  # goes into evaluation.json

    def check(self, channels: int) -> None:
        """Before hours of work."""
        if self.folder is not None:
            check_folder(self.folder)
        if self.format is not None:
            if self.folder is None:
                raise UsageError("attacked images need a folder to be saved in: give an output")
            check_format(self.format, channels)

    def save(self, result: EvalResult, images: Images, gallery: Gallery, over: bool = True) -> None:
        """`over`: in the place of an evaluation that stands there."""
        folder = self.folder

        def write() -> None:
            if folder is None or (not over and RunDir(folder).evaluation.exists()):
                return
            if len(gallery.rows):
                gallery.write(folder, result, images.subset(gallery.rows).pixels(slice(None)))
            else:  # one of an earlier evaluation would pass for this one's
                RunDir(folder).gallery.unlink(missing_ok=True)
            result.save(folder, **self.more)

        first(write)

    def examples(
        self, images: Images, kept: Sequence[Kept], device: torch.device, answer: Callable[[Tensor], Tensor]
    ) -> dict[str, Any]:
        """Writes attacked images; returns what evaluation.json says of each attack's."""
        saved: dict[str, Any] = {}

        def write() -> None:
            for each in kept:
                place = (self.folder or Path()) / "examples" / each.name
                part = images.subset(each.rows).to(device)
                points, clean = each.points.to(device), part.pixels(slice(None))
                saved[each.name] = save_examples(
                    place, self.format or "npz", points, clean, part.y, part.ids, each.ball, answer
                )

        first(write)
        return parallel.same(saved)


def check_folder(path: Path) -> None:
    """Before hours of work: can results be written there?"""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(
            f"{path} cannot hold the results: {there} is no folder that may be written; choose another output"
        )

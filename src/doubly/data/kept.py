"""An imbalanced set as a file that one can share: the ids of the images that stay, class by class."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doubly.data.images import Images
from doubly.errors import UsageError
from doubly.rundir import read_json


@dataclass(frozen=True)
class KeptImages:
    """The images that a file names, as `doubly data imbalance` writes it."""

    file: str = "kept.json"
    """JSON with the ids under `kept`, class by class in order; its path is as you would type it"""

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        parts = list(self._parts().values())
        positions = (torch.arange(len(y)) if ids is None else ids).cpu()
        wanted = [torch.isin(positions, torch.tensor(part, dtype=torch.int64)) for part in parts]
        if len(parts) != classes or any((y.cpu()[mask] != label).any() for label, mask in enumerate(wanted)):
            raise self._other_data()
        for label, mask in enumerate(wanted):
            if not mask.any():
                raise UsageError(f"{self.file} leaves no image of class {label}: raise the ratio or hold out less")
        return torch.stack(wanted).any(0).nonzero().squeeze(1)

    def check(self, images: Images) -> None:
        """Refuse a set, before anything is held out, that is not the one that the file was made for."""
        parts = self._parts()
        named = torch.tensor([k for part in parts.values() for k in part], dtype=torch.int64)
        if tuple(parts) != images.classes or not torch.isin(named, images.ids.cpu()).all():
            raise self._other_data()
        self.keep(images.y, len(images.classes), images.ids)

    def _other_data(self) -> UsageError:
        return UsageError(f"{self.file} was made for other data: images or classes that it names are not here")

    def _parts(self) -> dict[str, list[int]]:
        if not Path(self.file).is_file():
            raise UsageError(f"there is no file {self.file} of kept images: write it with `doubly data imbalance NAME`")
        stated = read_json(Path(self.file))
        kept = stated.get("kept") if isinstance(stated, dict) else None
        if not isinstance(kept, dict) or not all(_is_ids(part) for part in kept.values()):
            raise UsageError(f"{self.file} names no kept images: write it with `doubly data imbalance NAME`")
        return kept


def _is_ids(part: Any) -> bool:
    return type(part) is list and all(type(k) is int and 0 <= k < 2**62 for k in part)


def kept_images(images: Images, about: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of such a file, with what it is `about`."""
    ids = {name: images.ids[images.y == label].tolist() for label, name in enumerate(images.classes)}
    if len(ids) < len(images.classes):
        raise UsageError("two classes share a name: rename one, or the file could not tell them apart")
    return {**about, "kept": ids}

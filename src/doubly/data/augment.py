"""Random changes to whole batches, on the device where the batch lies, drawn for the global batch (see `parallel`)."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from doubly import parallel
from doubly.errors import UsageError


@runtime_checkable
class Augmentation(Protocol):
    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """(B, C, H, W) floats to the same shape; one that only `moves_pixels` gets bytes where the set has bytes."""
        ...


@dataclass(frozen=True)
class Unchanged:
    """Images as they are."""

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x


@dataclass(frozen=True)
class PadCropFlip:
    """Zeros around the image, a random crop of the old size, and a mirror image half of the time."""

    pad: int = 4
    """pixels added on each side; 0 means no crop"""
    flip: bool = True
    """mirror left and right; switch it off where direction means something, as on digits and traffic signs"""

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise UsageError(f"an image is padded by 0 or more pixels, got pad={self.pad}")

    moves_pixels = True  # and changes none, so that bytes will do

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        batch, channels, height, width = x.shape
        draws = parallel.uniform(torch.empty(batch, 3, device=x.device), generator)
        shift = (draws[:, :2] * (2 * self.pad + 1)).long()
        rows = torch.arange(height, device=x.device) + shift[:, :1]
        columns = torch.arange(width, device=x.device) + shift[:, 1:]
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        # One gather of all pixels, which are counted through the padded image: crop and flip in one pass.
        places = (rows[:, :, None] * (width + 2 * self.pad) + columns[:, None, :]).view(batch, 1, -1)
        padded = F.pad(x, [self.pad] * 4).flatten(2)
        return padded.gather(2, places.expand(-1, channels, -1)).view(x.shape)

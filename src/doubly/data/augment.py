"""Random changes to whole batches, on the device where the batch lies, drawn for the global batch (see `parallel`)."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from doubly.distributed import collectives as parallel
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


@dataclass(frozen=True)
class ResizedCropFlip:
    """A random part of the image, enlarged to the old size, and a mirror image half of the time: ImageNet's usual."""

    smallest: float = 0.08
    """least share of the image's area that a part has; the largest is the whole"""
    stretch: float = 4 / 3
    """most that a part is wider than high, or higher than wide"""
    flip: bool = True
    """mirror left and right; switch it off where direction means something"""

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= 1 or not self.stretch >= 1:
            raise UsageError(
                f"smallest is a share of the image in (0, 1] and stretch at least 1, got {self.smallest:g} and "
                f"{self.stretch:g}"
            )

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        draws = parallel.uniform(torch.empty(len(x), 5, device=x.device, dtype=x.dtype), generator)
        area = self.smallest + (1 - self.smallest) * draws[:, 0]
        ratio = self.stretch ** (2 * draws[:, 1] - 1)
        size = torch.stack([area * ratio, area / ratio], 1).sqrt().clamp_max(1)  # width, height; shares of the image
        center = (2 * draws[:, 2:4] - 1) * (1 - size)  # the image reaches from -1 to 1
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0) if self.flip else torch.ones_like(area)
        turned = torch.stack([size[:, 0] * mirror, size[:, 1]], 1).diag_embed()
        grid = F.affine_grid(torch.cat([turned, center[:, :, None]], 2), list(x.shape), align_corners=False)
        # Parts are never shrunk, so nothing needs smoothing; rounding may leave [0,1].
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False).clamp_(0, 1)

"""Random changes of whole batches, on the device of the batch."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from doubly.errors import UsageError
from doubly.seeding import BatchGenerator
from doubly.settings import Settings


class Augmentation(Settings):
    """A random change of a batch of training images; a subclass is a frozen dataclass with a method `__call__`."""

    moves_pixels: ClassVar[bool] = False
    """True if pixels are only moved or set to zero: then a batch of uint8 images may be passed as uint8."""

    def __call__(self, x: Tensor, generator: BatchGenerator) -> Tensor:
        """Change a batch.

        Args:
            x: Images (B, C, H, W), floats in [0,1]; possibly uint8 if `moves_pixels`.
            generator: Source of all randomness. `generator.uniform(like)` has a row of numbers for each image, the
                same at any number of processes.

        Returns:
            The changed images, of the same shape and type; `x` itself is not modified.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Unchanged(Augmentation):
    """No change."""

    def __call__(self, x: Tensor, generator: BatchGenerator) -> Tensor:
        return x


@dataclass(frozen=True)
class PadCropFlip(Augmentation):
    """Pad the image with zeros, crop it to the old size at a random position, and mirror it half of the time."""

    pad: int = 4
    """pixels added on each side; 0 means no crop"""
    flip: bool = True
    """mirror left and right; switch it off where direction means something, as on digits and traffic signs"""

    moves_pixels = True

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise UsageError(f"an image is padded by 0 or more pixels, got pad={self.pad}")

    def __call__(self, x: Tensor, generator: BatchGenerator) -> Tensor:
        batch_size, channels, height, width = x.shape
        draws = generator.uniform(torch.empty(batch_size, 3, device=x.device))
        shift = (draws[:, :2] * (2 * self.pad + 1)).long()
        rows = torch.arange(height, device=x.device) + shift[:, :1]
        columns = torch.arange(width, device=x.device) + shift[:, 1:]
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        # One gather of all pixels, numbered through the padded image, does crop and flip in one pass.
        pixels = (rows[:, :, None] * (width + 2 * self.pad) + columns[:, None, :]).view(batch_size, 1, -1)
        padded = F.pad(x, [self.pad] * 4).flatten(2)
        return padded.gather(2, pixels.expand(-1, channels, -1)).view(x.shape)


@dataclass(frozen=True)
class ResizedCropFlip(Augmentation):
    """Crop a random part, enlarge it to the old size, and mirror it half of the time, as is usual for ImageNet."""

    smallest: float = 0.08
    """smallest area of the crop, as a share of the image; the largest is the whole image"""
    stretch: float = 4 / 3
    """largest ratio of the crop's width to its height, and of its height to its width"""
    flip: bool = True
    """mirror left and right; switch it off where direction means something"""

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= 1 or not self.stretch >= 1:
            raise UsageError(
                f"smallest is a share of the image in (0, 1] and stretch at least 1, got {self.smallest:g} and "
                f"{self.stretch:g}"
            )

    def __call__(self, x: Tensor, generator: BatchGenerator) -> Tensor:
        draws = generator.uniform(torch.empty(len(x), 5, device=x.device, dtype=x.dtype))
        area = self.smallest + (1 - self.smallest) * draws[:, 0]
        ratio = self.stretch ** (2 * draws[:, 1] - 1)
        size = torch.stack([area * ratio, area / ratio], 1).sqrt().clamp_max(1)  # width, height; shares of the image
        center = (2 * draws[:, 2:4] - 1) * (1 - size)  # the image reaches from -1 to 1
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0) if self.flip else torch.ones_like(area)
        scale = torch.stack([size[:, 0] * mirror, size[:, 1]], 1).diag_embed()
        grid = F.affine_grid(torch.cat([scale, center[:, :, None]], 2), list(x.shape), align_corners=False)
        # Crops are never shrunk, so they need no smoothing; rounding may leave [0,1].
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False).clamp_(0, 1)

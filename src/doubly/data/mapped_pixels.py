"""Pixels in files on disk that are indexed like a tensor, for datasets that do not fit into memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MappedPixels:
    """Uint8 pixels (N, C, H, W) in memory-mapped files (shards).

    Indexing reads only the selected rows; a subset copies nothing.
    """

    shards: tuple[Tensor, ...]  # all but the last have the same length
    rows: Tensor  # (N,) int64, positions counted over all shards
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where the pixels read are moved

    @staticmethod
    def of(shards: Sequence[Tensor]) -> "MappedPixels":
        """Return all rows of the shards, in their order."""
        return MappedPixels(tuple(shards), torch.arange(sum(len(shard) for shard in shards)))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.shards[0].shape[1:]))

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Read these rows from disk."""
        rows = self.rows[index.to(self.rows.device) if isinstance(index, Tensor) else index]
        pixels = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8)
        shard = rows // len(self.shards[0])
        for number in sorted(set(shard.tolist())):
            inside = shard == number
            pixels[inside] = self.shards[number][rows[inside] - number * len(self.shards[0])]
        if self.device.type == "cuda":  # from pinned memory the copy does not block
            return pixels.pin_memory().to(self.device, non_blocking=True)
        return pixels.to(self.device)

    def subset(self, index: Tensor) -> "MappedPixels":
        """Return the rows at these positions, or where a boolean mask is true, without reading them."""
        return replace(self, rows=self.rows[index.to(self.rows.device)])

    def to(self, device: torch.device | str) -> "MappedPixels":
        """Return the same rows, which are moved to this device when they are read."""
        return replace(self, device=torch.device(device))

"""The first layer of every network. Images arrive in [0,1], so that attacks never see normalized pixels."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from doubly.errors import UsageError


class Normalize(nn.Module):
    """Layer that computes (x - mean) / std of each channel. Both are buffers, so that checkpoints contain them."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Make the layer.

        Args:
            mean: Mean of each channel, of pixels in [0,1].
            std: Standard deviation of each channel, above 0.

        Raises:
            UsageError: The numbers of channels differ or are 0, or a value is not finite or a std not positive.
        """
        super().__init__()
        if len(mean) != len(std) or not mean:
            raise UsageError(f"got {len(mean)} means and {len(std)} standard deviations: give one of each per channel")
        if not all(math.isfinite(m) for m in mean) or not all(math.isfinite(s) and s > 0 for s in std):
            raise UsageError(
                f"means must be finite and standard deviations finite and positive, got mean={tuple(mean)} and "
                f"std={tuple(std)}: give a channel without spread a standard deviation of 1"
            )
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize images (N, C, H, W); a UsageError refuses another number of channels."""
        # Without this check a gray image would broadcast to three channels and be classified without complaint.
        if x.shape[1] != self.mean.shape[1]:
            raise UsageError(
                f"the model was built for {self.mean.shape[1]} channels and got images of shape {tuple(x.shape)}: "
                f"build it with channels={x.shape[1]}, with one mean and one std each"
            )
        return (x - self.mean) / self.std

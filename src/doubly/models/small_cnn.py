"""A network for 8x8 digits and 28x28 MNIST that trains in seconds on one core, without batch norm."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from doubly.errors import UsageError
from doubly.models.model import Model
from doubly.models.normalize import Normalize
from doubly.models.residual import he_normal


class Grid(nn.Module):
    """Layer that averages features on a grid of size x size; those of that size pass unchanged, which saves time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[2:] == (self.size, self.size) else F.adaptive_avg_pool2d(x, self.size)


@dataclass(frozen=True)
class SmallCNN(Model):
    """Three 3x3 convolutions, a 4x4 grid of averages, which keeps positions apart, and one hidden layer."""

    width: int = 32
    """channels of the convolutions; the first has half as many, the hidden layer four times as many units"""

    def __post_init__(self) -> None:
        if self.width < 2:
            raise UsageError(f"a small CNN has a width of at least 2, got {self.width}")

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        width = self.width
        features = nn.Sequential(
            nn.Conv2d(channels, width // 2, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            Grid(4),
            nn.Flatten(),
        )
        head = nn.Sequential(nn.Linear(16 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes))
        return he_normal(nn.Sequential(OrderedDict(normalize=Normalize(mean, std), features=features, head=head)))

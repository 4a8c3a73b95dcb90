"""Wide residual networks (Zagoruyko and Komodakis, 2016), without dropout, such as WRN-28-10 and WRN-34-10."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from doubly.errors import UsageError
from doubly.models.model import Model
from doubly.models.normalize import Normalize
from doubly.models.preact_resnet import preact_network
from doubly.models.residual import convolution


@dataclass(frozen=True)
class WideResNet(Model):
    """Wide ResNet: a stem of 16 channels and three stages of 16, 32 and 64 times `widen` channels."""

    depth: int = 28
    """number of layers with weights: 6 n + 4 for n blocks per stage"""
    widen: int = 10
    """factor by which the channels of each stage are multiplied"""

    def __post_init__(self) -> None:
        if self.depth < 10 or self.depth % 6 != 4 or self.widen < 1:
            raise UsageError(
                f"a wide ResNet has a depth of 6 n + 4 (10, 16, 22, 28, 34, …) and widens at least by 1, "
                f"got depth={self.depth} and widen={self.widen}"
            )

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        widths = (16 * self.widen, 32 * self.widen, 64 * self.widen)
        blocks = (self.depth - 4) // 6
        return preact_network(Normalize(mean, std), convolution(channels, 16), widths, blocks, "activated", classes)

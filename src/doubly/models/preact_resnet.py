"""Residual networks with norm and activation before each convolution (He et al., 2016b): PreAct ResNet-18."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from doubly.errors import UsageError
from doubly.models.model import Model
from doubly.models.normalize import Normalize
from doubly.models.residual import convolution, residual_network

Shortcut = Literal["raw", "activated"]


class PreActBlock(nn.Module):
    """Residual block x + conv(relu(norm(conv(relu(norm(x)))))); where the shape changes, a projection replaces x."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = convolution(inputs, outputs, stride=stride)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs)
        changes = stride != 1 or inputs != outputs
        self.projection: nn.Module = convolution(inputs, outputs, 1, stride) if changes else nn.Identity()
        self.reads_activation = changes and shortcut == "activated"

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        hidden = F.relu(self.norm2(self.conv1(activated)))
        total: Tensor = self.conv2(hidden) + self.projection(activated if self.reads_activation else x)
        return total


def preact_network(
    normalize: Normalize, stem: nn.Conv2d, widths: Sequence[int], blocks: int, shortcut: Shortcut, classes: int
) -> nn.Sequential:
    """Build a pre-activation network.

    Args:
        normalize: First layer.
        stem: First convolution.
        widths: Channels of each stage.
        blocks: Blocks per stage.
        shortcut: Input of the projections, as for `PreActResNet18`.
        classes: Number of logits.
    """
    block = partial(PreActBlock, shortcut=shortcut)
    final = nn.Sequential(nn.BatchNorm2d(widths[-1]), nn.ReLU())
    return residual_network(normalize, stem, block, (stem.out_channels, *widths), blocks, final, classes)


@dataclass(frozen=True)
class PreActResNet18(Model):
    """The ResNet-18 of fast adversarial training: stages of 64, 128, 256 and 512 channels, two blocks each."""

    shortcut: Shortcut = "raw"
    """input of a projection. raw: the block's input (Wong et al., Fast-BAT); activated: its activation (Rice et al.);
    the weights of one do not fit the other"""

    def __post_init__(self) -> None:
        if self.shortcut not in ("raw", "activated"):
            raise UsageError(f"the shortcut of a PreAct ResNet-18 reads 'raw' or 'activated', got {self.shortcut!r}")

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        stem = convolution(channels, 64)
        return preact_network(Normalize(mean, std), stem, (64, 128, 256, 512), 2, self.shortcut, classes)

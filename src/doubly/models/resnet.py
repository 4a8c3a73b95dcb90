"""Residual networks with the activation after the sum (He et al., 2016a): ResNet-18, and a narrow one for CIFAR."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from doubly.errors import UsageError
from doubly.models.model import Model
from doubly.models.normalize import Normalize
from doubly.models.residual import convolution, residual_network


class Block(nn.Module):
    """Residual block relu(x + norm(conv(relu(norm(conv(x)))))); where the shape changes, x is projected."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, stride=stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def _network(
    normalize: Normalize, stem: nn.Conv2d, widths: Sequence[int], blocks: int, classes: int, *pool: nn.Module
) -> nn.Sequential:
    normed = nn.Sequential(stem, nn.BatchNorm2d(stem.out_channels), nn.ReLU(), *pool)
    return residual_network(normalize, normed, Block, (stem.out_channels, *widths), blocks, nn.Identity(), classes)


@dataclass(frozen=True)
class ResNet18(Model):
    """ResNet-18: stages of 64, 128, 256 and 512 channels, two blocks each; by default in its form for CIFAR."""

    stem: Literal["3x3", "7x7", "imagenet"] = "3x3"
    """first layers. 3x3: a convolution with stride 1, for images of 32 pixels; 7x7: stride 2, a quarter of the work;
    imagenet: that and a 3x3 max pooling with stride 2, a sixteenth of the work, for images of 224 pixels"""

    def __post_init__(self) -> None:
        if self.stem not in ("3x3", "7x7", "imagenet"):
            raise UsageError(f"the stem of a ResNet-18 is '3x3', '7x7' or 'imagenet', got {self.stem!r}")

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        stem = convolution(channels, 64) if self.stem == "3x3" else convolution(channels, 64, 7, 2)
        pool = (nn.MaxPool2d(3, 2, 1),) if self.stem == "imagenet" else ()
        return _network(Normalize(mean, std), stem, (64, 128, 256, 512), 2, classes, *pool)


@dataclass(frozen=True)
class NarrowResNet(Model):
    """A narrow ResNet for CIFAR: three stages of width, 2 width and 4 width channels."""

    width: int = 16
    """channels of the stem and of the first stage"""
    blocks: int = 2
    """blocks per stage; 3 makes it ResNet-20"""

    def __post_init__(self) -> None:
        if self.width < 1 or self.blocks < 1:
            raise UsageError(f"a narrow ResNet has width and blocks of at least 1, got {self.width} and {self.blocks}")

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        widths = (self.width, 2 * self.width, 4 * self.width)
        return _network(Normalize(mean, std), convolution(channels, self.width), widths, self.blocks, classes)

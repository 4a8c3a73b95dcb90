"""Network architectures: frozen dataclasses of plain numbers that build a module from images in [0,1] to logits."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from doubly.models.normalize import Normalize
from doubly.models.preact_resnet import PreActResNet18
from doubly.models.resnet import NarrowResNet, ResNet18
from doubly.models.small_cnn import SmallCNN
from doubly.models.wide_resnet import WideResNet

__all__ = ["MODELS", "Model", "NarrowResNet", "Normalize", "PreActResNet18", "ResNet18", "SmallCNN", "WideResNet"]


@runtime_checkable
class Model(Protocol):
    """A network architecture: anything with a method `build`.

    Ours are frozen dataclasses, listed in `MODELS`. To train a network of your own you need none: pass an nn.Module to
    `doubly.train`, or name a function that returns one (`--model package.module:function`).
    """

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        """Build a network with initial weights, drawn from torch's global generator.

        Args:
            channels: Channels of the images.
            classes: Number of logits.
            mean: Mean of each channel of the training images, for the first layer (`Normalize`).
            std: Standard deviation of each channel.

        Returns:
            A module from images (N, channels, H, W) in [0,1], of any size, to logits (N, classes).
        """
        ...


MODELS: dict[str, type] = {
    "small_cnn": SmallCNN,
    "resnet18": ResNet18,
    "preact_resnet18": PreActResNet18,
    "narrow_resnet": NarrowResNet,
    "wide_resnet": WideResNet,
}

"""Networks as values: a frozen dataclass of plain numbers that builds a module from [0,1] images to logits."""

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
    """What a network is before it has weights; any image size fits the module it builds."""

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module: ...


MODELS: dict[str, type] = {
    "small_cnn": SmallCNN,
    "resnet18": ResNet18,
    "preact_resnet18": PreActResNet18,
    "narrow_resnet": NarrowResNet,
    "wide_resnet": WideResNet,
}

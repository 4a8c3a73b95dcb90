"""Network architectures: frozen dataclasses of plain numbers that build a module from images in [0,1] to logits."""

from doubly.models.adapt import AdaptedModel, adapt_model, original_model
from doubly.models.model import Model
from doubly.models.normalize import Normalize
from doubly.models.preact_resnet import PreActResNet18
from doubly.models.resnet import NarrowResNet, ResNet18
from doubly.models.small_cnn import SmallCNN
from doubly.models.wide_resnet import WideResNet

__all__ = [
    "MODELS",
    "AdaptedModel",
    "Model",
    "NarrowResNet",
    "Normalize",
    "PreActResNet18",
    "ResNet18",
    "SmallCNN",
    "WideResNet",
    "adapt_model",
    "original_model",
]


MODELS: dict[str, type[Model]] = {
    "small_cnn": SmallCNN,
    "resnet18": ResNet18,
    "preact_resnet18": PreActResNet18,
    "narrow_resnet": NarrowResNet,
    "wide_resnet": WideResNet,
}

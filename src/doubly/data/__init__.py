"""Data as values: where images come from, how they are thinned out, how they are changed on the way to the model."""

from doubly.data.augment import Augmentation, PadCropFlip, Unchanged
from doubly.data.digits import Digits
from doubly.data.images import DataSource, Images, Splits
from doubly.data.imbalance import Balanced, ExponentialImbalance, Imbalance, StepImbalance

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "IMBALANCES",
    "Augmentation",
    "Balanced",
    "DataSource",
    "Digits",
    "ExponentialImbalance",
    "Images",
    "Imbalance",
    "PadCropFlip",
    "Splits",
    "StepImbalance",
    "Unchanged",
]

DATASETS: dict[str, type] = {"digits": Digits}
IMBALANCES: dict[str, type] = {"balanced": Balanced, "step": StepImbalance, "exponential": ExponentialImbalance}
AUGMENTATIONS: dict[str, type] = {"unchanged": Unchanged, "pad_crop_flip": PadCropFlip}

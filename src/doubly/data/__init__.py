"""Data as values: where images come from, how they are thinned out, how they are changed on the way to the model."""

from doubly.data.arrays import Arrays
from doubly.data.augment import Augmentation, PadCropFlip, ResizedCropFlip, Unchanged
from doubly.data.cifar import CIFAR10, CIFAR100
from doubly.data.digits import Digits
from doubly.data.folder import ImageFolder
from doubly.data.gtsrb import GTSRB
from doubly.data.images import DataSource, Images, Splits
from doubly.data.imbalance import Balanced, ExponentialImbalance, Imbalance, StepImbalance
from doubly.data.kept import KeptImages
from doubly.data.mnist import MNIST, FashionMNIST
from doubly.data.stl10 import STL10
from doubly.data.svhn import SVHN

__all__ = [
    "AUGMENTATIONS",
    "CIFAR10",
    "CIFAR100",
    "DATASETS",
    "GTSRB",
    "IMBALANCES",
    "MNIST",
    "STL10",
    "SVHN",
    "Arrays",
    "Augmentation",
    "Balanced",
    "DataSource",
    "Digits",
    "ExponentialImbalance",
    "FashionMNIST",
    "ImageFolder",
    "Images",
    "Imbalance",
    "KeptImages",
    "PadCropFlip",
    "ResizedCropFlip",
    "Splits",
    "StepImbalance",
    "Unchanged",
]

DATASETS: dict[str, type] = {
    "digits": Digits,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "svhn": SVHN,
    "stl10": STL10,
    "gtsrb": GTSRB,
    "mnist": MNIST,
    "fashion_mnist": FashionMNIST,
    "folder": ImageFolder,
    "arrays": Arrays,
}
IMBALANCES: dict[str, type] = {
    "balanced": Balanced,
    "step": StepImbalance,
    "exponential": ExponentialImbalance,
    "kept": KeptImages,
}
AUGMENTATIONS: dict[str, type] = {
    "unchanged": Unchanged,
    "pad_crop_flip": PadCropFlip,
    "resized_crop_flip": ResizedCropFlip,
}

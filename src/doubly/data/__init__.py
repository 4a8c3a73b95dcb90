"""Datasets: where images come from, which of them are trained on, and how batches are made of them.

`load_splits(Data(CIFAR10()), root)` reads a dataset; `train_split` holds out and thins out its training images;
`loader.batches` yields the batches of an epoch. A dataset, imbalance or augmentation that is listed in the tables
below can be named on the command line and in config.json.
"""

from doubly.data.augmentation import Augmentation, PadCropFlip, ResizedCropFlip, Unchanged
from doubly.data.config import Data
from doubly.data.convert import AnyImages, as_images
from doubly.data.images import DataSource, Images, Splits
from doubly.data.imbalance import Balanced, ExponentialImbalance, Imbalance, SelectedImages, StepImbalance
from doubly.data.sources.arrays import Arrays
from doubly.data.sources.cifar import CIFAR10, CIFAR100
from doubly.data.sources.digits import Digits
from doubly.data.sources.folder import ImageFolder
from doubly.data.sources.gtsrb import GTSRB
from doubly.data.sources.mnist import MNIST, FashionMNIST
from doubly.data.sources.stl10 import STL10
from doubly.data.sources.svhn import SVHN
from doubly.data.sources.tar_shards import TarShards
from doubly.data.splits import TrainSplit, load_splits, train_split

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
    "AnyImages",
    "Arrays",
    "Augmentation",
    "Balanced",
    "Data",
    "DataSource",
    "Digits",
    "ExponentialImbalance",
    "FashionMNIST",
    "ImageFolder",
    "Images",
    "Imbalance",
    "PadCropFlip",
    "ResizedCropFlip",
    "SelectedImages",
    "Splits",
    "StepImbalance",
    "TarShards",
    "TrainSplit",
    "Unchanged",
    "as_images",
    "load_splits",
    "train_split",
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
    "tar": TarShards,
}
IMBALANCES: dict[str, type] = {
    "balanced": Balanced,
    "step": StepImbalance,
    "exponential": ExponentialImbalance,
    "selected": SelectedImages,
}
AUGMENTATIONS: dict[str, type] = {
    "unchanged": Unchanged,
    "pad_crop_flip": PadCropFlip,
    "resized_crop_flip": ResizedCropFlip,
}

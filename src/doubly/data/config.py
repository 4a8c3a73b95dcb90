"""The data of a run: the dataset, and what is done to its training images."""

from dataclasses import dataclass, field

from doubly.data.augmentation import Augmentation, Unchanged
from doubly.data.images import DataSource
from doubly.data.imbalance import Balanced, Imbalance
from doubly.errors import UsageError


@dataclass(frozen=True)
class Data:
    """The dataset of a run, and what is done to its training images.

    Raises:
        UsageError: If a number is out of range.
    """

    source: DataSource
    """the dataset"""
    imbalance: Imbalance = field(default_factory=Balanced)
    """which training images are kept; the test images never change"""
    holdout: float = 0.0
    """share of each class that is not trained on but used to choose the best epoch and hyperparameters;
    it is taken before any imbalance; 0 trains on all images"""
    split: int = 0
    """decides which images are held out; the same for every seed and method"""
    driver_share: float | None = None
    """share of the held-out images that methods such as WAT learn from; the others validate and choose the best epoch;
    none: half of them if the method needs any, else 0"""
    train_images: int | None = None
    """largest number of training images, in the proportions of the classes and always the same ones; none: all;
    ignored where a file lists the images (imbalance.selected)"""
    test_per_class: int | None = None
    """number of test images of each class, the first ones; none: all (the paper's confusion matrices of SVHN: 1500)"""
    augment: Augmentation = field(default_factory=Unchanged)
    """random changes of each training batch"""
    root: str | None = None
    """folder with the dataset's files"""

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise UsageError(f"holdout is a share in [0, 1), got {self.holdout}")
        if self.driver_share is not None and not 0 <= self.driver_share < 1:
            raise UsageError(f"driver_share is a share of the hold-out in [0, 1), got {self.driver_share}")
        for name in ("train_images", "test_per_class"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, or none for all images, got {value}")

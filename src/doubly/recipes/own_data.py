"""Runs on images without a recipe: the defaults of `doubly train --data DATA --method METHOD`, all in one place.

size        as it is, up to 64 pixels of one size; else 64 pixels, or 32 where half of the images are smaller
network     SmallCNN up to 16 pixels, NarrowResNet up to 64, ResNet-18 above
attack      epsilon 8/255; 5 steps of 0.4 epsilon in training, 20 of epsilon / 4 in validation and evaluation;
            epsilon grows over the first fifth of training
augment     from 24 pixels on, crops by an eighth of the size, and mirror images
hold-out    a tenth of each class, which chooses the best epoch and lets `doubly repair` fit
training    30 epochs, SGD with a cyclic learning rate of peak 0.1; batches of 128, or 32 below 5,000 images
"""

from pathlib import Path
from statistics import median
from typing import NamedTuple

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.config import SGD, Data, Run, Validation
from doubly.config.serialize import suggestion
from doubly.data import Augmentation, DataSource, ImageFolder, PadCropFlip, Unchanged, load_splits
from doubly.data.sources.folder import image_sizes
from doubly.errors import UsageError
from doubly.methods import DONE
from doubly.models import Model, NarrowResNet, ResNet18, SmallCNN
from doubly.recipes.methods import LABELS, methods
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

EPSILON, STEPS, EPOCHS, PEAK, WARM_UP, HOLDOUT = 8 / 255, 5, 30, 0.1, 0.2, 0.1
SIZES = (32, 64)  # pixels to which photos are resized
MIN_CROP_SIZE = 24  # pixels from which images are augmented
FEW_IMAGES, SMALL_BATCH, BATCH = 5_000, 32, 128


class Look(NamedTuple):
    """What a look at a dataset shows: the source with a size, the number of training images, pixels, and a note."""

    source: DataSource
    images: int
    size: int
    note: str


def look_at(source: DataSource, root: Path | None) -> Look:
    """Find the number and size of the images of a dataset; a folder of photos of many sizes gets one size.

    Raises:
        UsageError: If the images cannot be read.
    """
    if isinstance(source, ImageFolder) and source.size is None:
        return _look_at_folder(source, root)
    train = load_splits(Data(source), root).train
    return Look(source, len(train), max(train.x.shape[2:]), "")


def _look_at_folder(source: ImageFolder, root: Path | None) -> Look:
    sizes, count = image_sizes(source, root)
    if len(set(sizes)) == 1 and max(sizes[0]) <= max(SIZES):
        return Look(source, count, max(sizes[0]), "")
    size = max(SIZES) if median(map(min, sizes)) >= max(SIZES) else min(SIZES)
    low, high = (f"{width}x{height}" for width, height in (min(sizes), max(sizes)))
    found = low if low == high else f"{low} to {high}"
    note = f"images of {found} pixels are resized to {size}x{size}; --data.source.size chooses another size"
    return Look(ImageFolder(source.path, size, source.fit, source.test_share, source.memory), count, size, note)


def own_data_run(name: str, look: Look, root: str | None, method: str) -> Run:
    """Return a run of a method on images of the user's own.

    Args:
        name: What the data is called, for the name of the run.
        look: What `look_at` returned.
        root: Folder with the files.
        method: Name of a method, as in recipes.

    Raises:
        UsageError: If there is no such method.
    """
    available = methods(
        LinfBall(EPSILON),
        EPSILON * 2 / STEPS,  # two radii in all, so that the attack can cross its ball
        STEPS,
        DONE(cap=5.0, damping=100.0, implicit="first_order"),
        gradient_step=1250 / 255,
        spanning_step=5000 / 255,
        cfol_eta=0.25 / look.images,
    )
    if method not in available:
        raise UsageError(f"there is no method '{method}'{suggestion(method, available)}")
    return Run(
        name=f"{name}.{method}",
        label=LABELS.get(method, ""),
        data=Data(look.source, holdout=HOLDOUT, augment=_augmentation(look.size), root=root),
        model=_network(look.size),
        method=available[method],
        optimizer=SGD(lr=Cyclic(PEAK)),
        validation=Validation(attack=PGD(LinfBall(EPSILON), 20, SignStep(EPSILON / 4))),
        epochs=EPOCHS,
        batch_size=SMALL_BATCH if look.images < FEW_IMAGES else BATCH,
        warm_up=WARM_UP,
    )


def _network(size: int) -> Model:
    return SmallCNN() if size <= 16 else NarrowResNet(16, 1) if size <= max(SIZES) else ResNet18()


def _augmentation(size: int) -> Augmentation:
    return Unchanged() if size < MIN_CROP_SIZE else PadCropFlip(size // 8)

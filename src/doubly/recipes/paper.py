"""Recipes on CIFAR-10, SVHN, STL-10 and GTSRB as in the paper, and small ones for two CPU cores.

The paper's settings: ResNet-18, 60 epochs (25 in the fast setting), batch size 128, cyclic learning rate with peak 0.2,
epsilon 8/255, K = 10 steps of 2/255, r = 10, 1, 0.1. Our choices where the paper does not say: the augmentation of each
dataset, how classes are made imbalanced, and a bound on the mean of DONE's weights over a batch. SVHN alone has a lower
peak and a warm-up of epsilon, since at 0.2 networks collapse to its most frequent digit; the paper's value is
`--optimizer.lr.peak 0.2 --warm-up 0`. The small recipes are chosen so that their numbers say something, not to look
good: see `Small`.
"""

from dataclasses import dataclass, replace
from functools import cache

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.config import SGD, Data, Run, Validation
from doubly.data import (
    CIFAR10,
    GTSRB,
    STL10,
    SVHN,
    Augmentation,
    Balanced,
    DataSource,
    PadCropFlip,
    StepImbalance,
    Unchanged,
)
from doubly.data.download.published import PUBLISHED
from doubly.methods import DONE, Method
from doubly.models import NarrowResNet, ResNet18
from doubly.recipes.methods import FAST, FAST_EPOCHS, LABELS, SAMPLING, TABLES, holdout_share, methods
from doubly.schedules import Cyclic
from doubly.threat import LinfBall


@dataclass(frozen=True)
class Small:
    """Settings of a small recipe: minutes of training on two cores, epsilon and ratio such that AT's tail is above 0.

    Attributes:
        images: Most training images.
        epochs: Epochs; fewer for the fast methods.
        epsilon: Radius of the threat.
        ratio: Share of the images that the thinned classes keep in imbalanced recipes.
        batch: Images per step.
        peak: Highest learning rate.
        steps: Steps of the training attack.
        width: Channels of the network's first stage.
        warm_up: Share of training over which epsilon grows.
        source: The dataset, if only a part of it is read.
    """

    images: int
    epochs: int
    epsilon: float
    ratio: float
    batch: int = 128
    peak: float = 0.1
    steps: int = 3
    width: int = 16
    warm_up: float = 0.0
    source: DataSource | None = None


@dataclass(frozen=True)
class Setting:
    """Settings that differ between datasets."""

    source: DataSource
    small: Small
    augment: Augmentation
    peak: float = 0.2
    warm_up: float = 0.0


SETTINGS = {
    "cifar10": Setting(CIFAR10(), Small(16_000, 8, 2 / 255, 0.7, batch=64, source=CIFAR10(batches=2)), PadCropFlip()),
    "svhn": Setting(
        SVHN(), Small(3_000, 20, 2 / 255, 0.5, batch=32, steps=5, warm_up=0.5), Unchanged(), peak=0.05, warm_up=5 / 60
    ),
    "stl10": Setting(STL10(), Small(700, 40, 1 / 255, 0.7, batch=16, peak=0.05, width=8), PadCropFlip()),
    "gtsrb": Setting(GTSRB(), Small(1_307, 60, 2 / 255, 0.5, batch=16, warm_up=0.5), PadCropFlip(flip=False)),
}
VARIANTS = {"at_031": (0.031, 0.007)}  # epsilon and step in training of AT in the code of TRADES and GAIRAT


@cache  # all methods are made at once, and used one by one
def _methods(epsilon: float, step: float, steps: int, done: DONE, images: int) -> dict[str, Method]:
    return methods(
        LinfBall(epsilon),
        step,
        steps,
        done,
        gradient_step=1250 / 255 * epsilon / (8 / 255),
        spanning_step=5000 / 255 * epsilon / (8 / 255),
        cfol_eta=0.25 / images,
    )


def paper_recipe(dataset: str, method: str, imbalanced: bool) -> Run:
    """Return the run of a method with the paper's settings."""
    setting = SETTINGS[dataset]
    epsilon, step = VARIANTS.get(method, (8 / 255, 2 / 255))
    methods_by_name = _methods(epsilon, step, 10, DONE(mean_weight_limit=10.0), PUBLISHED[dataset].train)
    chosen = methods_by_name["at" if method in VARIANTS else method]
    imbalance = StepImbalance(0.2) if imbalanced else Balanced()
    return Run(
        name=f"{dataset}.{'imbalanced.' if imbalanced else ''}{method}",
        label=LABELS.get(method, ""),
        table=TABLES.get(method, ""),
        data=Data(setting.source, imbalance, holdout_share(chosen), augment=setting.augment),
        model=ResNet18(),
        method=chosen,
        optimizer=SGD(lr=Cyclic(setting.peak)),
        validation=Validation(attack=PGD(LinfBall(8 / 255), 20, SignStep(2 / 255))),
        epochs=FAST_EPOCHS if method in FAST else 60,
        sampling=SAMPLING.get(method, "shuffled"),
        warm_up=setting.warm_up,
    )


def small_recipe(dataset: str, method: str, imbalanced: bool) -> Run:
    """Return the run of a method for two CPU cores."""
    setting = SETTINGS[dataset]
    small = setting.small
    step = small.epsilon * 2 / small.steps  # two radii in all, so that the attack can cross its ball
    done = DONE(cap=5.0, damping=100.0, implicit="first_order")
    methods_by_name = _methods(small.epsilon, step, small.steps, done, small.images)
    run = paper_recipe(dataset, method, imbalanced)
    return replace(
        run,
        name=f"{dataset}.{'imbalanced.' if imbalanced else ''}small.{method}",
        data=replace(
            run.data,
            source=small.source or setting.source,
            train_images=small.images,
            imbalance=StepImbalance(small.ratio) if imbalanced else Balanced(),
        ),
        model=NarrowResNet(small.width, 1),
        method=methods_by_name[method],
        optimizer=SGD(lr=Cyclic(small.peak)),
        validation=Validation(every=10, attack=PGD(LinfBall(small.epsilon), 20, SignStep(small.epsilon / 4))),
        epochs=round(small.epochs * FAST_EPOCHS / 60) if method in FAST else small.epochs,
        batch_size=small.batch,
        warm_up=small.warm_up,
    )

"""CIFAR-10, SVHN, STL-10 and GTSRB as in the paper, and a small sibling of each for two CPU cores.

The paper's numbers: ResNet-18, 60 epochs (25 in the fast setting), batch 128, cyclic learning rate with peak 0.2,
epsilon 8/255, K = 10 steps of 2/255, r = 10, 1, 0.1. Where it is silent, methods.md decides: augmentation A27,
imbalance A18 and A19, DONE's weights literal but for a bound on their mean over a batch (A4). SVHN alone has a lower
peak and an epsilon warm-up (A25), since at 0.2 networks collapse to its most frequent digit; the literal value is
`--optimizer.lr.peak 0.2 --warm-up 0`. The small ones are chosen so that their numbers measure something, not to look
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
from doubly.recipes.methods import FAST, FAST_EPOCHS, LABELS, TABLES, methods
from doubly.schedules import Cyclic
from doubly.threat import LinfBall


@dataclass(frozen=True)
class Small:
    """At most eight minutes of training on two cores; epsilon and the ratio are such that AT's tail is not at zero."""

    images: int  # at most
    epochs: int
    epsilon: float
    ratio: float
    batch: int = 128
    peak: float = 0.1
    steps: int = 3
    width: int = 16
    warm_up: float = 0.0
    source: DataSource | None = None  # where less of it can be read than all


@dataclass(frozen=True)
class Setting:
    """What a dataset has of its own."""

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


@cache  # all of them are made at once, and asked for one by one
def _methods(epsilon: float, step: float, steps: int, done: DONE, images: int) -> dict[str, Method]:
    return methods(
        LinfBall(epsilon),
        step,
        steps,
        done,
        gradient_step=1250 / 255 * epsilon / (8 / 255),
        spanning_step=5000 / 255 * epsilon / (8 / 255),
        pace=0.25 / images,
    )


def paper_recipe(dataset: str, method: str, imbalanced: bool) -> Run:
    setting = SETTINGS[dataset]
    epsilon, step = VARIANTS.get(method, (8 / 255, 2 / 255))
    known = _methods(epsilon, step, 10, DONE(mean_weight_limit=10.0), PUBLISHED[dataset].train)
    return Run(
        name=f"{dataset}.{'imbalanced.' if imbalanced else ''}{method}",
        label=LABELS.get(method, ""),
        table=TABLES.get(method, ""),
        data=Data(setting.source, StepImbalance(0.2) if imbalanced else Balanced(), augment=setting.augment),
        model=ResNet18(),
        method=known["at" if method in VARIANTS else method],
        optimizer=SGD(lr=Cyclic(setting.peak)),
        validation=Validation(attack=PGD(LinfBall(8 / 255), 20, SignStep(2 / 255))),
        epochs=FAST_EPOCHS if method in FAST else 60,
        warm_up=setting.warm_up,
    )


def small_recipe(dataset: str, method: str, imbalanced: bool) -> Run:
    setting = SETTINGS[dataset]
    small = setting.small
    step = small.epsilon * 2 / small.steps  # two radii in all, so that the attack can cross its ball
    done = DONE(cap=5.0, damping=100.0, implicit="first_order")
    known = _methods(small.epsilon, step, small.steps, done, small.images)
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
        method=known[method],
        optimizer=SGD(lr=Cyclic(small.peak)),
        validation=Validation(every=10, attack=PGD(LinfBall(small.epsilon), 20, SignStep(small.epsilon / 4))),
        epochs=round(small.epochs * FAST_EPOCHS / 60) if method in FAST else small.epochs,
        batch_size=small.batch,
        warm_up=small.warm_up,
    )

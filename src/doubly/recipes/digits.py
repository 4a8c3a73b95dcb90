"""Digits, 1,797 real images of 8x8 that come with scikit-learn. epsilon 0.15, attack step epsilon/4.

Learning rate, weight decay and what a method has of its own are what its search chose: of AT and DONE in digits.json
(`doubly reproduce digits_done`, docs/digits.md), of all others in digits_comparison.json (`doubly reproduce digits`,
docs/results.md). r is the paper's. damping
100 keeps the implicit term a fraction of the gradient: at 10 it is half as long as the whole gradient in DONE-GD
(docs/numerics.md). One plain gradient step that is to span the ball has size 4.
"""

import json
from importlib.resources import files
from typing import Any

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.config import SGD, Data, Run, Validation
from doubly.config.serialize import with_changes
from doubly.data import Balanced, Digits, StepImbalance
from doubly.methods import DONE
from doubly.models import SmallCNN
from doubly.recipes.methods import FAST as FAST_NAMES
from doubly.recipes.methods import FAST_EPOCHS, LABELS, TABLES, methods
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

THREAT = LinfBall(0.15)
STEP = 0.15 / 4


def _chosen(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(files("doubly.recipes").joinpath(name).read_text("utf-8"))
    return found


CHOSEN = {**_chosen("digits_comparison.json"), **_chosen("digits.json")}


def attack(steps: int = 10) -> PGD:
    return PGD(THREAT, steps, SignStep(STEP))


ALL = methods(
    THREAT,
    STEP,
    10,
    DONE(attack(), cap=5.0, damping=100.0, implicit="first_order"),
    gradient_step=1.0,
    spanning_step=4.0,
    pace=2e-4,  # the published one, for about 1,400 images
)
METHODS = {name: method for name, method in ALL.items() if name not in FAST_NAMES}
FAST = {name: ALL[name] for name in FAST_NAMES}


def unsearched(method: str, imbalanced: bool) -> Run:
    """The recipe before any search."""
    return Run(
        name=f"digits.{'imbalanced.' if imbalanced else ''}{method}",
        label=LABELS.get(method, ""),
        table=TABLES.get(method, ""),
        data=Data(Digits(), StepImbalance(0.2) if imbalanced else Balanced()),
        model=SmallCNN(16),
        method=ALL[method],
        optimizer=SGD(lr=Cyclic(0.1)),
        validation=Validation(every=10, attack=attack(steps=20)),
        epochs=FAST_EPOCHS if method in FAST else 60,
        channels_last="no",
    )


def digits(method: str, imbalanced: bool) -> Run:
    run = unsearched(method, imbalanced)
    return with_changes(run, CHOSEN.get(run.name, {}))

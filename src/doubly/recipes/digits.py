"""Recipes on digits, 1,797 real images of 8x8 pixels that come with scikit-learn; epsilon 0.15, attack step epsilon/4.

Learning rate, weight decay and a method's own settings are those that a search chose: digits.json for AT and DONE
(`doubly reproduce digits_done`, docs/digits.md), digits_comparison.json for the others (`doubly reproduce digits`,
docs/results.md). The temperature r is the paper's. A damping of 100 keeps the implicit term a fraction of the gradient:
at 10 it is half as long as the whole gradient in DONE-GD (docs/numerics.md). A single gradient step across the ball has
size 4.
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
from doubly.recipes.methods import FAST_EPOCHS, LABELS, SAMPLING, TABLES, holdout_share, methods
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

THREAT = LinfBall(0.15)
STEP = 0.15 / 4


def _read_settings(name: str) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = json.loads(files("doubly.recipes").joinpath(name).read_text("utf-8"))
    return settings


CHOSEN = {**_read_settings("digits_comparison.json"), **_read_settings("digits.json")}  # recipe -> changes


def attack(steps: int = 10) -> PGD:
    """Return the PGD attack of the recipes."""
    return PGD(THREAT, steps, SignStep(STEP))


ALL = methods(
    THREAT,
    STEP,
    10,
    DONE(attack(), cap=5.0, damping=100.0, implicit="first_order"),
    gradient_step=1.0,
    spanning_step=4.0,
    cfol_eta=2e-4,  # the published value, for about 1,400 images
)
METHODS = {name: method for name, method in ALL.items() if name not in FAST_NAMES}
FAST = {name: ALL[name] for name in FAST_NAMES}


def unsearched(method: str, imbalanced: bool) -> Run:
    """Return the run of a method with the settings from before any search."""
    return Run(
        name=f"digits.{'imbalanced.' if imbalanced else ''}{method}",
        label=LABELS.get(method, ""),
        table=TABLES.get(method, ""),
        data=Data(Digits(), StepImbalance(0.2) if imbalanced else Balanced(), holdout_share(ALL[method])),
        model=SmallCNN(16),
        method=ALL[method],
        optimizer=SGD(lr=Cyclic(0.1)),
        validation=Validation(every=10, attack=attack(steps=20)),
        epochs=FAST_EPOCHS if method in FAST else 60,
        sampling=SAMPLING.get(method, "shuffled"),
        channels_last="no",
    )


def digits(method: str, imbalanced: bool) -> Run:
    """Return the run of a method with the settings that its search chose."""
    run = unsearched(method, imbalanced)
    chosen: Run = with_changes(run, CHOSEN.get(run.name, {}))
    return chosen

"""Digits, 1,797 real images of 8x8 that come with scikit-learn. epsilon 0.15, attack step epsilon/4.

Learning rate, epochs, weight decay and cap of each recipe are what its search chose (digits.json, made by
`doubly reproduce digits`; docs/digits.md); r is the paper's. damping 100 keeps the implicit term a fraction of the
gradient: at 10 it is half as long as the whole gradient in DONE-GD (docs/numerics.md).
"""

import json
from importlib.resources import files
from typing import Any

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, BarrierStep, SignStep, StepRule
from doubly.data import Balanced, Digits, StepImbalance
from doubly.methods import AT, DONE, Standard
from doubly.models import SmallCNN
from doubly.runs import SGD, Data, Probe, Run
from doubly.runs.search import with_changes
from doubly.schedules import Cyclic
from doubly.threat import LinfBall
from doubly.types import Method

THREAT = LinfBall(0.15)
STEP = 0.15 / 4
CHOSEN: dict[str, dict[str, Any]] = json.loads(files("doubly.recipes").joinpath("digits.json").read_text("utf-8"))


def attack(rule: StepRule | None = None, steps: int = 10) -> PGD:
    return PGD(THREAT, steps, rule or SignStep(STEP))


def done(rule: StepRule) -> DONE:
    return DONE(attack(rule), cap=5.0, damping=100.0, implicit="first_order")


METHODS: dict[str, Method] = {
    "standard": Standard(),
    "at": AT(attack()),
    "done_pgd": done(SignStep(STEP)),
    "done_gd": done(BarrierStep(1.0)),
    "done_adam": done(AdamStep(STEP)),
}


def digits(method: str, imbalanced: bool) -> Run:
    run = Run(
        name=f"digits.{'imbalanced.' if imbalanced else ''}{method}",
        data=Data(Digits(), StepImbalance(0.2) if imbalanced else Balanced()),
        model=SmallCNN(16),
        method=METHODS[method],
        optimiser=SGD(lr=Cyclic(0.1)),
        probe=Probe(every=10, attack=attack(steps=20)),
        channels_last="no",
    )
    return with_changes(run, CHOSEN.get(run.name, {}))

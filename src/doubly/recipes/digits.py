"""Digits, 1,797 real images of 8x8 that come with scikit-learn. epsilon 0.15, attack step epsilon/4."""

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, BarrierStep, SignStep, StepRule
from doubly.data import Balanced, Digits, StepImbalance
from doubly.methods import AT, DONE, Standard
from doubly.models import SmallCNN
from doubly.runs import SGD, Data, Probe, Run
from doubly.schedules import Cyclic
from doubly.threat import LinfBall
from doubly.types import Method

THREAT = LinfBall(0.15)
STEP = 0.15 / 4


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
    return Run(
        name=f"digits.{'imbalanced.' if imbalanced else ''}{method}",
        data=Data(Digits(), StepImbalance(0.2) if imbalanced else Balanced()),
        model=SmallCNN(16),
        method=METHODS[method],
        optimiser=SGD(lr=Cyclic(0.1)),
        probe=Probe(every=10, attack=attack(steps=20)),
        channels_last="no",
    )

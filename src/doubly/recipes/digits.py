"""Digits, 1,797 real images of 8x8 that come with scikit-learn. epsilon 0.15, attack step epsilon/4.

Learning rate, weight decay and what a method has of its own are what its search chose: of AT and DONE in digits.json
(`doubly reproduce digits_done`, docs/digits.md), of all others in digits_comparison.json (`doubly reproduce digits`),
which is empty until that study has been run here: till then they have the defaults below. r is the paper's. damping
100 keeps the implicit term a fraction of the gradient: at 10 it is half as long as the whole gradient in DONE-GD
(docs/numerics.md). One plain gradient step that is to span the ball has size 4.
"""

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

from doubly.attacks import FGSM, NFGSM, PGD
from doubly.bilevel import AdamStep, BarrierStep, FirstThen, GradientStep, SignStep, StepRule
from doubly.data import Balanced, Digits, StepImbalance
from doubly.methods import (
    AT,
    AWP,
    CFOL,
    DONE,
    FAT,
    FRL,
    GAIRAT,
    MAIL,
    MART,
    TRADES,
    WMMR,
    FastATGA,
    FastBAT,
    Standard,
)
from doubly.models import SmallCNN
from doubly.runs import SGD, Data, Probe, Run
from doubly.runs.search import with_changes
from doubly.schedules import Cyclic
from doubly.threat import LinfBall
from doubly.types import Method

THREAT = LinfBall(0.15)
STEP = 0.15 / 4
FAST_EPOCHS = 25  # the paper's fast setting


def _chosen(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(files("doubly.recipes").joinpath(name).read_text("utf-8"))
    return found


CHOSEN = {**_chosen("digits_comparison.json"), **_chosen("digits.json")}


def attack(rule: StepRule | None = None, steps: int = 10) -> PGD:
    return PGD(THREAT, steps, rule or SignStep(STEP))


def near() -> PGD:
    """From noise around the image, as TRADES, MART, MAIL and FRL attack."""
    return replace(attack(), start="gaussian")


def done(rule: StepRule) -> DONE:
    return DONE(attack(rule), cap=5.0, damping=100.0, implicit="first_order")


METHODS: dict[str, Method] = {
    "at": AT(attack()),
    "standard": Standard(),
    "at_balanced_loss": AT(attack(), balance="loss"),
    "at_balanced_sampling": AT(attack(), balance="sampling"),
    "fat": FAT(attack()),
    "gairat": GAIRAT(attack()),
    "wmmr": WMMR(attack()),
    "mail": MAIL(near()),
    "mail_trades": MAIL(near(), "trades", slope=2.0, bias=0.0, attack_on="kl"),
    "trades": TRADES(near()),
    "mart": MART(near()),
    "awp": AWP(AT(attack())),
    "awp_done": AWP(done(SignStep(STEP))),
    "cfol": CFOL(attack(), eta=2e-4),  # the published pace, for about 1,400 images
    "cfol_reweighting": CFOL(attack(), mode="reweighting", eta=2e-4),
    "frl": FRL(near()),
    "done_pgd": done(SignStep(STEP)),
    "done_gd": done(BarrierStep(1.0)),
    "done_adam": done(AdamStep(STEP)),
    "done_chi2": replace(done(SignStep(STEP)), divergence="chi2"),
    "done_cvar": replace(done(SignStep(STEP)), divergence="cvar", cap=2.0),
}
FAST: dict[str, Method] = {
    "fast_at": AT(FGSM(THREAT, 1.25, "uniform")),
    "fast_at_ga": FastATGA(FGSM(THREAT, 1.25)),
    "fast_bat": FastBAT(PGD(THREAT, 1, GradientStep(4.0))),
    "n_fgsm": AT(NFGSM(THREAT)),
    "done_fast": DONE(
        PGD(THREAT, 2, FirstThen(SignStep(1.25 * THREAT.radius), BarrierStep(4.0))),
        cap=5.0,
        damping=100.0,
    ),
}


def unsearched(method: str, imbalanced: bool) -> Run:
    """The recipe before any search."""
    return Run(
        name=f"digits.{'imbalanced.' if imbalanced else ''}{method}",
        data=Data(Digits(), StepImbalance(0.2) if imbalanced else Balanced()),
        model=SmallCNN(16),
        method={**METHODS, **FAST}[method],
        optimiser=SGD(lr=Cyclic(0.1)),
        probe=Probe(every=10, attack=attack(steps=20)),
        epochs=FAST_EPOCHS if method in FAST else 60,
        channels_last="no",
    )


def digits(method: str, imbalanced: bool) -> Run:
    run = unsearched(method, imbalanced)
    return with_changes(run, CHOSEN.get(run.name, {}))

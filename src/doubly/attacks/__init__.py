"""Attacks are values: called with (model, x, y, generator) they return delta. `ATTACKS` lists them."""

from doubly.attacks.cached import CachedAttack
from doubly.attacks.fgsm import FGSM
from doubly.attacks.mode import (
    attacked,
    clean_pass,
    device_of,
    draws,
    evaluating,
    parameters_frozen,
    repeating,
    statistics_frozen,
)
from doubly.attacks.n_fgsm import NFGSM
from doubly.attacks.pgd import PGD

ATTACKS: dict[str, type] = {"pgd": PGD, "fgsm": FGSM, "n_fgsm": NFGSM}

__all__ = [
    "ATTACKS",
    "FGSM",
    "NFGSM",
    "PGD",
    "CachedAttack",
    "attacked",
    "clean_pass",
    "device_of",
    "draws",
    "evaluating",
    "parameters_frozen",
    "repeating",
    "statistics_frozen",
]

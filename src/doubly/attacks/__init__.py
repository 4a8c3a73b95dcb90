"""Attacks are values: called with (model, x, y, generator) they return delta. `ATTACKS` lists them."""

from doubly.attacks.fgsm import FGSM
from doubly.attacks.mode import attacked, evaluating, parameters_frozen, statistics_frozen
from doubly.attacks.pgd import PGD

ATTACKS: dict[str, type] = {"pgd": PGD, "fgsm": FGSM}

__all__ = ["ATTACKS", "FGSM", "PGD", "attacked", "evaluating", "parameters_frozen", "statistics_frozen"]

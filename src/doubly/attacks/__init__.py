"""Attacks: called with (model, x, y, generator) they return delta. `ATTACKS` lists them by name."""

from doubly.attacks.attack import Attack
from doubly.attacks.fgsm import FGSM
from doubly.attacks.mode import (
    attack_context,
    clean_logits,
    eval_mode,
    frozen_parameters,
    frozen_statistics,
    model_device,
    replay_rng,
    rng_state,
)
from doubly.attacks.n_fgsm import NFGSM
from doubly.attacks.pgd import PGD, MarginPGD
from doubly.attacks.stopping_pgd import StoppingPGD
from doubly.attacks.strong import Strong

ATTACKS: dict[str, type[Attack]] = {
    "pgd": PGD,
    "margin": MarginPGD,
    "strong": Strong,
    "stopping_pgd": StoppingPGD,
    "fgsm": FGSM,
    "n_fgsm": NFGSM,
}

__all__ = [
    "ATTACKS",
    "FGSM",
    "NFGSM",
    "PGD",
    "Attack",
    "MarginPGD",
    "StoppingPGD",
    "Strong",
    "attack_context",
    "clean_logits",
    "eval_mode",
    "frozen_parameters",
    "frozen_statistics",
    "model_device",
    "replay_rng",
    "rng_state",
]

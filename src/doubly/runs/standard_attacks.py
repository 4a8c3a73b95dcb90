"""The attacks that an evaluation runs, from names or as given."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from doubly.attacks import PGD
from doubly.attacks.autoattack import QUICK, AutoAttack
from doubly.bilevel import NormalisedStep, SignStep
from doubly.errors import UsageError
from doubly.losses import LogitMargin
from doubly.threat import LinfBall, NormBall
from doubly.types import Attack

NAMES = ("pgd", "margin", "autoattack", "quick")
AnyAttack = str | Attack | AutoAttack
Attacks = Sequence[AnyAttack] | Mapping[str, Attack | AutoAttack]


def pgd20(threat: NormBall) -> PGD:
    """20 steps of a quarter of the radius, uniform start, last iterate (A23: 2/255 at 8/255)."""
    size = threat.radius / 4
    return PGD(threat, 20, SignStep(size) if isinstance(threat, LinfBall) else NormalisedStep(size))


def chosen(attacks: Attacks, pgd: PGD) -> tuple[dict[str, Attack], AutoAttack | None]:
    """(attacks by name, AutoAttack or None). `pgd` is what the names stand for, and its threat AutoAttack's."""
    pairs = attacks.items() if isinstance(attacks, Mapping) else [(None, attack) for attack in attacks]
    plain: dict[str, Attack] = {}
    ensemble: AutoAttack | None = None
    for given, attack in pairs:
        made = _made(attack, pgd) if isinstance(attack, str) else attack
        if isinstance(made, AutoAttack):
            if ensemble is not None:
                raise UsageError("an evaluation runs AutoAttack once: give autoattack or quick, not both")
            ensemble = made
            continue
        name = given or (attack if isinstance(attack, str) else _name(made, plain))
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in ("clean", "y", "ids", *plain, *NAMES[2:]):
            raise UsageError(f"'{name}' cannot name an attack: use a new name of small letters, digits and _")
        plain[name] = made
    return plain, ensemble


def _made(name: str, pgd: PGD) -> Attack | AutoAttack:
    ball: Any = pgd.threat  # AutoAttack refuses what is none
    made: dict[str, Any] = {
        "pgd": lambda: pgd,
        "margin": lambda: replace(pgd, loss=LogitMargin()),
        "autoattack": lambda: AutoAttack(ball),
        "quick": lambda: AutoAttack(ball, QUICK),
    }
    if name not in made:
        raise UsageError(f"there is no attack '{name}': use {', '.join(NAMES)}, or an attack such as PGD(…)")
    attack: Attack | AutoAttack = made[name]()
    return attack


def _name(attack: Attack, taken: Mapping[str, Attack]) -> str:
    if not callable(attack):
        raise UsageError(f"{attack!r} is no attack: use {', '.join(NAMES)}, or an attack such as PGD(…)")
    name = type(attack).__name__.lower()
    if isinstance(attack, PGD) and isinstance(attack.loss, LogitMargin):
        name = "margin"
    return name if name not in taken else f"{name}_{len(taken)}"

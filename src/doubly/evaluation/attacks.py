"""The attacks that an evaluation runs, from names or as given."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from doubly.attacks import PGD
from doubly.attacks.autoattack import QUICK, AutoAttack
from doubly.bilevel import NormalizedStep, SignStep
from doubly.config.serialize import to_json
from doubly.errors import UsageError
from doubly.losses import LogitMargin
from doubly.threat import LinfBall, NormBall
from doubly.types import Attack

NAMES = ("pgd", "margin", "autoattack", "quick")
RESERVED = ("clean", "y", "ids", "weights", "aa", "apgd", "worst_case", "share", "rounding", "file", "allow_pickle")
AnyAttack = str | Attack | AutoAttack
Attacks = AnyAttack | Sequence[AnyAttack] | Mapping[str, Attack | AutoAttack]


def pgd20(threat: NormBall) -> PGD:
    """20 steps of a quarter of the radius, uniform start, last iterate (A23: 2/255 at 8/255)."""
    size = threat.radius / 4
    return PGD(threat, 20, SignStep(size) if isinstance(threat, LinfBall) else NormalizedStep(size))


def listed(attacks: Attacks) -> list[tuple[str | None, AnyAttack]]:
    """(name if one was given, attack); one attack is a list of one."""
    if isinstance(attacks, Mapping):
        return list(attacks.items())
    if isinstance(attacks, Sequence) and not isinstance(attacks, str):
        return [(None, attack) for attack in attacks]
    return [(None, attacks)]


def ball_of(attacks: Attacks, threat: NormBall | None) -> NormBall:
    """The ball that all attacks of an evaluation share: the one asked for, or that of the attacks handed in."""
    threats = [getattr(attack, "threat", None) for _, attack in listed(attacks)]
    balls = [found for found in threats if isinstance(found, NormBall)]
    found = threat or (balls[0] if balls else LinfBall())
    other = next((ball for ball in balls if (type(ball), ball.radius) != (type(found), found.radius)), None)
    if other is not None:
        raise UsageError(
            f"an evaluation has one threat, got {found} and {other}: give attacks of one ball, or evaluate twice"
        )
    return found


def chosen(attacks: Attacks, pgd: PGD, seed: int = 0) -> tuple[dict[str, Attack], AutoAttack | None]:
    """(attacks by name, AutoAttack or None). `pgd` is what the names stand for, and its threat AutoAttack's."""
    plain: dict[str, Attack] = {}
    ensemble: AutoAttack | None = None
    for given, attack in listed(attacks):
        made = _made(attack, pgd, seed) if isinstance(attack, str) else _checked(attack)
        if isinstance(made, AutoAttack):
            if ensemble is not None:
                raise UsageError("an evaluation runs AutoAttack once: give autoattack or quick, not both")
            ensemble = made
            continue
        name = given or (attack if isinstance(attack, str) else _name(made, plain))
        _check_name(name, plain)
        plain[name] = made
    return plain, ensemble


def described(attacks: Mapping[str, Attack]) -> dict[str, Any]:
    """For the protocol: pgd as `attack`; the others too, but for a margin attack that follows from it."""
    pgd = attacks.get("pgd")
    implied = replace(pgd, loss=LogitMargin()) if isinstance(pgd, PGD) else None
    others = {
        name: _described(a) for name, a in attacks.items() if name != "pgd" and (name != "margin" or a != implied)
    }
    first = {} if pgd is None else {"attack": _described(pgd)}
    return {**first, **({"attacks": others} if others else {})}


def _described(attack: Any) -> Any:
    try:
        if is_dataclass(attack):
            return json.loads(json.dumps(to_json(attack)))
    except (UsageError, TypeError):  # of somebody's own making
        pass
    return {"kind": f"{type(attack).__module__}.{type(attack).__qualname__}", "is": f"{attack!r:.200}"}


def _made(name: str, pgd: PGD, seed: int) -> Attack | AutoAttack:
    ball: Any = pgd.threat  # AutoAttack refuses what is none
    made: dict[str, Any] = {
        "pgd": lambda: pgd,
        "margin": lambda: replace(pgd, loss=LogitMargin()),
        "autoattack": lambda: AutoAttack(ball, seed=seed),
        "quick": lambda: AutoAttack(ball, QUICK, seed=seed),
    }
    if name not in made:
        raise UsageError(f"there is no attack '{name}': use {', '.join(NAMES)}, or an attack such as PGD(…)")
    attack: Attack | AutoAttack = made[name]()
    return attack


def _checked(attack: Any) -> Attack | AutoAttack:
    if isinstance(attack, type) or not (callable(attack) or isinstance(attack, AutoAttack)):
        raise UsageError(f"{attack!r:.60} is no attack: use {', '.join(NAMES)}, or an attack such as PGD(…)")
    return attack  # type: ignore[no-any-return]


def _check_name(name: str, taken: Mapping[str, Attack]) -> None:
    """Names of attacks become names of arrays in evaluation.npz and of fields in evaluation.json."""
    fit = re.fullmatch(r"(?!after_)[a-z][a-z0-9_]*(?<!_losses)(?<!_margins)", str(name)) and "tail_30" not in name
    if not fit or name in (*RESERVED, *NAMES[2:], *taken):
        raise UsageError(f"'{name}' cannot name an attack: use a new name of small letters, digits and _")


def _name(attack: Attack, taken: Mapping[str, Attack]) -> str:
    name = type(attack).__name__.lower()
    if isinstance(attack, PGD) and isinstance(attack.loss, LogitMargin):
        name = "margin"
    name = name if name.isidentifier() and name.isascii() else "attack"
    return name if name not in taken else f"{name}_{len(taken)}"

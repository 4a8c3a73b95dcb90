"""Select the attacks of an evaluation from names, attack objects and functions."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from doubly.attacks import ATTACKS, PGD, Attack, StoppingPGD
from doubly.attacks.autoattack import ENSEMBLES, AutoAttack
from doubly.config.serialize import suggestion, to_json
from doubly.errors import UsageError
from doubly.losses import LogitMargin
from doubly.seeding import AnyGenerator
from doubly.threat import LinfBall, Threat

# Names of attacks become fields of evaluation.json and arrays of evaluation.npz, which have other fields as well.
RESERVED = ("clean", "y", "ids", "weights", "aa", "apgd", "worst_case", "share", "rounding", "file", "allow_pickle")
AnyAttack = str | Attack | AutoAttack | Callable[..., Tensor]
Attacks = AnyAttack | Sequence[AnyAttack] | Mapping[str, Attack | AutoAttack | Callable[..., Tensor]]


class SelectedAttacks(NamedTuple):
    """The attacks of an evaluation: those that return a perturbation, by name, and AutoAttack if requested."""

    attacks: dict[str, Attack]
    ensemble: AutoAttack | None


@dataclass(frozen=True)
class FunctionAttack(Attack):
    """A plain function (model, x, y, generator) -> delta as an attack."""

    threat: Threat
    function: Callable[..., Tensor]

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        delta = self.function(model, x, y, generator)
        if not isinstance(delta, Tensor):
            raise UsageError(
                f"an attack returns the perturbation, a tensor of the shape of x, got {type(delta).__name__}: return "
                "x_attacked - x"
            )
        return delta


def reference_pgd(threat: Threat) -> PGD:
    """Return the PGD attack of an evaluation: 20 steps of a quarter of the radius, uniform start, last iterate."""
    return PGD(threat, 20, threat.step_rule(threat.radius / 4))


def attack_names() -> list[str]:
    """Return the names by which an evaluation takes attacks."""
    return [*(name for name, kind in ATTACKS.items() if kind.stays_inside), *ENSEMBLES]


def shared_threat(attacks: Attacks, threat: Threat | None) -> Threat:
    """Return the threat of an evaluation: the one given, or else that of the attacks, or else `LinfBall()`.

    Raises:
        UsageError: If they differ.
    """
    threats = [attack.threat for _, attack in _listed(attacks) if isinstance(attack, Attack | AutoAttack)]
    shared = threat or (threats[0] if threats else LinfBall())
    for other in threats:
        if (type(other), other.radius) != (type(shared), shared.radius):
            raise UsageError(
                f"an evaluation has one threat, got {shared} and {other}: give attacks of one ball, or evaluate twice"
            )
    return shared


def select_attacks(attacks: Attacks, reference: PGD, seed: int = 0) -> SelectedAttacks:
    """Return the attacks of an evaluation.

    Args:
        attacks: Names, attacks, or a mapping from names to attacks.
        reference: The PGD attack that the names refer to; AutoAttack takes its threat.
        seed: Seed of AutoAttack.

    Returns:
        The attacks by name, in the order given, and AutoAttack.

    Raises:
        UsageError: If a name is unknown or used twice, or something is not an attack.
    """
    plain: dict[str, Attack] = {}
    ensemble: AutoAttack | None = None
    for assigned_name, entry in _listed(attacks):
        attack = _by_name(entry, reference, seed) if isinstance(entry, str) else _checked(entry, reference.threat)
        if isinstance(attack, AutoAttack):
            if ensemble is not None:
                raise UsageError("an evaluation runs AutoAttack once: give autoattack or quick, not both")
            ensemble = attack
            continue
        name = assigned_name or (entry if isinstance(entry, str) else _name_of(attack, plain))
        _check_name(name, plain)
        plain[name] = attack
    return SelectedAttacks(plain, ensemble)


def stopping_attacks(selected: SelectedAttacks) -> SelectedAttacks:
    """Return the attacks with every PGD stopping at samples that are misclassified, where only accuracy is asked for.

    Raises:
        UsageError: If a PGD has settings with which it cannot stop.
    """
    attacks = {
        name: StoppingPGD.of(attack) if isinstance(attack, PGD) else attack for name, attack in selected.attacks.items()
    }
    return selected._replace(attacks=attacks)


def describe_attacks(attacks: Mapping[str, Attack]) -> dict[str, Any]:
    """Return the attacks as the protocol records them: pgd under `attack`, the others under `attacks`.

    margin is left out if it is pgd with the logit margin as its loss, as it is by default.
    """
    pgd = attacks.get("pgd")
    implied = replace(pgd, loss=LogitMargin()) if isinstance(pgd, PGD) else None
    further = {
        name: _describe(attack)
        for name, attack in attacks.items()
        if name != "pgd" and (name != "margin" or attack != implied)
    }
    main = {} if pgd is None else {"attack": _describe(pgd)}
    return {**main, **({"attacks": further} if further else {})}


def _listed(attacks: Attacks) -> list[tuple[str | None, AnyAttack]]:
    """Return (name if one was given, attack); a single attack is a list of one."""
    if isinstance(attacks, Mapping):
        return list(attacks.items())
    if isinstance(attacks, Sequence) and not isinstance(attacks, str):
        return [(None, attack) for attack in attacks]
    return [(None, attacks)]


def _describe(attack: Attack) -> Any:
    if (described := attack.describe()) is not None:
        return {**described, "threat": to_json(attack.threat)}
    try:
        if is_dataclass(attack):
            return json.loads(json.dumps(to_json(attack)))
    except (UsageError, TypeError):  # an attack of the user that has no JSON form
        pass
    shown = _shown(attack)
    return {"kind": f"{type(shown).__module__}.{type(shown).__qualname__}", "is": f"{shown!r:.200}"}


def _shown(attack: Attack) -> Any:
    """Return what the user passed: the attack, or the function that it wraps."""
    return attack.function if isinstance(attack, FunctionAttack) else attack


def _by_name(name: str, reference: PGD, seed: int) -> Attack | AutoAttack:
    if name in ENSEMBLES:
        return AutoAttack(reference.threat, ENSEMBLES[name], seed=seed)
    if name not in ATTACKS:
        raise UsageError(f"there is no attack '{name}'{suggestion(name, attack_names())}")
    if not ATTACKS[name].stays_inside:
        raise _leaves_threat(name)
    return ATTACKS[name].for_evaluation(reference)


def _checked(attack: Any, threat: Threat) -> Attack | AutoAttack:
    if isinstance(attack, type) or not (callable(attack) or isinstance(attack, AutoAttack)):
        raise UsageError(f"{attack!r:.60} is no attack: use {', '.join(attack_names())}, or an attack such as PGD(…)")
    if not isinstance(attack, Attack | AutoAttack):
        return FunctionAttack(threat, attack)
    if isinstance(attack, Attack) and not attack.stays_inside:
        raise _leaves_threat(type(attack).__name__)
    return attack


def _leaves_threat(name: str) -> UsageError:
    return UsageError(
        f"{name} leaves the ball that it is to stay in: it is for training, not to measure with; use fgsm or pgd"
    )


def _check_name(name: str, selected: Mapping[str, Attack]) -> None:
    fits = (
        re.fullmatch(r"(?!after_)[a-z][a-z0-9_]*(?<!_losses)(?<!_margins)(?<!_radii)", str(name))
        and "tail_30" not in name
    )
    if not fits or name in (*RESERVED, *ENSEMBLES, *selected):
        raise UsageError(f"'{name}' cannot name an attack: use a new name of small letters, digits and _")


def _name_of(attack: Attack, selected: Mapping[str, Attack]) -> str:
    listed = {kind: name for name, kind in ATTACKS.items()}
    name = attack.short_name or listed.get(type(attack), type(_shown(attack)).__name__.lower())
    if isinstance(attack, PGD) and attack.loss == LogitMargin():
        name = "margin"
    name = name if name.isidentifier() and name.isascii() else "attack"
    return name if name not in selected else f"{name}_{len(selected)}"

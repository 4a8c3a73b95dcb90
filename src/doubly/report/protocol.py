"""The protocol of an evaluation in words: the settings that a number needs beside it."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from doubly.text import format_norm, format_radius, format_value

# Settings that readers expect and that are therefore left out.
DEFAULTS = {
    "attack.rule.kind": "step.sign",
    "attack.loss.kind": "loss.cross_entropy",
    "attack.attack_mode": "eval",
}
# Settings that are part of the words, or are printed elsewhere.
IN_WORDS = (
    "attack",
    "steps",
    "attack.kind",
    "attack.steps",
    "attack.threat.kind",
    "attack.threat.radius",
    "attack.threat.barrier",
    "attack.rule.size",
    "attack.start",
    "attack.restarts",
    "note",
)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a tree of settings as dotted name -> value, in the order of the tree."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def attack_name(protocol: Mapping[str, Any]) -> str:
    """Return `PGD-20` for {"attack": {"kind": "attack.pgd", "steps": 20}} and for {"attack": "PGD", "steps": 20}."""
    attack = protocol.get("attack", "attack")
    fields = attack if isinstance(attack, Mapping) else {**protocol, "kind": attack}
    kind = str(fields.get("kind", "attack")).rpartition(".")[2].upper()
    return f"{kind}-{fields['steps']}" if "steps" in fields else kind


def describe_attack(protocol: Mapping[str, Any]) -> str:
    """Return the attack in words, as `PGD-20, ℓ∞, ε = 8/255, step ε/4, uniform start, 1 restart`.

    Without pgd it is the first of the other attacks; empty if there is none.
    """
    others = list(protocol.get("attacks", {}).values())
    attack = protocol.get("attack", others[0] if others else None)
    return ", ".join([attack_name({"attack": attack}), *_words(flatten({"attack": attack}))]) if attack else ""


def describe(protocol: Mapping[str, Any]) -> str:
    """Return one line: the attack in words, then in brackets every setting that the words leave out."""
    attacks = protocol.get("attacks")
    flat = flatten({key: value for key, value in protocol.items() if key != "attacks"})
    unsaid = [_other_attack(name, fields) for name, fields in (attacks if isinstance(attacks, Mapping) else {}).items()]
    unsaid += [
        describe_setting(key, value)
        for key, value in flat.items()
        if key not in IN_WORDS and value is not None and DEFAULTS.get(key) != value
    ]
    words = ", ".join([attack_name(protocol), *_words(flat)])
    return f"{words} ({', '.join(unsaid)})" if unsaid else words


def _other_attack(name: str, fields: object) -> str:
    """Return `strong with steps 10, targets 9` for an attack of the same threat as the main one."""
    flat = flatten(fields) if isinstance(fields, Mapping) else {}
    settings = [describe_setting(key, value) for key, value in flat.items() if key != "kind" and "threat" not in key]
    return f"also {name}{' with ' if settings else ''}{', '.join(settings)}"


def describe_setting(key: str, value: object) -> str:
    """Return `radius 0.15` for attack.threat.radius = 0.15, and `threat linf` for attack.threat.kind = threat.linf."""
    *path, name = key.split(".")
    if name == "kind" and path:
        return f"{path[-1]} {str(value).rpartition('.')[2]}"
    return f"{name} {format_value(value)[:8]}" if name.endswith("sha256") else f"{name} {format_value(value)}"


def _words(flat: Mapping[str, Any]) -> list[str]:
    """Return the parts of `ℓ∞, ε = 8/255, step ε/4, uniform start, 1 restart`."""
    radius, size = flat.get("attack.threat.radius"), flat.get("attack.rule.size")
    words = [format_norm(str(flat["attack.threat.kind"]))] if "attack.threat.kind" in flat else []
    words += [f"ε = {format_radius(radius)}"] if radius else []
    if size:
        share = Fraction(size / radius).limit_denominator(100) if radius else Fraction(0)
        is_share = radius and abs(share * radius - size) < 1e-9 * size
        words.append(f"step {_of_epsilon(share) if is_share else format_radius(size)}")
    words += [f"{flat['attack.start']} start"] if flat.get("attack.start") else []
    restarts = flat.get("attack.restarts")
    return words + ([f"{restarts} restart{'s' * (restarts > 1)}"] if restarts else [])


def _of_epsilon(share: Fraction) -> str:
    """Return `ε/4` for a quarter and `2 ε/3` for two thirds."""
    above = "ε" if share.numerator == 1 else f"{share.numerator} ε"
    return above if share.denominator == 1 else f"{above}/{share.denominator}"

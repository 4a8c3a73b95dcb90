"""How an evaluation was made, in words: what a number needs beside it to mean something."""

from collections.abc import Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings as dotted name -> value, in its own order."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def attack_name(protocol: Mapping[str, Any]) -> str:
    """PGD-20 for {"attack": {"kind": "attack.pgd", "steps": 20, …}}, and for {"attack": "PGD", "steps": 20}."""
    attack = protocol.get("attack", "attack")
    fields = attack if isinstance(attack, Mapping) else {**protocol, "kind": attack}
    kind = str(fields.get("kind", "attack")).rpartition(".")[2].upper()
    return f"{kind}-{fields['steps']}" if "steps" in fields else kind


def describe(protocol: Mapping[str, Any]) -> str:
    """One line: the attack, then every other setting."""
    named = {"attack", "steps", "attack.kind", "attack.steps"}
    rest = [brief(key, value) for key, value in flatten(protocol).items() if key not in named and value is not None]
    return f"{attack_name(protocol)} ({', '.join(rest)})" if rest else attack_name(protocol)


def brief(key: str, value: object) -> str:
    """`radius 0.15` for attack.threat.radius = 0.15, and `threat linf` for attack.threat.kind = threat.linf."""
    *path, name = key.split(".")
    if name == "kind" and path:
        return f"{path[-1]} {str(value).rpartition('.')[2]}"
    return f"{name} {show(value)[:8]}" if name.endswith("sha256") else f"{name} {show(value)}"


def show(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

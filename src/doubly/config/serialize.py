"""Runs as JSON: every node is an object with its kind. Names become objects here and nowhere below, by tables alone."""

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from math import isfinite
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from doubly.attacks import ATTACKS
from doubly.bilevel import STEP_RULES
from doubly.config.run import SGD, Data, Run, Validation
from doubly.config.user_code import GivenData, GivenModel, OwnModel
from doubly.data import AUGMENTATIONS, DATASETS, IMBALANCES, Augmentation
from doubly.errors import UsageError
from doubly.losses import LOSSES, Loss
from doubly.methods import METHODS
from doubly.models import MODELS
from doubly.schedules import SCHEDULES
from doubly.threat import THREATS
from doubly.types import Attack

KINDS: dict[str, type] = {
    "run": Run,
    "data": Data,
    "sgd": SGD,
    "validation": Validation,
    "own_model": OwnModel,
    "given_model": GivenModel,
    "given_data": GivenData,
    **{f"threat.{name}": kind for name, kind in THREATS.items()},
    **{f"loss.{name}": kind for name, kind in LOSSES.items()},
    **{f"schedule.{name}": kind for name, kind in SCHEDULES.items()},
    **{f"step.{name}": kind for name, kind in STEP_RULES.items()},
    **{f"attack.{name}": kind for name, kind in ATTACKS.items()},
    **{f"method.{name}": kind for name, kind in METHODS.items()},
    **{f"model.{name}": kind for name, kind in MODELS.items()},
    **{f"dataset.{name}": kind for name, kind in DATASETS.items()},
    **{f"imbalance.{name}": kind for name, kind in IMBALANCES.items()},
    **{f"augment.{name}": kind for name, kind in AUGMENTATIONS.items()},
}
CALLED: dict[type, set[type]] = {
    Attack: set(ATTACKS.values()),
    Loss: set(LOSSES.values()),
    Augmentation: set(AUGMENTATIONS.values()),
}
_NAMES = {kind: name for name, kind in KINDS.items()}


def fraction(text: str) -> float:
    """8/255 or 0.03."""
    try:
        return float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"'{text}' is not a number: write 0.03 or 8/255") from None


def to_json(value: Any) -> Any:
    """A tree of dataclasses as plain JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) not in _NAMES:
            raise UsageError(
                f"{type(value).__name__} cannot be saved with the run, since it is in none of doubly's tables: "
                "add it to METHODS, ATTACKS, … (docs/adding.md), or train with output=None"
            )
        return {"kind": _NAMES[type(value)], **{f.name: to_json(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        raise UsageError(f"{value} cannot be saved with the run, since JSON has no such number: write a large one, 1e9")
    return value


def from_json(value: Any, where: str = "config") -> Any:
    """The tree again; an unknown kind or key is an error that names the nearest valid one."""
    if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
        raise UsageError(f'{where} must be an object with a "kind", got {value!r:.60}')
    kind = KINDS.get(value["kind"])
    if kind is None:
        raise UsageError(f"{where} has the unknown kind '{value['kind']}'{nearest(value['kind'], KINDS)}")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    for key in value:
        if key != "kind" and key not in known:
            raise UsageError(f"{where} ({value['kind']}) has no field '{key}'{nearest(key, known)}")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{where} ({value['kind']}) lacks the field '{name}'")
    return kind(**{key: _typed(item, hints[key], f"{where}.{key}") for key, item in value.items() if key != "kind"})


def nearest(word: str, valid: Any) -> str:
    """', did you mean …?' or the list of what is valid."""
    close = difflib.get_close_matches(word, list(valid), 1, 0.5)
    if close:
        return f": did you mean '{close[0]}'?"
    if len(valid) > 60:
        return f": there are {len(valid)}, and `doubly list` shows them"
    return f": valid are {', '.join(sorted(valid))}" if valid else ""


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotation asks for it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _typed(value, next(a for a in arguments if a is not type(None)), where)
    if origin is Literal:
        if value not in arguments:
            raise UsageError(f"{where} is {value!r}{nearest(str(value), arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where} must be a list, got {value!r:.60}")
        return tuple(_typed(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, str):
        return fraction(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        if type(value) is not hint:
            raise UsageError(f"{where} must be of type {hint.__name__}, got {value!r:.60}")
        return value
    node = from_json(value, where)
    # A protocol of __call__ alone is met by anything that can be called: there the table decides.
    if not isinstance(node, hint) or type(node) not in CALLED.get(hint, {type(node)}):
        raise UsageError(f"{where} must be a {hint.__name__}, but {value['kind']} is none")
    return node


def replaced(node: Any, path: str, value: Any) -> Any:
    """The tree with the part at the dotted path replaced; `value` is JSON, or a kind for a part with its defaults."""
    tree = to_json(node)
    parent, *names = tree, *path.split(".")
    for place, name in enumerate(names):
        if not isinstance(parent, dict) or name not in parent or name == "kind":
            known = [key for key in parent if key != "kind"] if isinstance(parent, dict) else []
            where = ".".join(names[:place]) or "the run"
            raise UsageError(f"'{path}': {where} has no '{name}'{nearest(name, known)}")
        if place < len(names) - 1:
            parent = parent[name]
    parent[names[-1]] = {"kind": value} if isinstance(value, str) and value in KINDS else value
    return from_json(tree)


def difference(a: Any, b: Any, where: str = "") -> str | None:
    """The first field in which two JSON trees differ, as 'path: a -> b'."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in {**a, **b}:
            found = difference(a.get(key), b.get(key), f"{where}.{key}" if where else key)
            if found:
                return found
        return None
    return None if a == b else f"{where}: {a!r} -> {b!r}"

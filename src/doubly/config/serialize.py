"""Runs as JSON: every node is an object with its kind. Names become objects here and nowhere else, by tables alone."""

import difflib
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from doubly.attacks import ATTACKS
from doubly.bilevel import STEP_RULES
from doubly.config.hugging_face import HuggingFace
from doubly.config.optimizers import OPTIMIZERS, InMemoryOptimizer
from doubly.config.run import Run, Validation
from doubly.config.user_code import InMemoryData, InMemoryModel, UntrustedModel, UserModel, WithOffsets
from doubly.data import AUGMENTATIONS, DATASETS, IMBALANCES, Data
from doubly.errors import UsageError
from doubly.losses import LOSSES
from doubly.methods import METHODS
from doubly.models import MODELS
from doubly.schedules import SCHEDULES
from doubly.text import parse_number
from doubly.threat import THREATS

_TABLES: dict[str, Mapping[str, type]] = {
    "threat": THREATS,
    "loss": LOSSES,
    "schedule": SCHEDULES,
    "step": STEP_RULES,
    "attack": ATTACKS,
    "method": METHODS,
    "model": {**MODELS, "user": UserModel, "in_memory": InMemoryModel, "with_offsets": WithOffsets},
    "dataset": {**DATASETS, "in_memory": InMemoryData, "huggingface": HuggingFace},
    "imbalance": IMBALANCES,
    "augment": AUGMENTATIONS,
    "optimizer": {**OPTIMIZERS, "in_memory": InMemoryOptimizer},
}
KINDS: dict[str, type] = {
    "run": Run,
    "data": Data,
    "validation": Validation,
    **{f"{table}.{name}": kind for table, kinds in _TABLES.items() for name, kind in kinds.items()},
}
_NAMES = {kind: name for name, kind in KINDS.items()} | {UntrustedModel: "model.user"}
EVERY_FUNCTION = "*"  # among trusted functions


def to_json(value: Any) -> Any:
    """Return a tree of dataclasses as plain JSON values.

    Raises:
        UsageError: If a part is in none of the tables, or a number is not finite.
    """
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) not in _NAMES:
            raise UsageError(
                f"{type(value).__name__} cannot be saved with the run, since it is in none of doubly's tables: "
                "add it to METHODS, ATTACKS, … (docs/adding.md), or train with output=None"
            )
        saved = [f.name for f in fields(value) if f.name != "factory"]  # a function has no JSON form
        return {"kind": _NAMES[type(value)], **{name: to_json(getattr(value, name)) for name in saved}}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        raise UsageError(f"{value} cannot be saved with the run, since JSON has no such number: write a large one, 1e9")
    return value


def from_json(value: Any, where: str = "config", trusted: Collection[str] = ()) -> Any:
    """Return the tree that `to_json` was given. No code is imported.

    Args:
        value: The JSON value.
        where: Name of this part, for messages.
        trusted: Functions of networks that may be called later, or `EVERY_FUNCTION`; any other becomes an
            `UntrustedModel`, which refuses to be built.

    Raises:
        UsageError: If a kind or field is unknown, missing or of the wrong type; the message names the part and the
            closest valid name.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
        raise UsageError(f'{where} must be an object with a "kind", got {value!r:.60}')
    kind = KINDS.get(value["kind"])
    if kind is None:
        raise UsageError(f"{where} has the unknown kind '{value['kind']}'{suggestion(value['kind'], KINDS)}")
    hints = get_type_hints(kind)
    known_fields = {f.name: f for f in fields(kind)}
    for key in value:
        if key != "kind" and key not in known_fields:
            raise UsageError(f"{where} ({value['kind']}) has no field '{key}'{suggestion(key, known_fields)}")
    for name, field in known_fields.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{where} ({value['kind']}) lacks the field '{name}': add it")
    values = {key: _typed(v, hints[key], f"{where}.{key}", trusted) for key, v in value.items() if key != "kind"}
    if kind is UserModel and not {values.get("function"), EVERY_FUNCTION} & set(trusted):
        kind = UntrustedModel
    return kind(**values)


def suggestion(word: str, valid: Collection[str]) -> str:
    """Return the end of a message about an unknown word: ": did you mean …?", or ": valid are …".

    Args:
        word: The unknown word.
        valid: The words that are allowed.
    """
    close = difflib.get_close_matches(word, list(valid), 1, 0.5)
    if close:
        return f": did you mean '{close[0]}'?"
    if len(valid) > 60:
        return f": there are {len(valid)}, and `doubly list` shows them"
    return f": valid are {', '.join(sorted(valid))}" if valid else ""


def _typed(value: Any, hint: Any, where: str, trusted: Collection[str]) -> Any:
    """Return `value` as the annotation asks for it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _typed(value, next(a for a in arguments if a is not type(None)), where, trusted)
    if origin is Literal:
        if value not in arguments:
            raise UsageError(f"{where} is {value!r}{suggestion(str(value), arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where} must be a list, got {value!r:.60}")
        return tuple(_typed(item, arguments[0], f"{where}[{i}]", trusted) for i, item in enumerate(value))
    if hint is float and isinstance(value, str):
        return parse_number(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        if type(value) is not hint:
            raise UsageError(f"{where} must be of type {hint.__name__}, got {value!r:.60}")
        return value
    node = from_json(value, where, trusted)
    if not isinstance(node, hint):
        raise UsageError(f"{where} must be a {hint.__name__}, but {value['kind']} is not one: see `doubly list kinds`")
    return node


def with_change(node: Any, path: str, value: Any) -> Any:
    """Return the tree with one part replaced.

    Args:
        node: A dataclass of the tables, such as a Run.
        path: Dotted path of the part, as in "optimizer.lr.peak".
        value: JSON, or a kind for a part with its defaults.

    Raises:
        UsageError: If there is no such part, or the value does not fit.
    """
    tree = to_json(node)
    parent, *names = tree, *path.split(".")
    for depth, name in enumerate(names):
        if not isinstance(parent, dict) or name not in parent or name == "kind":
            valid = [key for key in parent if key != "kind"] if isinstance(parent, dict) else []
            where = ".".join(names[:depth]) or "the run"
            raise UsageError(f"'{path}': {where} has no '{name}'{suggestion(name, valid)}")
        if depth < len(names) - 1:
            parent = parent[name]
    parent[names[-1]] = {"kind": value} if isinstance(value, str) and value in KINDS else value
    return from_json(tree, trusted=_functions(node))


def trust_code(node: Any) -> Any:
    """Return the tree with every function that it names trusted: building its network imports and calls it."""
    return from_json(to_json(node), trusted=(EVERY_FUNCTION,))


def _functions(node: Any) -> list[str]:
    """Return the trusted functions of a tree."""
    if type(node) is UserModel:
        return [node.function]
    return [name for part in vars(node).values() if is_dataclass(part) for name in _functions(part)]


def with_changes(node: Any, changes: Mapping[str, Any]) -> Any:
    """Return the tree with several parts replaced, in order; see `with_change`."""
    for path, value in changes.items():
        node = with_change(node, path, value)
    return node


def first_difference(a: Any, b: Any, where: str = "") -> str | None:
    """Return the first field in which two JSON trees differ, as 'path: a -> b'; None if they are equal."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in {**a, **b}:
            difference = first_difference(a.get(key), b.get(key), f"{where}.{key}" if where else key)
            if difference:
                return difference
        return None
    return None if a == b else f"{where}: {a!r} -> {b!r}"

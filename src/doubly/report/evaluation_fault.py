"""What is wrong with the contents of an evaluation.json: each field that readers rely on, and what it may hold."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from doubly.metric_names import METRICS, is_number, is_share

SCHEMAS = (1, 2)  # of evaluation.json; 2 has more fields
NEEDED = ("sa", "ra_pgd", "ra_tail_30", "n", "worst_class", "per_class", "protocol", "ra_tail_30_classes")
MAX_COUNT = 2**53

Check = Callable[[Any], bool]
Rule = tuple[str, Any, Check]  # a field, its value, and what it may hold


def is_count(value: Any) -> bool:
    """Return whether a value is a number of things."""
    return type(value) is int and 0 <= value < MAX_COUNT


def is_names(value: Any) -> bool:
    """Return whether a value is a list of names."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def fault_of_evaluation(evaluation: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the contents of an evaluation.json; None if nothing is."""
    schema, tail = evaluation.get("schema", SCHEMAS[0]), evaluation.get("tail", {})
    if schema not in SCHEMAS:
        return f"has the unknown schema {schema!r:.40}"
    if not isinstance(tail, dict):
        return f"is damaged: tail is {tail!r:.40}"
    if tail.get("share", 0.3) != 0.3 and "ra_tail_30" not in evaluation:
        return "was made with another --tail-share, and has no RA-Tail-30"
    if missing := [key for key in NEEDED if key not in evaluation]:
        return f"lacks {', '.join(missing)}"
    for name, value, is_valid in _rules(evaluation):
        if not is_valid(value):
            return f"is damaged: {name} is {value!r:.40}"
    worst = evaluation["worst_class"]
    if not isinstance(worst.get("name"), str) or "ra_pgd" not in worst:
        return "is damaged: worst_class does not hold name and ra_pgd"
    classes = evaluation["per_class"].values()
    if not classes or not all(isinstance(entry, dict) and {"n", "ra_pgd"} <= entry.keys() for entry in classes):
        return "is damaged: per_class does not hold n and ra_pgd of each class"
    for name, value, is_valid in (rule for part in _PARTS for rule in part(evaluation)):
        if not is_valid(value):
            return f"is damaged: {name} is {value!r:.40}"
    return None


def _rules(evaluation: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the fields at the top."""
    accuracies = [key for key, metric in METRICS.items() if metric.is_accuracy and not metric.field]
    checks: dict[str, Check] = {
        **dict.fromkeys(("sa", "ra_pgd", "ra_tail_30", *accuracies), is_share),
        **dict.fromkeys(("n", "epoch"), is_count),
        **dict.fromkeys(("worst_class", "per_class", "protocol"), _is_dict),
        **dict.fromkeys(("autoattack", "curve", "trust", "confusion", "intervals", "examples"), _is_dict),
        "ra_tail_30_classes": is_names,
        "weights": lambda value: isinstance(value, list) and all(map(_is_dict, value)),
    }
    for key, check in checks.items():
        if key in evaluation:
            yield key, evaluation[key], check


def _of_classes(evaluation: Mapping[str, Any]) -> Iterator[Rule]:
    yield "worst_class.ra_pgd", evaluation["worst_class"].get("ra_pgd"), is_share
    for name, entry in evaluation["per_class"].items():
        for key, value in entry.items():
            check = is_count if key == "n" or key.startswith("n_") else _is_interval if "interval" in key else _is_part
            yield f"{key} of the class {name!r:.20}", value, check


def _of_tail(evaluation: Mapping[str, Any]) -> Iterator[Rule]:
    tail = evaluation.get("tail", {})
    yield "the share of the tail", tail.get("share", 0.3), is_share
    yield "the rounding of the tail", tail.get("rounding", "round"), lambda value: isinstance(value, str)
    for attack, part in tail.items():
        if attack not in ("share", "rounding"):
            yield f"the tail under {attack!r:.20}", part, _is_dict
            yield f"the tail under {attack!r:.20}", part.get("value"), _is_part
            yield f"the classes of the tail under {attack!r:.20}", part.get("classes", []), is_names


def _of_confusion(evaluation: Mapping[str, Any]) -> Iterator[Rule]:
    size = len(evaluation["per_class"])

    def is_matrix(value: Any) -> bool:
        rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else [[]]
        return len(rows) == size and all(len(row) == size and all(map(is_count, row)) for row in rows)

    for attack, counts in evaluation.get("confusion", {}).items():
        yield f"the confusion under {attack!r:.20}", counts, is_matrix


def _of_figures(evaluation: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield what is only drawn: the accuracy against ε, and the weights."""
    points = evaluation.get("curve", {}).get("points", [])
    yield "curve.points", points, lambda value: isinstance(value, list) and all(map(_is_dict, value))
    for point in points:
        yield "ε of a point of curve", point.get("epsilon"), lambda value: is_number(value) and value >= 0
        for key in ("accuracy", "tail_30"):
            yield f"{key} of a point of curve", point.get(key), _is_part
    for entry in evaluation.get("weights", []):
        yield "r of weights", entry.get("r"), is_number
        yield "normalize of weights", entry.get("normalize", ""), lambda value: isinstance(value, str)
        quantiles = entry.get("quantiles_per_class") or {}
        yield "quantiles_per_class of weights", quantiles, _is_dict
        for row in quantiles.values():
            yield "a row of quantiles of weights", row, _are_quantiles


def _of_protocol(evaluation: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the settings of the attack that are put in words, the checks of trust, and AutoAttack."""
    protocol, trust = evaluation["protocol"], evaluation.get("trust", {})
    attack = protocol.get("attack")
    parts = attack if isinstance(attack, dict) else {}
    yield "protocol.attack", attack, lambda value: value is None or isinstance(value, dict | str)
    yield "protocol.attacks", protocol.get("attacks", {}), _is_dict
    for part, key in (("threat", "radius"), ("rule", "size")):
        inner = parts.get(part)
        number = inner.get(key) if isinstance(inner, dict) else None
        yield f"protocol.attack.{part}.{key}", number, lambda value: value is None or (is_number(value) and value >= 0)
    kinds = [parts, *(parts[name] for name in ("threat", "rule", "loss") if isinstance(parts.get(name), dict))]
    for entry in kinds:
        yield "a kind in protocol.attack", entry.get("kind", ""), lambda value: isinstance(value, str)
    for key in ("restarts", "steps"):
        yield f"protocol.attack.{key}", parts.get(key), lambda value: value is None or is_count(value)
    lines = trust.get("lines") or []
    yield "trust.lines", lines, lambda value: isinstance(value, list) and all(map(_is_dict, value))
    yield "trust.verdict", trust.get("verdict", ""), lambda value: isinstance(value, str)


_PARTS = (_of_classes, _of_tail, _of_confusion, _of_figures, _of_protocol)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_part(value: Any) -> bool:
    """Return whether a value is a share, or null, which is the share of no images."""
    return value is None or is_share(value)


def _is_interval(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(is_share, value)))


def _are_quantiles(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 5 and all(map(is_number, value)))

"""The contents of evaluation.json, from the predictions for clean and for attacked images. Fractions, not percent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from doubly.evaluation.accuracy import Bools, Ints, confusion, per_class, tail, worst_class

SCHEMA = 1


def summarise(
    y: Ints,
    classes: Sequence[str],
    clean_predictions: Ints,
    pgd_predictions: Ints,
    protocol: Mapping[str, Any],
    margin_predictions: Ints | None = None,
) -> dict[str, Any]:
    """`classes` are the names in the order of the labels; `protocol` says how the attack was made.

    `margin_predictions`: under the same attack on the logit margin instead of its loss.
    """
    names, size = distinct(classes), len(classes)
    clean = per_class(clean_predictions == y, y, size)
    robust = per_class(pgd_predictions == y, y, size)
    tail_value, tail_classes = tail(robust)
    worst, worst_value = worst_class(robust)
    counts = np.bincount(y, minlength=size)
    return {
        "schema": SCHEMA,
        "n": len(y),
        "sa": float(np.mean(clean_predictions == y)),
        "ra_pgd": float(np.mean(pgd_predictions == y)),
        "ra_tail_30": tail_value,
        "ra_tail_30_classes": [names[index] for index in tail_classes],
        "worst_class": {"name": names[worst], "ra_pgd": worst_value},
        **({} if margin_predictions is None else _under_margin(margin_predictions == y, y, size)),
        "per_class": {
            name: {"n": int(counts[index]), "sa": _number(clean[index]), "ra_pgd": _number(robust[index])}
            for index, name in enumerate(names)
        },
        "confusion": {
            "clean": confusion(clean_predictions, y, size).tolist(),
            "pgd": confusion(pgd_predictions, y, size).tolist(),
        },
        "protocol": dict(protocol),
    }


def _under_margin(correct: Bools, y: Ints, size: int) -> dict[str, float]:
    value, _ = tail(per_class(correct, y, size))
    return {"ra_margin": float(np.mean(correct)), "ra_margin_tail_30": value}


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with the class index added where two classes share one."""
    taken = {name for name in names if names.count(name) == 1}
    result = []
    for index, name in enumerate(names):
        if names.count(name) > 1:
            name = f"{name} ({index})"
            while name in taken:
                name += "'"
            taken.add(name)
        result.append(name)
    return result


def _number(accuracy: float) -> float | None:
    """JSON has no NaN: the accuracy of a class without samples is null."""
    return None if math.isnan(accuracy) else float(accuracy)

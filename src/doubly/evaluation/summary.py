"""The contents of evaluation.json, all of it from an EvalResult. Fractions, not percent."""

from typing import Any

import numpy as np

from doubly.evaluation.intervals import wilson
from doubly.evaluation.metrics import Floats, per_class, tail
from doubly.evaluation.result import EvalResult, number
from doubly.metric_names import Metric, attack_metric, tail_metric, worst_class_metric

SCHEMA = 2
LEVEL = 0.95
MOST_CONFUSED = 100  # classes: the matrix of more is megabytes of zeros, and follows from evaluation.npz


def metric_of(result: EvalResult, attack: str) -> Metric:
    """Return the metric of an attack in a result; RA-AA only if all of AutoAttack ran to its end."""
    return attack_metric("autoattack_in_part" if attack == "autoattack" and not result.whole else attack)


def key_of(result: EvalResult, attack: str) -> str:
    """Return the field of evaluation.json that holds the accuracy under an attack."""
    return metric_of(result, attack).key


def summary(result: EvalResult) -> dict[str, Any]:
    found: dict[str, Any] = {"schema": SCHEMA, "n": result.n, "sa": result.accuracy("clean")}
    intervals: dict[str, Any] = {"level": LEVEL, "sa": _ends(result, "clean", "average")}
    for attack in result.attacks:
        metric = metric_of(result, attack)
        key, prefix = metric.key, tail_metric(metric).key
        found |= {key: result.accuracy(attack)}
        if result.tail_share == 0.3:
            value, names = result.tail(attack)
            found |= {prefix: value, f"{prefix}_classes": names}
            intervals[prefix] = _ends(result, attack, "tail")
        name, value = result.worst(attack)
        found[worst_class_metric(metric).key] = {"name": name, key: value}
        intervals |= {key: _ends(result, attack, "average"), f"worst_{key}": _ends(result, attack, "worst")}
    value, n = result.worst_case()
    found["ra_worst_case"] = {"value": number(value), "n": n}
    found["tail"] = _tails(result)
    found["intervals"] = intervals
    found["per_class"] = _classes(result)
    if len(result.classes) <= MOST_CONFUSED:
        found["confusion"] = {name: result.confusion(name) for name in result.answers}
    if "pgd" in result.losses:
        kinds = [result.weights(r, result.weights_normalize) for r in result.weights_r]
        found["weights"] = [weights.summary(result.names) for weights in kinds]
    if result.autoattack:
        found["autoattack"] = dict(result.autoattack)
    if result.ensemble is not None:
        run = result.answers[result.ensemble] >= 0
        after = {part: float(standing[run].mean()) for part, standing in result.after.items()}
        found["autoattack"] = {**result.autoattack, "accuracy_after": after, "n": int(run.sum())}
    if result.examples:
        found["examples"] = dict(result.examples)
    if result.curve:
        found["curve"] = dict(result.curve)
    if result.trust:
        found["trust"] = dict(result.trust)
    return {**found, "protocol": dict(result.protocol)}


def _ends(result: EvalResult, attack: str, of: str) -> list[float]:
    interval = result.interval(attack, of)
    return [interval.low, interval.high]


def _classes(result: EvalResult) -> dict[str, dict[str, Any]]:
    """For each class its images, its accuracies, and Wilson's interval of each."""
    rows: dict[str, dict[str, Any]] = {}
    counts = np.bincount(result.y, minlength=len(result.classes))
    for index, name in enumerate(result.names):
        row: dict[str, Any] = {"n": int(counts[index])}
        for attack in result.answers:
            key, (correct, y) = key_of(result, attack), result.measured(attack)
            hits, n = int(correct[y == index].sum()), int((y == index).sum())
            row[key] = number(hits / n if n else float("nan"))
            row[f"{key}_interval"] = list(wilson(hits, n)) if n else None
            row |= {f"n_{key}": n} if n != row["n"] else {}
        rows[name] = row
    return rows


def _tails(result: EvalResult) -> dict[str, Any]:
    """The tail as asked for, and with classes that were not picked on the samples they are scored on.

    Picking the weakest classes of a sample makes them look weaker than they are. Cross-fitted: picked on every second
    image of each class, scored on the others, and the other way round. Validated: picked on other images altogether.
    """
    found: dict[str, Any] = {"share": result.tail_share, "rounding": result.tail_rounding}
    for attack in result.attacks:
        value, names = result.tail(attack)
        found[attack] = {"value": value, "classes": names, "cross_fitted": _cross_fitted(result, attack)}
        other = result.validation
        if other is not None and attack in other.answers:
            accuracies = result.per_class(attack)
            fit = np.where(np.isnan(accuracies), np.nan, _padded(other.per_class(attack), len(accuracies)))
            _, picked = tail(fit, result.tail_share, result.tail_rounding)  # of the classes that both have
            found[attack]["validated"] = {
                "value": number(float(np.mean(accuracies[picked]))),
                "classes": [result.names[index] for index in picked],
                "n_validation": other.n,
            }
    return found


def _padded(values: Floats, size: int) -> Floats:
    """Cut or filled up with NaN."""
    return np.concatenate([values[:size], np.full(max(0, size - len(values)), np.nan)])


def _cross_fitted(result: EvalResult, attack: str) -> float | None:
    correct, y = result.measured(attack)
    nth = np.zeros(len(y), dtype=np.int64)
    for label in np.unique(y):
        nth[y == label] = np.arange(int((y == label).sum()))
    values = []
    for half in (0, 1):
        fit, score = (
            per_class(correct[nth % 2 == part], y[nth % 2 == part], len(result.classes)) for part in (half, 1 - half)
        )
        if np.isnan(fit).all():
            return None
        values.append(float(np.mean(score[tail(fit, result.tail_share, result.tail_rounding)[1]])))
    return number(float(np.mean(values)))

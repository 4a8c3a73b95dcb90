"""The contents of evaluation.json, computed from an EvalResult. Accuracies are fractions, not percent."""

from typing import Any

import numpy as np

from doubly.evaluation.intervals import wilson
from doubly.evaluation.metrics import Floats, nan_to_none, per_class, tail
from doubly.evaluation.result import EvalResult
from doubly.evaluation.searches import describe_radii
from doubly.metric_names import Metric, attack_metric, tail_metric, worst_class_metric

SCHEMA = 2
LEVEL = 0.95
MAX_CONFUSION_CLASSES = 100  # a larger matrix is megabytes of zeros, and follows from evaluation.npz


def metric_of(result: EvalResult, attack: str) -> Metric:
    """Return the metric of an attack in a result; RA-AA only if all of AutoAttack ran to its end."""
    partial = attack == "autoattack" and not result.autoattack_complete
    return attack_metric("autoattack_in_part" if partial else attack)


def key_of(result: EvalResult, attack: str) -> str:
    """Return the key of an accuracy in evaluation.json; ra_aa is for the whole of AutoAttack only."""
    return metric_of(result, attack).key


def summarize(result: EvalResult) -> dict[str, Any]:
    """Return the contents of evaluation.json."""
    worst_case, worst_case_n = result.worst_case()
    return {
        **_accuracies(result),
        "ra_worst_case": {"value": nan_to_none(worst_case), "n": worst_case_n},
        "tail": _tails(result),
        "intervals": _intervals(result),
        "per_class": _per_class(result),
        **_optional_parts(result),
        "protocol": dict(result.protocol),
    }


def _accuracies(result: EvalResult) -> dict[str, Any]:
    accuracies: dict[str, Any] = {"schema": SCHEMA, "n": result.n, "sa": result.accuracy("clean")}
    for attack in result.attacks:
        metric = metric_of(result, attack)
        key, prefix = metric.key, tail_metric(metric).key
        accuracies[key] = result.accuracy(attack)
        if result.tail_share == 0.3:
            accuracies[prefix], accuracies[f"{prefix}_classes"] = result.tail(attack)
        worst = result.worst(attack)
        tied = {"tied": worst.tied} if worst.tied else {}
        accuracies[worst_class_metric(metric).key] = {"name": worst.name, key: worst.value, **tied}
    return accuracies


def _intervals(result: EvalResult) -> dict[str, Any]:
    intervals: dict[str, Any] = {"level": LEVEL, "sa": _ends(result, "clean", "average")}
    for attack in result.attacks:
        metric = metric_of(result, attack)
        key = metric.key
        if result.tail_share == 0.3:
            intervals[tail_metric(metric).key] = _ends(result, attack, "tail")
        intervals[key] = _ends(result, attack, "average")
        intervals[f"worst_{key}"] = _ends(result, attack, "worst")
    return intervals


def _ends(result: EvalResult, attack: str, of: str) -> list[float]:
    interval = result.interval(attack, of)
    return [interval.low, interval.high]


def _optional_parts(result: EvalResult) -> dict[str, Any]:
    """Return the parts that only some evaluations have."""
    parts: dict[str, Any] = {}
    if len(result.classes) <= MAX_CONFUSION_CLASSES:
        parts["confusion"] = {name: result.confusion(name) for name in result.predictions}
    if "pgd" in result.losses:
        weights = [result.weights(r, result.weights_normalize) for r in result.weights_r]
        parts["weights"] = [entry.summary(result.names) for entry in weights]
    if result.autoattack or result.ensemble is not None:
        parts["autoattack"] = {**result.autoattack, **_autoattack_accuracies(result)}
    if result.radii:
        parts["minimum_norm"] = {name: describe_radii(result, name) for name in result.radii}
    for name in ("examples", "curve", "trust", "corruptions"):
        if part := getattr(result, name):
            parts[name] = dict(part)
    return parts


def _autoattack_accuracies(result: EvalResult) -> dict[str, Any]:
    if result.ensemble is None:
        return {}
    run = result.predictions[result.ensemble] >= 0
    after = {part: float(robust[run].mean()) for part, robust in result.robust_after.items()}
    return {"accuracy_after": after, "n": int(run.sum())}


def _per_class(result: EvalResult) -> dict[str, dict[str, Any]]:
    """Return for each class its number of images, its accuracies, and Wilson's interval of each."""
    rows: dict[str, dict[str, Any]] = {}
    counts = np.bincount(result.y, minlength=len(result.classes))
    for index, name in enumerate(result.names):
        row: dict[str, Any] = {"n": int(counts[index])}
        for attack in result.predictions:
            key, (correct, y) = key_of(result, attack), result.attacked_samples(attack)
            hits, n = int(correct[y == index].sum()), int((y == index).sum())
            row[key] = nan_to_none(hits / n if n else float("nan"))
            row[f"{key}_interval"] = list(wilson(hits, n)) if n else None
            row |= {f"n_{key}": n} if n != row["n"] else {}
        rows[name] = row
    return rows


def _tails(result: EvalResult) -> dict[str, Any]:
    """Return the tail under each attack, also with classes that were selected on other samples than those scored.

    The weakest classes of a sample look weaker than they are. Cross-fitted: selected on every second image of each
    class, scored on the others, and vice versa. Validated: selected on the validation images.
    """
    tails: dict[str, Any] = {"share": result.tail_share, "rounding": result.tail_rounding}
    for attack in result.attacks:
        weakest = result.tail(attack)
        tails[attack] = {"value": weakest.value, "classes": weakest.classes}
        tails[attack] |= {"tied": weakest.tied} if weakest.tied else {}
        tails[attack]["cross_fitted"] = _cross_fitted(result, attack)
        if result.validation is not None and attack in result.validation.predictions:
            tails[attack]["validated"] = _validated(result, result.validation, attack)
    return tails


def _validated(result: EvalResult, validation: EvalResult, attack: str) -> dict[str, Any]:
    accuracies = result.per_class(attack)
    selecting = _resized(validation.per_class(attack), len(accuracies))
    shared = np.where(np.isnan(accuracies), np.nan, selecting)  # only classes that both have samples of
    _, weakest = tail(shared, result.tail_share, result.tail_rounding)
    return {
        "value": nan_to_none(float(np.mean(accuracies[weakest]))),
        "classes": [result.names[index] for index in weakest],
        "n_validation": validation.n,
    }


def _resized(values: Floats, size: int) -> Floats:
    """Return the values, cut or extended with NaN."""
    return np.concatenate([values[:size], np.full(max(0, size - len(values)), np.nan)])


def _cross_fitted(result: EvalResult, attack: str) -> float | None:
    correct, y = result.attacked_samples(attack)
    rank = np.zeros(len(y), dtype=np.int64)  # of each sample within its class
    for label in np.unique(y):
        rank[y == label] = np.arange(int((y == label).sum()))
    values = []
    for half in (0, 1):
        selecting, scoring = (
            per_class(correct[rank % 2 == part], y[rank % 2 == part], len(result.classes)) for part in (half, 1 - half)
        )
        if np.isnan(selecting).all():
            return None
        weakest = tail(selecting, result.tail_share, result.tail_rounding)[1]
        values.append(float(np.mean(scoring[weakest])))
    return nan_to_none(float(np.mean(values)))

"""Two models on the same samples: the difference with its interval, and McNemar's test on where they differ."""

from typing import Any, NamedTuple

import numpy as np

from doubly.errors import UsageError
from doubly.evaluation.intervals import (
    Interval,
    Statistic,
    average_accuracy,
    bootstrap_difference,
    worst_accuracy,
)
from doubly.evaluation.metrics import Bools, Ints, per_class, tail
from doubly.evaluation.result import EvalResult


class McNemar(NamedTuple):
    first_only: int  # samples that only the first model gets right
    second_only: int
    p: float  # exact and two-sided: how likely so uneven a split is if neither model is better


def mcnemar(first: Bools, second: Bools) -> McNemar:
    from scipy.stats import binomtest

    ours, theirs = int((first & ~second).sum()), int((~first & second).sum())
    p = float(binomtest(ours, ours + theirs).pvalue) if ours + theirs else 1.0
    return McNemar(ours, theirs, p)


class Difference(NamedTuple):
    """First minus second under one attack, on the samples that both were measured on."""

    attack: str
    n: int
    average: Interval
    tail: Interval  # each model's own tail, picked anew in each resample
    worst: Interval
    test: McNemar


def compare(first: EvalResult, second: EvalResult, resamples: int = 2000, seed: int = 0) -> list[Difference]:
    """One difference for each attack that both results have; refuses different samples and different attacks."""
    shared_names = min(len(first.names), len(second.names))  # one of them may know more classes than the data
    if not np.array_equal(first.y, second.y) or first.names[:shared_names] != second.names[:shared_names]:
        raise UsageError("the two evaluations are of different samples: evaluate both models on the same images")
    shared = [name for name in first.answers if name in second.answers]
    _check("data_sha256", first.protocol.get("data_sha256"), second.protocol.get("data_sha256"))
    for name in shared:
        _check(name, _attack(first, name), _attack(second, name))
    return [_difference(first, second, name, resamples, seed) for name in shared]


def _attack(result: EvalResult, name: str) -> Any:
    """How an attack was made, as far as the result says."""
    if name == result.ensemble:
        said = ("label", "epsilon", "norm", "seed", "chunk", "substitutions")
        return {key: result.autoattack.get(key) for key in said}
    pgd = result.protocol.get("attack")
    implied = {"pgd": pgd, "margin": {**pgd, "loss": {"kind": "loss.logit_margin"}} if isinstance(pgd, dict) else None}
    return result.protocol.get("attacks", {}).get(name, implied.get(name))


def _check(what: str, ours: Any, theirs: Any) -> None:
    if ours is not None and theirs is not None and ours != theirs:
        raise UsageError(f"the two evaluations differ in {what}, {_where(ours, theirs)}: evaluate both alike")


def _where(ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                return f"{key}: {_where(ours.get(key), theirs.get(key))}"
    return f"{ours!s:.60} and {theirs!s:.60}"


def _difference(first: EvalResult, second: EvalResult, attack: str, resamples: int, seed: int) -> Difference:
    both = (first.answers[attack] >= 0) & (second.answers[attack] >= 0)
    if not both.any():
        raise UsageError(f"the two evaluations share no sample under {attack}: evaluate both on the same images")
    a, b, y = first.correct[attack][both], second.correct[attack][both], first.y[both]

    def tail_of(correct: Bools, labels: Ints) -> float:
        return tail(per_class(correct, labels, int(y.max()) + 1), first.tail_share, first.tail_rounding)[0]

    def interval(statistic: Statistic) -> Interval:
        return bootstrap_difference(a, b, y, statistic, resamples, seed)

    return Difference(
        attack, len(y), interval(average_accuracy), interval(tail_of), interval(worst_accuracy), mcnemar(a, b)
    )

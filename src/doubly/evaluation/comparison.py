"""Comparison of two models on the same samples: differences with intervals, and McNemar's test."""

from typing import Any, NamedTuple

import numpy as np

from doubly.bilevel.arguments import check_arguments
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
    """McNemar's exact test.

    Attributes:
        first_only: Samples that only the first model predicts correctly.
        second_only: Samples that only the second model predicts correctly.
        p: Two-sided p-value of the hypothesis that neither model is better.
    """

    first_only: int
    second_only: int
    p: float


def mcnemar(first: Bools, second: Bools) -> McNemar:
    """Test whether two models differ, given which samples each predicts correctly."""
    from scipy.stats import binomtest

    first_only, second_only = int((first & ~second).sum()), int((~first & second).sum())
    p = float(binomtest(first_only, first_only + second_only).pvalue) if first_only + second_only else 1.0
    return McNemar(first_only, second_only, p)


class Difference(NamedTuple):
    """First model minus second under one attack, on the samples that both were evaluated on.

    Attributes:
        attack: Name of the attack, or "clean".
        n: Number of samples.
        average: Difference of the accuracies.
        tail: Difference of the tail accuracies; each model has its own tail, selected again in each resample.
        worst: Difference of the accuracies of the weakest classes.
        test: McNemar's test.
    """

    attack: str
    n: int
    average: Interval
    tail: Interval
    worst: Interval
    test: McNemar


def compare(first: EvalResult, second: EvalResult, resamples: int = 2000, seed: int = 0) -> list[Difference]:
    """Compare two results under each attack that both have.

    Args:
        first: Evaluation of the first model.
        second: Evaluation of the second model on the same samples.
        resamples: Number of resamples of the bootstrap.
        seed: Seed of the bootstrap.

    Raises:
        UsageError: If samples or attacks differ.
    """
    check_arguments(compare, {"first": first, "second": second, "resamples": resamples, "seed": seed}, UsageError)
    shared_names = min(len(first.names), len(second.names))  # a network may have more classes than the data
    if not np.array_equal(first.y, second.y) or first.names[:shared_names] != second.names[:shared_names]:
        raise UsageError("the two evaluations are of different samples: evaluate both models on the same images")
    shared = [name for name in first.predictions if name in second.predictions]
    _check_equal("data_sha256", first.protocol.get("data_sha256"), second.protocol.get("data_sha256"))
    for name in shared:
        _check_equal(name, _attack_settings(first, name), _attack_settings(second, name))
    return [_difference(first, second, name, resamples, seed) for name in shared]


def _attack_settings(result: EvalResult, name: str) -> Any:
    """Return the settings of an attack, as far as the result has them."""
    if name == result.ensemble:
        keys = ("label", "epsilon", "norm", "seed", "chunk", "substitutions")
        return {key: result.autoattack.get(key) for key in keys}
    pgd = result.protocol.get("attack")
    implied = {"pgd": pgd, "margin": {**pgd, "loss": {"kind": "loss.logit_margin"}} if isinstance(pgd, dict) else None}
    return result.protocol.get("attacks", {}).get(name, implied.get(name))


def _check_equal(name: str, first: Any, second: Any) -> None:
    if first is not None and second is not None and first != second:
        raise UsageError(
            f"the two evaluations differ in {name}, {_describe_difference(first, second)}: evaluate both with the "
            "same settings"
        )


def _describe_difference(first: Any, second: Any) -> str:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in {**first, **second}:
            if first.get(key) != second.get(key):
                return f"{key}: {_describe_difference(first.get(key), second.get(key))}"
    return f"{first!s:.60} and {second!s:.60}"


def _difference(first: EvalResult, second: EvalResult, attack: str, resamples: int, seed: int) -> Difference:
    both = (first.predictions[attack] >= 0) & (second.predictions[attack] >= 0)
    if not both.any():
        raise UsageError(f"the two evaluations share no sample under {attack}: evaluate both on the same images")
    a, b, y = first.correct[attack][both], second.correct[attack][both], first.y[both]

    def tail_accuracy(correct: Bools, labels: Ints) -> float:
        return tail(per_class(correct, labels, int(y.max()) + 1), first.tail_share, first.tail_rounding)[0]

    def interval(statistic: Statistic) -> Interval:
        return bootstrap_difference(a, b, y, statistic, resamples, seed)

    return Difference(
        attack, len(y), interval(average_accuracy), interval(tail_accuracy), interval(worst_accuracy), mcnemar(a, b)
    )

"""The main result of a comparison: a headline and a sentence, for readers who skip the table."""

import math
from dataclasses import dataclass
from typing import Any

from doubly.report.collect import BASELINE, Comparison, autoattack_settings, mean_sd
from doubly.report.protocol import attack_name
from doubly.text import format_ball

STRONG_TAIL = "ra_strong_tail_30"
AVERAGES = {STRONG_TAIL: "ra_strong", "ra_tail_30": "ra_pgd"}  # tail -> average under the same attack
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True)
class Headline:
    """Tail and average of the best method in percent, with the differences to the baseline where there is one."""

    method: str
    tail: str
    average: str
    against: str = ""
    measured: str = ""

    def __str__(self) -> str:
        return f"{self.method}: tail {self.tail}, average {self.average}{self.against}"


def headline(comparison: Comparison) -> Headline:
    """Return tail *and* average of the best method, and how they were measured.

    A gain in the tail that costs much of the average is not hidden: both have their difference to adversarial training.
    """
    best = _best(comparison)[0]
    baseline = BASELINE if BASELINE in comparison.methods and best != BASELINE else ""
    texts = []
    for key in (_tail_key(comparison), average_key(comparison)):
        value = _over_seeds(comparison, best, key)[0]
        change = f" ({_signed(value - _over_seeds(comparison, baseline, key)[0])})" if baseline else ""
        texts.append(f"{value:.1f}{change}")
    tail, average = texts
    against = f" against {baseline}" if baseline else ""
    return Headline(best, tail, average, against, _measured(comparison, best))


def average_key(comparison: Comparison) -> str:
    """Return the field of the average under the attack of the headline: the strong attack where all runs have it."""
    return AVERAGES[_tail_key(comparison)]


def summary_sentence(comparison: Comparison) -> str:
    """Return how the weakest classes fare under the best method, compared with adversarial training.

    The best method has the highest tail of those whose evaluation is not suspicious: under the strong attack where all
    runs have it, else under PGD. Differences within two standard errors over seeds are called unclear; where a method
    has a single seed, the sentence says so.
    """
    best, candidates, trusted = _best(comparison)
    tails = {label: _over_seeds(comparison, label, _tail_key(comparison)) for label in comparison.methods}
    weakest, best_tail = _weakest(comparison), tails[best]
    if BASELINE not in tails or best == BASELINE:
        return f"With {best}, {weakest} is {_percent(best_tail[0])}."
    doubtful = [label for label in candidates if label not in trusted and tails[label][0] >= best_tail[0]]
    baseline_tail, more = tails[BASELINE], _under_autoattack(comparison, best) + _doubt(doubtful)
    if _clearly_above(best_tail, baseline_tail):
        single = [label for label in (best, BASELINE) if len(comparison.methods[label]) == 1]
        caution = f"one seed of {' and '.join(single)}" if single else f"judged over seeds, on {comparison.n} images"
        rise = f"up from {_percent(baseline_tail[0])} with {BASELINE} ({caution})"
        return f"With {best}, {weakest} is {_percent(best_tail[0])}, {rise}.{more}"
    verdict = "less than" if _clearly_above(baseline_tail, best_tail) else "not clearly different from"
    baseline = f"the {_percent(baseline_tail[0])} with {BASELINE}"
    return f"With {best}, {weakest} is {_percent(best_tail[0])}, {verdict} {baseline}.{more}"


def _best(comparison: Comparison) -> tuple[str, list[str], list[str]]:
    """Return the best method, all methods that could be, and those of them whose evaluation is not suspicious."""
    tails = {label: _over_seeds(comparison, label, _tail_key(comparison))[0] for label in comparison.methods}
    candidates = [label for label in tails if label != BASELINE] or list(tails)
    trusted = [label for label in candidates if not _suspicious(comparison, label)]
    return max(trusted or candidates, key=lambda label: tails[label]), candidates, trusted


def _measured(comparison: Comparison, best: str) -> str:
    """Return what every number of the headline needs beside it: n, attack, ε, seeds and the size of the tail."""
    protocol: dict[str, Any] = comparison.protocol
    if _tail_key(comparison) == STRONG_TAIL:
        attack, name = protocol.get("attacks", {}).get("strong", protocol.get("attack")), "the strong attack"
    else:
        attack, name = protocol.get("attack"), attack_name(protocol)
    threat = attack.get("threat", {}) if isinstance(attack, dict) else {}
    ball = f", {format_ball(threat['kind'], threat['radius'])}" if {"kind", "radius"} <= threat.keys() else ""
    seeds = len(comparison.methods[best])
    return (
        f"Percent of n = {comparison.n} test images under {name}{ball}; {_word(seeds)} seed{'s' * (seeds > 1)}. "
        f"Tail: mean over the {_tail_classes(comparison)}; average: over all images."
    )


def _tail_key(comparison: Comparison) -> str:
    return STRONG_TAIL if all(STRONG_TAIL in run.evaluation for run in comparison.runs) else "ra_tail_30"


def _under_autoattack(comparison: Comparison, best: str) -> str:
    """Return both averages under AutoAttack, where all runs have them: a gain under PGD alone is not robustness."""
    if not all(autoattack_settings(run) for label in (best, BASELINE) for run in comparison.methods[label]):
        return ""
    of_best, of_baseline = (_percent(_over_seeds(comparison, label, "ra_aa")[0]) for label in (best, BASELINE))
    return f" Under AutoAttack, accuracy on all classes is {of_best}, and {of_baseline} with {BASELINE}."


def _doubt(labels: list[str]) -> str:
    return f" Accuracies of {' and '.join(labels)} under PGD are suspicious (see the checks below)." if labels else ""


def _suspicious(comparison: Comparison, label: str) -> bool:
    return any(run.evaluation.get("trust", {}).get("verdict") == "suspicious" for run in comparison.methods[label])


def _over_seeds(comparison: Comparison, label: str, key: str) -> tuple[float, float]:
    """Return the mean in percent, and the variance of that mean."""
    runs = comparison.methods[label]
    mean, sd = mean_sd(100 * run.evaluation[key] for run in runs)
    return mean, (sd or 0.0) ** 2 / len(runs)


def _clearly_above(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Return True if the first is higher in whole percent and by more than two standard errors."""
    return round(first[0]) > round(second[0]) and first[0] - second[0] > 2 * math.sqrt(first[1] + second[1])


def _weakest(comparison: Comparison) -> str:
    attack = "the strong attack" if _tail_key(comparison) == STRONG_TAIL else "attack"
    return f"accuracy under {attack} on the {_tail_classes(comparison)}"


def _tail_classes(comparison: Comparison) -> str:
    count = len(comparison.runs[0].evaluation["ra_tail_30_classes"])
    return f"weakest {f'{_word(count)} ' * (count > 1)}of {_word(len(comparison.classes))} classes"


def _word(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def _percent(value: float) -> str:
    return f"{value:.0f}\u00a0%"  # no line break before the sign


def _signed(points: float) -> str:
    """Return `+14.5` or `−1.1`, and `±0.0` where nothing is left after rounding."""
    text = f"{abs(points):.1f}"
    return f"±{text}" if float(text) == 0 else f"{'+' if points > 0 else '−'}{text}"

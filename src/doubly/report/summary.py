"""The main result of a comparison in a sentence, for readers who skip the table."""

import math

from doubly.report.collect import BASELINE, Comparison, autoattack_settings, mean_sd

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def summary_sentence(comparison: Comparison) -> str:
    """Return how the weakest classes fare under the best method, compared with adversarial training.

    The best method has the highest RA-Tail-30 of those whose evaluation is not suspicious. Differences within two
    standard errors over seeds are called unclear; where a method has a single seed, the sentence says so.
    """
    tails = {label: _over_seeds(comparison, label, "ra_tail_30") for label in comparison.methods}
    candidates = [label for label in tails if label != BASELINE] or list(tails)
    trusted = [label for label in candidates if not _suspicious(comparison, label)]
    best = max(trusted or candidates, key=lambda label: tails[label][0])
    weakest, best_tail = _weakest(comparison), tails[best]
    if BASELINE not in tails or best == BASELINE:
        return f"With {best}, {weakest} is {_percent(best_tail[0])}."
    doubtful = [label for label in candidates if label not in trusted and tails[label][0] >= best_tail[0]]
    baseline_tail, more = tails[BASELINE], _under_autoattack(comparison, best) + _doubt(doubtful)
    if _clearly_above(best_tail, baseline_tail):
        single = [label for label in (best, BASELINE) if len(comparison.methods[label]) == 1]
        caution = f" (one seed of {' and '.join(single)})" if single else ""
        rise = f"up from {_percent(baseline_tail[0])} with {BASELINE}{caution}"
        return f"With {best}, {weakest} is {_percent(best_tail[0])}, {rise}.{more}"
    verdict = "less than" if _clearly_above(baseline_tail, best_tail) else "not clearly different from"
    baseline = f"the {_percent(baseline_tail[0])} with {BASELINE}"
    return f"With {best}, {weakest} is {_percent(best_tail[0])}, {verdict} {baseline}.{more}"


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
    count = len(comparison.runs[0].evaluation["ra_tail_30_classes"])
    return f"accuracy under attack on the weakest {_word(count)} of {_word(len(comparison.classes))} classes"


def _word(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def _percent(value: float) -> str:
    return f"{value:.0f}\u00a0%"  # no line break before the sign

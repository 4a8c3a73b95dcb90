"""What a comparison says, in a sentence for somebody who will not read the table."""

import math

from doubly.report.collect import Comparison, ensemble, mean_sd

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BASELINE = "AT"


def sentence(comparison: Comparison) -> str:
    """The weakest classes of the best method whose numbers can be trusted beside those of adversarial training; neutral
    where it is not better."""
    tails = {label: _over_seeds(comparison, label, "ra_tail_30") for label in comparison.methods}
    others = [label for label in tails if label != BASELINE] or list(tails)
    trusted = [label for label in others if not _suspicious(comparison, label)]
    best = max(trusted or others, key=lambda label: tails[label][0])
    weakest, ours = _weakest(comparison), tails[best]
    if BASELINE not in tails or best == BASELINE:
        return f"With {best} {weakest} in {ours[0]:.0f} % of attacks."
    doubtful = [label for label in others if label not in trusted and tails[label][0] >= ours[0]]
    theirs, more = tails[BASELINE], _under_autoattack(comparison, best) + _doubt(doubtful)
    if _clear(ours, theirs):
        alone = [label for label in (best, BASELINE) if len(comparison.methods[label]) == 1]
        caution = f" (one seed of {' and '.join(alone)})" if alone else ""
        rise = f"up from {theirs[0]:.0f} % with {BASELINE}{caution}"
        return f"With {best} {weakest} in {ours[0]:.0f} % of attacks, {rise}.{more}"
    verdict = "fewer than" if _clear(theirs, ours) else "not clearly different from"
    return (
        f"With {best} {weakest} in {ours[0]:.0f} % of attacks, {verdict} the {theirs[0]:.0f} % with {BASELINE}.{more}"
    )


def _under_autoattack(comparison: Comparison, best: str) -> str:
    """What the strongest attack leaves of it, on average: a gain under PGD alone is not robustness."""
    if not all(ensemble(run) for label in (best, BASELINE) for run in comparison.methods[label]):
        return ""
    ours, theirs = (_over_seeds(comparison, label, "ra_aa")[0] for label in (best, BASELINE))
    return f" Under AutoAttack all classes together hold in {ours:.0f} %, with {BASELINE} in {theirs:.0f} %."


def _doubt(labels: list[str]) -> str:
    return f" Numbers of {' and '.join(labels)} under PGD are suspicious: see below." if labels else ""


def _suspicious(comparison: Comparison, label: str) -> bool:
    return any(run.evaluation.get("trust", {}).get("verdict") == "suspicious" for run in comparison.methods[label])


def _over_seeds(comparison: Comparison, label: str, key: str) -> tuple[float, float]:
    """Mean, and the variance of that mean."""
    runs = comparison.methods[label]
    mean, sd = mean_sd(100 * run.evaluation[key] for run in runs)
    return mean, (sd or 0.0) ** 2 / len(runs)


def _clear(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Visible in whole percent, and more than two standard errors apart."""
    return round(one[0]) > round(other[0]) and one[0] - other[0] > 2 * math.sqrt(one[1] + other[1])


def _weakest(comparison: Comparison) -> str:
    count = len(comparison.runs[0].evaluation["ra_tail_30_classes"])
    return f"the weakest {_word(count)} of {_word(len(comparison.classes))} classes {'hold' if count > 1 else 'holds'}"


def _word(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)

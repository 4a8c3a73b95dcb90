"""What a comparison says, in a sentence for somebody who will not read the table."""

import math

from doubly.report.collect import Comparison, mean_sd

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BASELINE = "AT"


def sentence(comparison: Comparison) -> str:
    """The weakest classes of the best method beside those of adversarial training; neutral where it is not better."""
    tails = {label: _tail(comparison, label) for label in comparison.methods}
    best = max([label for label in tails if label != BASELINE] or tails, key=lambda label: tails[label][0])
    weakest, ours = _weakest(comparison), tails[best]
    if BASELINE not in tails or best == BASELINE:
        return f"With {best} {weakest} in {ours[0]:.0f} % of attacks."
    theirs = tails[BASELINE]
    if _clear(ours, theirs):
        caution = "" if min(len(comparison.methods[label]) for label in (best, BASELINE)) > 1 else " (one seed)"
        return (
            f"With {best} {weakest} in {ours[0]:.0f} % of attacks, up from {theirs[0]:.0f} % with {BASELINE}{caution}."
        )
    verdict = "fewer than" if _clear(theirs, ours) else "not clearly different from"
    return f"With {best} {weakest} in {ours[0]:.0f} % of attacks, {verdict} the {theirs[0]:.0f} % with {BASELINE}."


def _tail(comparison: Comparison, label: str) -> tuple[float, float]:
    mean, sd = mean_sd(100 * run.evaluation["ra_tail_30"] for run in comparison.methods[label])
    return mean, sd or 0.0


def _clear(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Visible in whole percent, and more than the seeds differ among themselves."""
    spread = math.hypot(one[1], other[1]) / math.sqrt(2)
    return round(one[0]) > round(other[0]) and one[0] - other[0] > spread


def _weakest(comparison: Comparison) -> str:
    count = len(comparison.runs[0].evaluation["ra_tail_30_classes"])
    return f"the weakest {_word(count)} of {_word(len(comparison.classes))} classes {'hold' if count > 1 else 'holds'}"


def _word(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)

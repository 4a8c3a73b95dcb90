"""The table of the campaign, and docs/reliability.md."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.outcomes import KINDS, Outcome

HEAD = ("campaign", "tried", "survived", "refused with a sentence", "lost", "tracebacks", "executed")


def count(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Return how many attempts ended in each way."""
    return Counter(outcome.kind for outcome in outcomes)


def table_lines(counts: Mapping[str, Counter[str]]) -> list[str]:
    """Return the table as Markdown."""
    rows = [(name, *_cells(numbers)) for name, numbers in counts.items()]
    rows.append(("**all**", *_cells(sum(counts.values(), Counter()))))
    return [f"| {' | '.join(row)} |" for row in (HEAD, ("---", *["---:"] * 6), *rows)]


def _cells(numbers: Counter[str]) -> list[str]:
    return [f"{numbers.total():,}", *(f"{numbers[kind]:,}" for kind in KINDS)]


def write_page(
    output: Path, counts: Mapping[str, Counter[str]], seed: int, scale: float, workers: int, seconds: float
) -> None:
    """Write docs/reliability.md."""
    output.write_text("\n".join(table_lines(counts)))

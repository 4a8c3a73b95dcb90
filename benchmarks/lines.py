"""A line of the page: what was measured, round by round, and whether its aim is met. No torch."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Seconds = dict[str, list[float]]  # contestant -> seconds, round by round


@dataclass(frozen=True)
class Settings:
    """What a part is asked: `measure(settings) -> Outcome` of its module."""

    part: str
    rounds: int
    quick: bool = False  # tiny: shows that it works, and measures nothing
    device: str = "cpu"


@dataclass(frozen=True)
class Line:
    """Values of all rounds, or a note on why there are none; a bare yes or no is 1 or 0 with the unit "answer"."""

    what: str
    values: tuple[float, ...] = ()
    aim: float | None = None
    at_least: bool = False
    unit: Literal["", "s", "answer"] = ""
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % percentile interval of the median, from 2,000 bootstrap samples of the rounds."""
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(self.values, k=len(self.values))) for _ in range(2000))
        return medians[50], medians[-51]

    @property
    def verdict(self) -> str:
        """Judged by the median, before it is rounded."""
        if not self.values:
            return "not measured"
        if self.aim is None:
            return ""
        return "met" if (self.median >= self.aim if self.at_least else self.median <= self.aim) else "MISSED"


@dataclass(frozen=True)
class Outcome:
    """What a part hands back."""

    lines: Sequence[Line]
    sizes: str = ""  # batch, K, images: what the lines were measured on
    seconds: Mapping[str, float] = field(default_factory=dict)  # contestant -> median
    notes: Sequence[str] = ()
    curves: Sequence[dict[str, Any]] = ()


def ratio(
    seconds: Seconds, above: str, below: str, aim: float | None = None, reasons: Mapping[str, str] | None = None
) -> Line:
    """Of two contestants that took turns, round by round; of one that did not take part, the reason."""
    for missing in (above, below):
        if missing not in seconds:
            return Line(
                f"{above} / {below}", aim=aim, note=(reasons or {}).get(missing, f"{missing} did not take part")
            )
    return Line(f"{above} / {below}", tuple(a / b for a, b in zip(seconds[above], seconds[below], strict=True)), aim)


def answer(what: str, yes: bool, note: str = "") -> Line:
    return Line(what, (float(yes),), 1.0, at_least=True, unit="answer", note=note)


def medians(seconds: Seconds) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def taking_turns(contestants: Mapping[str, Callable[[], float]], rounds: int) -> Seconds:
    """Each contestant returns its seconds. A round begins with the next one: what ran before leaves its mark."""
    names = list(contestants)
    seconds: Seconds = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(contestants[name]())
        message = ", ".join(f"{name} {seconds[name][-1]:.2f} s" for name in names)
        print(f"  round {turn + 1} of {rounds}: {message}", flush=True)
    return seconds


def shown(line: Line, quick: bool = False) -> tuple[str, str, str, str]:
    """Median, its interval, aim and verdict as the page and the terminal have them."""
    if line.unit == "answer":
        median, spread, aim = "yes" if line.values and line.median else "no" if line.values else "", "", "yes"
    else:
        unit = " s" if line.unit else ""
        median = f"{line.median:.3f}{unit}" if line.values else ""
        spread = "{:.3f} to {:.3f}".format(*line.interval) if len(line.values) > 2 else ""
        aim = "" if line.aim is None else f"{'≥' if line.at_least else '≤'} {line.aim:g}{unit}"
    verdict = "quick: not judged" if quick and line.values and line.aim is not None else line.verdict
    return median, spread, aim, verdict

"""What an evaluation found: the answer to every sample under every attack. Every number shown derives from these."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from doubly.attacks.autoattack import STANDARD
from doubly.errors import UsageError
from doubly.evaluation.intervals import Interval, average_accuracy, bootstrap, wilson, worst_accuracy
from doubly.evaluation.metrics import Bools, Floats, Ints, Rounding, confusion, per_class, tail, worst_class
from doubly.evaluation.weights import KLWeights, Normalization

NOT_MEASURED = -1
ENSEMBLES = ("autoattack", "apgd", "autoattack_in_part")


@dataclass(frozen=True, eq=False)
class EvalResult:
    """`answers["clean"]`, `answers["pgd"]`, …: the class given to each sample, -1 where that attack was not run on it.

    `answers["autoattack"]` holds the clean answer where all attacks failed; `after["apgd-ce"]`, … who stood after each.
    """

    y: Ints
    classes: tuple[str, ...]
    answers: Mapping[str, Ints]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    ids: Ints | None = None
    losses: Mapping[str, Floats] = field(default_factory=dict)  # cross-entropy under attack, for the weights
    after: Mapping[str, Bools] = field(default_factory=dict)
    autoattack: Mapping[str, Any] = field(default_factory=dict)  # label, complete, substitutions, warnings, seconds
    validation: "EvalResult | None" = None  # the same attacks on other images, to pick the tail's classes on
    examples: Mapping[str, Any] = field(default_factory=dict)  # what became of the attacked images when checked again
    trust: Mapping[str, Any] = field(default_factory=dict)
    tail_share: float = 0.3
    tail_rounding: Rounding = "round"
    weights_r: tuple[float, ...] = (10.0, 1.0, 0.1)
    weights_normalize: Normalization = "batch"
    margins: Mapping[str, Floats] = field(default_factory=dict)  # logit margins, clean and under attack
    curve: Mapping[str, Any] = field(default_factory=dict)  # accuracy under PGD at several radii

    def __post_init__(self) -> None:
        if "clean" not in self.answers:
            raise UsageError("an evaluation needs the answers to the clean images")
        for name, given in self.answers.items():
            if given.shape != self.y.shape:
                raise UsageError(f"{len(given)} answers under {name} for {len(self.y)} labels: give one per label")

    @property
    def n(self) -> int:
        return len(self.y)

    @property
    def sa(self) -> float:
        """Accuracy on clean images."""
        return self.accuracy("clean")

    @property
    def ra_pgd(self) -> float:
        return self.accuracy("pgd")

    @property
    def ra_aa(self) -> float:
        """Under AutoAttack; refused unless all four attacks ran to their end."""
        if not self.whole:
            raise UsageError('there is no RA-AA: evaluate with attacks=[…, "autoattack"], to the end')
        return self.accuracy("autoattack")

    @property
    def whole(self) -> bool:
        """Whether all four attacks of AutoAttack ran to their end on every chunk."""
        about = self.autoattack
        ended = about.get("label") == "RA-AA" and bool(about.get("complete"))
        return ended and "autoattack" in self.answers and tuple(self.after) == STANDARD

    @property
    def ra_tail_30(self) -> float:
        if self.tail_share != 0.3:
            raise UsageError(f"RA-Tail-30 is of 30 % of the classes, here it is {self.tail_share:.0%}: use tail('pgd')")
        return self.tail("pgd")[0]

    @property
    def attacks(self) -> list[str]:
        return [name for name in self.answers if name != "clean"]

    @cached_property
    def correct(self) -> dict[str, Bools]:
        """Per-sample booleans under each attack, over all samples; False where the attack was not run."""
        return {name: given == self.y for name, given in self.answers.items()}

    def measured(self, attack: str) -> tuple[Bools, Ints]:
        """(right or wrong, labels) of the samples that the attack was run on."""
        if attack not in self.answers:
            raise UsageError(f"this evaluation has no '{attack}': it has {', '.join(self.answers)}")
        run = self.answers[attack] != NOT_MEASURED
        if not run.any():
            raise UsageError(f"'{attack}' was run on no sample: evaluate on at least one image")
        return self.correct[attack][run], self.y[run]

    def accuracy(self, attack: str) -> float:
        return float(np.mean(self.measured(attack)[0]))

    def worst_case(self) -> tuple[float, int]:
        """Share of samples that stand against all attacks, each taken by itself, and how many samples had them all."""
        run = np.logical_and.reduce([given != NOT_MEASURED for given in self.answers.values()])
        held = np.logical_and.reduce([right[run] for right in self.correct.values()])
        return (float(np.mean(held)) if run.any() else math.nan), int(run.sum())

    def per_class(self, attack: str) -> Floats:
        return per_class(*self.measured(attack), len(self.classes))

    def tail(self, attack: str) -> tuple[float, list[str]]:
        """RA-Tail-30 and its classes, weakest first; share and rounding are fields."""
        value, picked = tail(self.per_class(attack), self.tail_share, self.tail_rounding)
        return value, [self.names[index] for index in picked]

    def worst(self, attack: str) -> tuple[str, float]:
        index, value = worst_class(self.per_class(attack))
        return self.names[index], value

    def confusion(self, attack: str) -> list[list[int]]:
        self.measured(attack)
        run = self.answers[attack] != NOT_MEASURED
        counts: list[list[int]] = confusion(self.answers[attack][run], self.y[run], len(self.classes)).tolist()
        return counts

    def interval(self, attack: str, of: str = "average", resamples: int = 1000) -> Interval:
        """95 %: Wilson's for the average, bootstrap for `tail` and `worst`.

        The weakest classes of a sample look weaker than the weakest classes are, and those of a resample weaker still:
        so the bootstrap's distances from the value are turned round, which takes that out; and the interval is made to
        hold Wilson's for the samples of the classes that were picked.
        """
        correct, y = self.measured(attack)
        if of == "average":
            return Interval(average_accuracy(correct, y), *wilson(int(correct.sum()), len(correct)))
        if of not in ("tail", "worst"):
            raise UsageError(f"an interval is of the average, tail or worst, got '{of}'")
        value, low, high = bootstrap(correct, y, self._tail_of if of == "tail" else worst_accuracy, resamples)
        accuracies, share, rounding = self.per_class(attack), self.tail_share, self.tail_rounding
        picked = tail(accuracies, share, rounding)[1] if of == "tail" else worst_class(accuracies)[0]
        among = np.isin(y, picked)
        fixed = wilson(int(correct[among].sum()), int(among.sum()))
        return Interval(
            value, max(0.0, min(value, 2 * value - high, fixed[0])), min(1.0, max(value, 2 * value - low, fixed[1]))
        )

    def _tail_of(self, correct: Bools, y: Ints) -> float:
        return tail(per_class(correct, y, len(self.classes)), self.tail_share, self.tail_rounding)[0]

    def weights(
        self, r: float = 1.0, normalize: Normalization = "batch", batch: int = 128, attack: str = "pgd"
    ) -> KLWeights:
        """The KL weights of the samples at this r (figure 5)."""
        if attack not in self.losses:
            raise UsageError(f"this evaluation kept no losses under '{attack}': evaluate again with that attack")
        return KLWeights.of(self.losses[attack], self.y, self.per_class(attack), r, normalize, batch)

    @property
    def label(self) -> str:
        """Of the number under AutoAttack: RA-AA, if all of it ran."""
        return str(self.autoattack.get("label", "AutoAttack"))

    @property
    def ensemble(self) -> str | None:
        """The name of AutoAttack's answers, or of those of a part of it."""
        return next((name for name in ENSEMBLES if name in self.answers), None)

    @cached_property
    def names(self) -> list[str]:
        return distinct(self.classes)

    def summary(self) -> dict[str, Any]:
        """The contents of evaluation.json."""
        return deepcopy(self._summary)

    @cached_property
    def _summary(self) -> dict[str, Any]:
        """Made once: it is both saved and shown, and takes some thousand resamples."""
        from doubly.evaluation.summary import summary

        return summary(self)

    def save(self, folder: Path | str, **more: Any) -> None:
        """evaluation.json, which people read, and evaluation.npz, which everything derives from."""
        from doubly.evaluation.io import write

        write(self, Path(folder), more)

    @staticmethod
    def load(folder: Path | str) -> "EvalResult":
        """What `save` wrote; the validation part is not kept."""
        from doubly.evaluation.io import read

        return read(Path(folder))


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with the class index added where two classes share one."""
    taken = {name for name in names if names.count(name) == 1}
    result = []
    for index, name in enumerate(names):
        if names.count(name) > 1:
            name = f"{name} ({index})"
            while name in taken:
                name += "'"
            taken.add(name)
        result.append(name)
    return result


def number(accuracy: float) -> float | None:
    """JSON has no NaN: the accuracy of a class without samples is null."""
    return None if math.isnan(accuracy) else float(accuracy)

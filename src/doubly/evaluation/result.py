"""The result of an evaluation: the prediction of every sample under every attack. All numbers derive from these."""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from doubly.attacks.autoattack import STANDARD
from doubly.errors import UsageError
from doubly.evaluation import show
from doubly.evaluation.intervals import Interval, average_accuracy, weakest_interval, wilson, worst_accuracy
from doubly.evaluation.metrics import (
    Bools,
    Floats,
    Ints,
    Rounding,
    confusion,
    distinct_names,
    per_class,
    tail,
    worst_class,
)
from doubly.evaluation.predict import NOT_ATTACKED
from doubly.evaluation.weakest import Tail, Worst, named_tail, named_worst
from doubly.evaluation.weights import KLWeights, Normalization
from doubly.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENSEMBLE_PREDICTIONS = ("autoattack", "apgd", "autoattack_in_part")  # names of AutoAttack's predictions


@dataclass(frozen=True, eq=False)
class EvalResult(Settings):
    """The prediction of every sample, clean and under every attack, and how they were computed.

    Accuracies are fractions in [0, 1].

    Attributes:
        y: Labels, (n,).
        classes: Names of the classes.
        predictions: Predicted classes by attack, (n,) each: "clean", "pgd", …; -1 where the attack was not run.
            "autoattack" holds the clean prediction of a sample that no attack of AutoAttack has broken.
        protocol: How it was computed: attacks, seed, chunk size, checksum of the images.
        ids: Positions of the samples in their dataset, (n,).
        losses: Cross-entropy under each attack, (n,).
        robust_after: Which samples are still correct after each attack of AutoAttack and all before it, (n,).
        autoattack: Label, settings, progress and warnings of AutoAttack.
        validation: The same attacks on other images, on which the classes of the tail are selected as well.
        examples: A check of the attacked images themselves.
        trust: Checks of whether the numbers can be trusted.
        tail_share: Share of the classes that is the tail.
        tail_rounding: How that share becomes a number of classes.
        weights_r: Temperatures of the KL weights that the summary shows.
        weights_normalize: Normalization of these weights.
        margins: Logit margins, clean and under each attack, (n,).
        curve: Accuracy at several radii, under PGD or an attack that looks for the smallest perturbation.
        radii: Length of the smallest perturbation that each such attack found, (n,): 0 where the clean image is
            misclassified, infinite where none was found.
        corruptions: Accuracies on corrupted images, by corruption and severity.

    Raises:
        UsageError: If there are no clean predictions, or not one prediction per label.
    """

    y: Ints
    classes: tuple[str, ...]
    predictions: Mapping[str, Ints]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    ids: Ints | None = None
    losses: Mapping[str, Floats] = field(default_factory=dict)
    robust_after: Mapping[str, Bools] = field(default_factory=dict)
    autoattack: Mapping[str, Any] = field(default_factory=dict)
    validation: "EvalResult | None" = None
    examples: Mapping[str, Any] = field(default_factory=dict)
    trust: Mapping[str, Any] = field(default_factory=dict)
    tail_share: float = 0.3
    tail_rounding: Rounding = "round"
    weights_r: tuple[float, ...] = (10.0, 1.0, 0.1)
    weights_normalize: Normalization = "batch"
    margins: Mapping[str, Floats] = field(default_factory=dict)
    curve: Mapping[str, Any] = field(default_factory=dict)
    radii: Mapping[str, Floats] = field(default_factory=dict)
    corruptions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "clean" not in self.predictions:
            raise UsageError('an evaluation needs the predictions of the clean images: give predictions["clean"]')
        for name, classes in self.predictions.items():
            if np.shape(classes) != self.y.shape:
                raise UsageError(
                    f"{np.size(classes)} predictions under {name} for {len(self.y)} labels: give one per label"
                )

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.y)

    @property
    def sa(self) -> float:
        """Standard accuracy: that of the clean images."""
        return self.accuracy("clean")

    @property
    def clean_accuracy(self) -> float:
        """Accuracy on the clean images, as `sa`."""
        return self.accuracy("clean")

    def robust_accuracy(self, attack: str = "pgd") -> float:
        """Compute the accuracy under an attack.

        Args:
            attack: Name of the attack.

        Returns:
            The share of correct samples.

        Raises:
            UsageError: If it was not run.
        """
        if attack == "clean":
            raise UsageError("clean is no attack: use clean_accuracy")
        return self.accuracy(attack)

    @property
    def ra_pgd(self) -> float:
        """Accuracy under PGD; UsageError if it was not run."""
        return self.accuracy("pgd")

    @property
    def ra_aa(self) -> float:
        """Accuracy under AutoAttack; UsageError unless all four attacks have run on every requested sample."""
        if not self.autoattack_complete:
            raise UsageError('there is no RA-AA: evaluate with attacks=[…, "autoattack"], to the end')
        return self.accuracy("autoattack")

    @property
    def ra_tail_30(self) -> float:
        """Mean accuracy under PGD of the weakest 30 % of the classes; UsageError if the tail has another share."""
        if self.tail_share != 0.3:
            raise UsageError(f"RA-Tail-30 is of 30 % of the classes, here it is {self.tail_share:.0%}: use tail('pgd')")
        return self.tail("pgd")[0]

    @property
    def attacks(self) -> list[str]:
        """Names of the attacks."""
        return [name for name in self.predictions if name != "clean"]

    @property
    def autoattack_complete(self) -> bool:
        """Whether all four attacks of AutoAttack have run on every chunk."""
        done = self.autoattack.get("label") == "RA-AA" and bool(self.autoattack.get("complete"))
        return done and "autoattack" in self.predictions and tuple(self.robust_after) == STANDARD

    @property
    def label(self) -> str:
        """Label of the accuracy under AutoAttack: RA-AA only if all of it has run."""
        return str(self.autoattack.get("label", "AutoAttack"))

    @property
    def ensemble(self) -> str | None:
        """Name of the predictions under AutoAttack or a part of it; None if it was not run."""
        return next((name for name in ENSEMBLE_PREDICTIONS if name in self.predictions), None)

    @cached_property
    def names(self) -> list[str]:
        """Names of the classes, made distinct."""
        return distinct_names(self.classes)

    @cached_property
    def correct(self) -> dict[str, Bools]:
        """Whether each sample is predicted correctly, by attack; False where the attack was not run."""
        return {name: classes == self.y for name, classes in self.predictions.items()}

    def attacked_samples(self, attack: str) -> tuple[Bools, Ints]:
        """Select the samples that an attack was run on.

        Args:
            attack: Name of the attack, or "clean".

        Returns:
            Whether each of them is predicted correctly, and their labels.

        Raises:
            UsageError: If the attack was not run.
        """
        if attack not in self.predictions:
            raise UsageError(f"this evaluation has no '{attack}': it has {', '.join(self.predictions)}")
        run = self.predictions[attack] != NOT_ATTACKED
        if not run.any():
            raise UsageError(f"'{attack}' was run on no sample: evaluate on at least one image")
        return self.correct[attack][run], self.y[run]

    def accuracy(self, attack: str) -> float:
        """Compute the accuracy on the samples that an attack was run on.

        Args:
            attack: Name of the attack, or "clean".

        Returns:
            The share of correct samples.

        Raises:
            UsageError: If the attack was not run.
        """
        return float(np.mean(self.attacked_samples(attack)[0]))

    def worst_case(self) -> tuple[float, int]:
        """Compute the accuracy against the strongest attack for each sample.

        Returns:
            The share of samples that every attack leaves correct (NaN without samples), and the number of samples
            that all attacks were run on.
        """
        run = np.logical_and.reduce([classes != NOT_ATTACKED for classes in self.predictions.values()])
        robust = np.logical_and.reduce([correct[run] for correct in self.correct.values()])
        return (float(np.mean(robust)) if run.any() else math.nan), int(run.sum())

    def per_class(self, attack: str) -> Floats:
        """Compute the accuracy of each class.

        Args:
            attack: Name of the attack, or "clean".

        Returns:
            Accuracies, (classes,); NaN for a class without samples.

        Raises:
            UsageError: If the attack was not run.
        """
        return per_class(*self.attacked_samples(attack), len(self.classes))

    def tail(self, attack: str = "pgd") -> Tail:
        """Compute the mean accuracy of the weakest classes; `tail_share` and `tail_rounding` say of how many.

        Args:
            attack: Name of the attack, or "clean".

        Returns:
            The mean, and the names of these classes, weakest first; its attribute `tied` names further classes that
            are as weak as the last of them.

        Raises:
            UsageError: If the attack was not run.
        """
        return named_tail(self.per_class(attack), self.names, self.tail_share, self.tail_rounding)

    def worst(self, attack: str = "pgd") -> Worst:
        """Find the weakest class.

        Args:
            attack: Name of the attack, or "clean".

        Returns:
            Its name and accuracy; its attribute `tied` names further classes with the same accuracy.

        Raises:
            UsageError: If the attack was not run.
        """
        return named_worst(self.per_class(attack), self.names)

    def confusion(self, attack: str) -> list[list[int]]:
        """Count the predictions of each class.

        Args:
            attack: Name of the attack, or "clean".

        Returns:
            The confusion matrix: counts, one row per label, one column per prediction.

        Raises:
            UsageError: If the attack was not run.
        """
        _, y = self.attacked_samples(attack)
        predictions = self.predictions[attack][self.predictions[attack] != NOT_ATTACKED]
        counts: list[list[int]] = confusion(predictions, y, len(self.classes)).tolist()
        return counts

    def interval(self, attack: str, of: str = "average", resamples: int = 1000) -> Interval:
        """Compute a 95 % confidence interval: Wilson's for the average, the bootstrap for tail and worst class.

        Args:
            attack: Name of the attack, or "clean".
            of: average, tail or worst.
            resamples: Number of resamples of the bootstrap.

        Returns:
            The value and both ends.

        Raises:
            UsageError: If the attack was not run, or `of` is something else.
        """
        correct, y = self.attacked_samples(attack)
        if of == "average":
            return Interval(average_accuracy(correct, y), *wilson(int(correct.sum()), len(correct)))
        if of not in ("tail", "worst"):
            raise UsageError(f"an interval is of the average, tail or worst, got '{of}'")
        accuracies = self.per_class(attack)
        if of == "worst":
            return weakest_interval(correct, y, worst_accuracy, worst_class(accuracies)[0], resamples)
        weakest = tail(accuracies, self.tail_share, self.tail_rounding)[1]
        return weakest_interval(correct, y, self._tail_accuracy, weakest, resamples)

    def _tail_accuracy(self, correct: Bools, y: Ints) -> float:
        return tail(per_class(correct, y, len(self.classes)), self.tail_share, self.tail_rounding)[0]

    def weights(
        self, r: float = 1.0, normalize: Normalization = "batch", batch: int = 128, attack: str = "pgd"
    ) -> KLWeights:
        """Compute the weights that KL-DRO would give to the samples, w_i = exp(loss_i / r) / sum.

        Args:
            r: Temperature.
            normalize: batch: weights add up to 1 in each batch; all: over all samples; mean_one: to their number.
            batch: Samples per batch.
            attack: Name of the attack whose losses are used.

        Returns:
            The weights, with their statistics per class.

        Raises:
            UsageError: If there are no losses under that attack, or a value is not valid.
        """
        if attack not in self.losses:
            raise UsageError(f"this evaluation has no losses under '{attack}': evaluate again with that attack")
        return KLWeights.of(self.losses[attack], self.y, self.per_class(attack), r, normalize, batch)

    def table(self) -> Any:
        """Return the accuracy of each class and of all, without and under each attack.

        Returns:
            A pandas DataFrame if pandas is installed, else a list with a dict per row.
        """
        return show.table(self)

    def plot(self) -> "Figure":
        """Draw the accuracy of each class, without and under each attack.

        Returns:
            A matplotlib figure; `figure.savefig("classes.png")` writes it.
        """
        return show.plot(self)

    def __repr__(self) -> str:
        return show.one_line(self)

    def _repr_html_(self) -> str:
        return show.html(self)

    def summary(self) -> dict[str, Any]:
        """Return the contents of evaluation.json: every number, as plain JSON values."""
        return deepcopy(self._summary)

    @cached_property
    def _summary(self) -> dict[str, Any]:
        """Computed once: it is both saved and shown, and takes some thousand resamples."""
        from doubly.evaluation.summary import summarize

        return summarize(self)

    def save(self, folder: Path | str, **extra: Any) -> None:
        """Write evaluation.json, for people and reports, and evaluation.npz, with the values of each sample.

        Args:
            folder: Where to write; it is created if needed.
            **extra: Further fields of evaluation.json.

        Raises:
            OSError: If the files cannot be written.
        """
        from doubly.evaluation.io import write_result

        write_result(self, Path(folder), extra)

    @staticmethod
    def load(folder: Path | str) -> "EvalResult":
        """Read what `save` wrote, except the part `validation`.

        Args:
            folder: Folder with evaluation.json and evaluation.npz, such as a run directory.

        Returns:
            The result.

        Raises:
            UsageError: If the files are missing, damaged, or of another version.
        """
        from doubly.evaluation.io import read_result

        return read_result(Path(folder))

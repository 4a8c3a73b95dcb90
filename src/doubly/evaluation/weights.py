"""The weights that KL-DRO would give to the samples of a test set, w_i = exp(loss_i / r) / sum: the paper's figure 5.

The weights of that figure must be normalized within mini-batches: over 10,000 images they could not exceed 0.001 as
often as the paper says. The paper does not say which r it used, so r and the normalization are always named.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from doubly.errors import UsageError
from doubly.evaluation.metrics import Floats, Ints
from doubly.settings import explained

Normalization = Literal["batch", "all", "mean_one"]
NORMALIZATIONS = get_args(Normalization)
THRESHOLD = 0.001  # as in the paper
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False)
class KLWeights:
    """Weights of the samples, and how they relate to the accuracy of the classes.

    Attributes:
        weights: Weight of each sample, (n,).
        y: Labels, (n,).
        accuracies: Accuracy of each class under the same attack, (classes,).
        r: Temperature.
        normalize: What the weights add up to; see `of`.
        batch: Samples per batch, for the normalization within batches.
    """

    weights: Floats
    y: Ints
    accuracies: Floats
    r: float
    normalize: Normalization
    batch: int

    @staticmethod
    @explained
    def of(losses: Floats, y: Ints, accuracies: Floats, r: float, normalize: Normalization, batch: int) -> "KLWeights":
        """Compute the weights from the losses.

        Args:
            losses: Loss of each sample under attack, (n,).
            y: Labels, (n,).
            accuracies: Accuracy of each class under the same attack, (classes,).
            r: Temperature.
            normalize: batch: weights add up to 1 in each batch, in a fixed random order, since test sets are often
                sorted by class; all: over all samples; mean_one: to the number of samples.
            batch: Samples per batch.

        Raises:
            UsageError: If r or the batch is not positive, or the normalization is unknown.
        """
        if not r > 0 or batch < 1:
            raise UsageError(f"r must be positive and the batch at least 1, got r = {r:g} and batch = {batch}")
        if normalize not in NORMALIZATIONS:
            raise UsageError(f"weights are normalized by {', '.join(NORMALIZATIONS)}, got '{normalize}'")
        # Batches of nearly equal size: in a short last one every weight would be larger.
        count = max(1, round(len(losses) / batch)) if normalize == "batch" else 1
        weights = np.empty(len(losses))
        for rows in np.array_split(np.random.default_rng(0).permutation(len(losses)), count):
            weights[rows] = _softmax(losses[rows] / r)
        weights *= len(losses) if normalize == "mean_one" else 1
        return KLWeights(weights, y, accuracies, r, normalize, batch)

    def above(self, threshold: float = THRESHOLD) -> float:
        """Return the share of all samples with a weight above the threshold."""
        return float(np.mean(self.weights > threshold))

    def above_per_class(self, threshold: float = THRESHOLD) -> Floats:
        """Return the share of each class's samples with a weight above the threshold; NaN without samples."""
        return self._mean_per_class((self.weights > threshold).astype(np.float64))

    def mean_per_class(self) -> Floats:
        """Return the mean weight of each class; NaN without samples."""
        return self._mean_per_class(self.weights)

    def quantiles_per_class(self) -> list[list[float] | None]:
        """Return the quantiles `QUANTILES` of the weights of each class; None for a class without samples."""
        by_class = [self.weights[self.y == label] for label in range(len(self.accuracies))]
        return [np.quantile(weights, QUANTILES).tolist() if len(weights) else None for weights in by_class]

    def correlation(self) -> dict[str, float | None]:
        """Return the correlation of mean weight and accuracy over the classes; None where one of them is constant."""
        from scipy.stats import pearsonr, spearmanr

        means = self.mean_per_class()
        present = ~np.isnan(means) & ~np.isnan(self.accuracies)
        a, b = means[present], self.accuracies[present]
        if len(a) < 2 or any(np.ptp(values) <= 1e-9 * np.abs(values).max() for values in (a, b)):
            return {"pearson": None, "spearman": None}
        return {"pearson": float(pearsonr(a, b)[0]), "spearman": float(spearmanr(a, b)[0])}

    def summary(self, names: list[str]) -> dict[str, Any]:
        """Return what evaluation.json keeps.

        Args:
            names: Names of the classes.
        """
        above = self.above_per_class()
        return {
            "r": self.r,
            "normalize": self.normalize,
            **({"batch": self.batch} if self.normalize == "batch" else {}),
            "above_0.001": self.above(),
            "above_0.001_per_class": {n: None if np.isnan(a) else float(a) for n, a in zip(names, above, strict=True)},
            "quantiles_per_class": dict(zip(names, self.quantiles_per_class(), strict=True)),
            "correlation_with_class_accuracy": self.correlation(),
        }

    def _mean_per_class(self, values: Floats) -> Floats:
        counts = np.bincount(self.y, minlength=len(self.accuracies))
        sums = np.bincount(self.y, weights=values, minlength=len(self.accuracies))
        means: Floats = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
        return means


def _softmax(values: Floats) -> Floats:
    exponentials: Floats = np.exp(values - values.max())
    exponentials /= exponentials.sum()
    return exponentials

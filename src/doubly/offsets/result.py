"""The result of a repair: the shifted network, and its accuracies before and after on images that did not fit it."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from doubly.errors import UsageError
from doubly.evaluation.comparison import Difference, compare
from doubly.evaluation.metrics import nan_to_none
from doubly.evaluation.result import EvalResult
from doubly.models.shifted import ShiftedLogits
from doubly.offsets.config import RepairConfig
from doubly.offsets.fit import FittedOffsets
from doubly.offsets.folding import FoldedNetwork

SCHEMA = 1
RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class RepairResult:
    """A repaired network, and what the repair did.

    Attributes:
        model: A copy of the network with the offsets in it; the original is not changed.
        layer: Name of the layer whose bias holds the offsets; None if the network is wrapped in `ShiftedLogits`.
        offsets: What was added to the logit of each class, priority times the fitted offsets, (classes,).
        fit: The fitted offsets, and how the fit went.
        before: Evaluation of the network as it was, on held-out images that were not used for the fit.
        after: Evaluation of the repaired network on the same images.
        config: The settings.
        notes: What a reader of the result must know.
        about: Further fields of repair.json.
    """

    model: nn.Module
    layer: str | None
    offsets: Tensor
    fit: FittedOffsets
    before: EvalResult
    after: EvalResult
    config: RepairConfig
    notes: tuple[str, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"RepairResult(before={self.before!r}, after={self.after!r}, folded_into={self.layer!r})"

    def differences(self, resamples: int = RESAMPLES) -> list[Difference]:
        """Compare after with before on the same images.

        Args:
            resamples: Number of resamples of the bootstrap.

        Returns:
            One difference per attack, and that of the clean images.
        """
        return compare(self.after, self.before, resamples)

    def summary(self) -> dict[str, Any]:
        """Return the contents of repair.json, as plain JSON values."""
        fit = self.fit
        names = _class_names(self.before, len(self.offsets))
        return {
            "schema": SCHEMA,
            "offsets": dict(zip(names, self.offsets.tolist(), strict=True)),
            "fitted_offsets": dict(zip(names, fit.offsets.tolist(), strict=True)),
            "folded_into": self.layer,
            "settings": asdict(self.config),
            "fit": {
                "error_before": [nan_to_none(value) for value in fit.errors[0].tolist()],
                "error_after": [nan_to_none(value) for value in fit.errors[1].tolist()],
                "spread": fit.spread,
                "objective": fit.history,
                "implicit_share": fit.implicit_share,
            },
            "before": _accuracies(self.before),
            "after": _accuracies(self.after),
            "difference": [_difference(row) for row in self.differences()],
            "notes": list(self.notes),
            **self.about,
        }

    def save(self, folder: Path | str) -> None:
        """Write weights.safetensors and repair.json.

        Args:
            folder: Where to write; it is created if needed.

        Raises:
            UsageError: If the folder cannot be written.
        """
        from doubly.offsets.files import write_network

        write_network(self, Path(folder))

    def at(self, priority: float) -> nn.Module:
        """Return the network at another point between its old logits (0) and the fitted offsets (1).

        Args:
            priority: Factor of the fitted offsets.

        Raises:
            UsageError: If it is not in [0, 1].
        """
        if not 0 <= priority <= 1:
            raise UsageError(f"priority lies in [0, 1], got {priority:g}")
        return ShiftedLogits(self.model, priority * self.fit.offsets - self.offsets)


def folded_or_wrapped(folded: FoldedNetwork) -> list[str]:
    """Return a note if the offsets could not be folded."""
    if folded.layer is not None:
        return []
    return [
        "the logits do not come straight from a linear layer with a bias, so the offsets are added behind the network "
        "(doubly.models.shifted.ShiftedLogits)"
    ]


def _accuracies(result: EvalResult) -> dict[str, Any]:
    """Return the numbers of an evaluation, without its parts about single samples."""
    summary = result.summary()
    return {name: value for name, value in summary.items() if name not in ("confusion", "weights", "examples")}


def _difference(row: Difference) -> dict[str, Any]:
    parts = {name: list(getattr(row, name)) for name in ("average", "tail", "worst")}
    return {"attack": row.attack, "n": row.n, **parts, "p": row.test.p}


def _class_names(result: EvalResult, count: int) -> list[str]:
    """Return the names of the classes, and numbers for classes that only the network has."""
    names = [*result.names[:count]]
    return [*names, *(str(label) for label in range(len(names), count))]

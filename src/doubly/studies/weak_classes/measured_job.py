"""A job that trains a network, fits its class offsets on held-out images, and measures it at several factors of them.

Each measurement is a JSON file and an .npz file in the run directory; what is there already is not computed again.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from doubly.callbacks import Callback
from doubly.checkpoints.load import load_model_and_info
from doubly.data import Images, Splits, load_splits, train_split
from doubly.data.splits import HoldoutParts, divide_holdout
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.metrics import Bools, Ints
from doubly.evaluation.network import model_sha256
from doubly.evaluation.result import EvalResult
from doubly.files import write_arrays, write_json
from doubly.jobs.job import Job, StopEvaluation
from doubly.models.shifted import ShiftedLogits
from doubly.offsets.api import fit_network
from doubly.offsets.config import RepairConfig
from doubly.offsets.held_out import RepairImages
from doubly.reading import load_npz, read_tree

SCHEMA = 1


@dataclass(frozen=True)
class Measure:
    """One measurement of a network.

    Attributes:
        name: Name of its files.
        split: validation: the held-out images that select (part B); test: the test images.
        first: Position of its first image.
        count: Number of images; fewer where there are fewer.
        attack: Name of the attack.
        scales: Factors of the class offsets; 0 is the network as trained, 1 the repaired one.
    """

    name: str
    split: Literal["validation", "test"]
    first: int
    count: int
    attack: str
    scales: tuple[float, ...]


class Measured(NamedTuple):
    """What was measured: which images are correct at each scale, (scales, n), clean and attacked, and their labels."""

    scales: tuple[float, ...]
    correct: Bools
    clean: Bools
    y: Ints

    def at(self, scale: float) -> Bools:
        """Return which images are correct under attack at a scale, (n,)."""
        row: Bools = self.correct[self.scales.index(scale)]
        return row


@dataclass(frozen=True)
class MeasuredJob(Job):
    """A run that is measured as trained and with class offsets.

    Attributes:
        measures: What is measured.
    """

    measures: tuple[Measure, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the network is trained and all measurements are there."""
        trained = self.is_started and self.epochs_done == self.run.epochs
        return trained and all(self._is_measured(measure) for measure in self.measures)

    def evaluate_trained(self, stop: Callable[[], bool]) -> None:
        splits = load_splits(self.run.data)
        parts = divide_holdout(self.run.data, train_split(self.run.data, splits).held_out, method_learns=True)
        model, _ = load_model_and_info(self.output, "last", None)
        callback = StopEvaluation(stop)
        offsets = self._offsets(model, parts, callback)
        for measure in self.measures:
            if not self._is_measured(measure):
                images = _select(measure, splits, parts)
                results = [self._evaluate(model, s * offsets, measure, images, callback) for s in measure.scales]
                self._write(measure, images, results)

    def read(self, measure: Measure) -> Measured | None:
        """Return a measurement; None if it is not there."""
        if not self._is_measured(measure):
            return None
        file = self._file(measure.name).with_suffix(".npz")
        try:
            arrays = load_npz(file)
            y = arrays["y"].astype(np.int64)
            correct, clean = (
                np.unpackbits(arrays[key], axis=1, count=len(y)).astype(bool) for key in ("correct", "clean")
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} is damaged ({error!s:.80}): delete it and measure again") from None
        return Measured(measure.scales, correct, clean, y)

    def _file(self, name: str) -> Path:
        return self.output / f"{name}.json"

    def _is_measured(self, measure: Measure) -> bool:
        try:
            saved = read_tree(self._file(measure.name))
        except UsageError:  # nothing there, or nothing that can be read
            return False
        return saved.get("schema") == SCHEMA and saved.get("measure") == _plain(measure)

    def _offsets(self, model: torch.nn.Module, parts: HoldoutParts, callback: Callback) -> torch.Tensor:
        """Return the offsets, fitted on all images of part A, or read from an earlier fit of the same network."""
        checksum, file = model_sha256(model), self._file("offsets")
        try:
            saved = read_tree(file)
            if saved["model_sha256"] == checksum:
                return torch.tensor(saved["offsets"])
        except (UsageError, KeyError):
            pass
        if parts.driver is None or parts.validation is None:
            raise UsageError("the run holds nothing out: a study needs data.holdout and data.driver_share")
        images = RepairImages(parts.driver, parts.validation, [])
        fit, notes = fit_network(model, images, self.run.validation.attack.threat, RepairConfig(), callback)
        write_json(
            file,
            {
                "model_sha256": checksum,
                "offsets": fit.offsets.tolist(),
                "implicit_share": fit.implicit_share,
                "n": len(parts.driver),
                "notes": notes,
            },
        )
        return fit.offsets

    def _evaluate(
        self, model: torch.nn.Module, offsets: torch.Tensor, measure: Measure, images: Images, callback: Callback
    ) -> EvalResult:
        threat = self.run.validation.attack.threat
        state = self.output / f"state-{measure.name}" if measure.attack == "autoattack" else None
        return evaluate(
            ShiftedLogits(model, offsets),
            images,
            threat,
            (measure.attack,),
            callbacks=[callback],
            trust=False,
            state=state,
        )

    def _write(self, measure: Measure, images: Images, results: list[EvalResult]) -> None:
        correct = np.stack([result.correct[measure.attack] for result in results])
        clean = np.stack([result.correct["clean"] for result in results])
        y = results[0].y.astype(np.uint8 if len(images.classes) < 256 else np.int64)
        file = self._file(measure.name).with_suffix(".npz")
        arrays = {"correct": np.packbits(correct, axis=1), "clean": np.packbits(clean, axis=1), "y": y}
        write_arrays(file, arrays, compressed=True)
        points = [
            {
                "scale": scale,
                "sa": result.accuracy("clean"),
                "average": result.accuracy(measure.attack),
                "tail": result.tail(measure.attack)[0],
                "worst": result.worst(measure.attack)[1],
                "per_class": [float(row[results[0].y == c].mean()) for c in np.unique(results[0].y)],
            }
            for scale, result, row in zip(measure.scales, results, correct, strict=True)
        ]
        protocol = {key: results[0].protocol.get(key) for key in ("attacks", "attack", "seed", "data_sha256")}
        write_json(
            self._file(measure.name),
            {
                "schema": SCHEMA,
                "measure": _plain(measure),
                "n": len(images),
                "points": points,
                "protocol": {key: value for key, value in protocol.items() if value is not None},
            },
        )


def _select(measure: Measure, splits: Splits, parts: HoldoutParts) -> Images:
    images = splits.test if measure.split == "test" else parts.validation
    if images is None or measure.first >= len(images):
        raise UsageError(f"{measure.name}: there are no {measure.split} images from number {measure.first} on")
    return images.subset(torch.arange(measure.first, min(len(images), measure.first + measure.count)))


def _plain(measure: Measure) -> dict[str, Any]:
    return {**asdict(measure), "scales": list(measure.scales)}

"""Training from Python in one call: any nn.Module, any images."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from doubly.config.run import Data, Run
from doubly.config.user_code import AnyImages, GivenData, GivenModel, as_images
from doubly.data import Augmentation, Balanced, Imbalance, Splits, Unchanged
from doubly.errors import UsageError
from doubly.rundir import RunDir, read_metrics
from doubly.training.loop import Callback, NullCallback, train_run
from doubly.types import Method


class Trained(NamedTuple):
    model: nn.Module  # the one that was handed in, or its average where the run kept one
    metrics: list[dict[str, Any]]  # one row per epoch
    directory: Path | None


class _Recorder:
    def __init__(self, watch: Callback) -> None:
        self.rows: list[dict[str, Any]] = []
        self.watch, self.step, self.say = watch, watch.step, watch.say

    def row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.watch.row(row)


def train(
    model: nn.Module,
    data: AnyImages,
    method: Method,
    *,
    test: AnyImages | None = None,
    output: Path | str | None = None,
    resume: bool = False,
    holdout: float | None = None,
    augment: Augmentation | None = None,
    imbalance: Imbalance | None = None,
    watch: Callback | None = None,
    **settings: Any,
) -> Trained:
    """Train `model` in place. `settings` are fields of `Run`: epochs, batch, seed, optimizer, validation, average, device, …

    Without `test` a tenth of the data is held out for the evaluation during training. `output` names a run directory.
    `watch` is told of every step and epoch: `TensorBoard(folder)`, or anything with its methods.
    """
    images = as_images(data)
    held = holdout if holdout is not None else (0.1 if test is None else 0.0)
    if test is None and held == 0:
        raise UsageError("nothing is left to measure on: pass test=…, or hold out a share of the data")
    splits = Splits(images, images if test is None else as_images(test))
    run = Run(
        Data(GivenData(), imbalance or Balanced(), held, augment=augment or Unchanged()),
        GivenModel(),
        method,
        **settings,
    )
    recorder = _Recorder(watch or NullCallback())
    path = None if output is None else Path(output)
    trained = train_run(run, path, model=model, splits=splits, resume=resume, watch=recorder)
    return Trained(trained, recorder.rows if path is None else read_metrics(RunDir(path).metrics), path)

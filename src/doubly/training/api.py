"""Training from Python in one call: any nn.Module, any images."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from doubly.callbacks import Callback
from doubly.config.optimizers import Factory, OptimizerConfig, as_optimizer_config
from doubly.config.run import Run
from doubly.config.user_code import InMemoryData, InMemoryModel
from doubly.data import Augmentation, Balanced, Data, Imbalance, Splits, Unchanged
from doubly.data.convert import AnyImages, as_images
from doubly.errors import UsageError
from doubly.methods import Method
from doubly.rundir import RunDir, read_metrics
from doubly.training.loop import train_run

DEFAULT_HOLDOUT = 0.1  # share of the data that is held out if there are no test images


class Trained(NamedTuple):
    """The outcome of `train`.

    Attributes:
        model: The network that was handed in, or its average if the run kept an EMA.
        metrics: One row per epoch.
        directory: The run directory, if one was written.
    """

    model: nn.Module
    metrics: list[dict[str, Any]]
    directory: Path | None


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
    optimizer: OptimizerConfig | Factory | None = None,
    callbacks: Iterable[Callback] = (),
    **settings: Any,
) -> Trained:
    """Train a network in place.

    Args:
        model: The network, from images in [0, 1] to logits.
        data: Training images: `Images`, a pair (pixels, labels), or a map-style dataset.
        method: How to train, such as `AT(PGD(LinfBall(8/255)))`.
        test: Images for the evaluation during training. Without them a tenth of the data is held out for it.
        output: Run directory to write.
        resume: Whether a run in `output` is continued.
        holdout: Share of the data that is held out, which may choose the best epoch.
        augment: Random changes of each batch.
        imbalance: Which training images are kept.
        optimizer: `SGD(…)`, `Adam(…)` or `AdamW(…)` of `doubly.config`, or a function from a list of parameters to a
            torch optimizer, such as `torch.optim.RMSprop`. By default `SGD()`.
        callbacks: Listeners, such as `TensorBoard(folder)`.
        **settings: Further fields of `Run`: epochs, batch_size, seed, validation, ema_decay, device, …

    Returns:
        The trained network, its metrics, and the run directory.

    Raises:
        UsageError: If something does not fit; the message says what to do.
        NonFiniteError: If a loss, gradient or weight is NaN or infinite.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument is the network, an nn.Module, got {type(model).__name__}: build it first")
    if not isinstance(method, Method):
        raise UsageError(f"the third argument is the method, such as AT(), got {method!r:.60}: see doubly list methods")
    names = [f.name for f in fields(Run)]
    if unknown := [name for name in settings if name not in names]:
        raise UsageError(f"train has no setting '{unknown[0]}': it has {', '.join(names)}")
    images = as_images(data)
    share = holdout if holdout is not None else (DEFAULT_HOLDOUT if test is None else 0.0)
    if test is None and share == 0:
        raise UsageError("nothing is left to measure on: pass test=…, or hold out a share of the data")
    if optimizer is not None:
        settings["optimizer"] = as_optimizer_config(optimizer)
    run = Run(
        Data(InMemoryData(), imbalance or Balanced(), share, augment=augment or Unchanged()),
        InMemoryModel(),
        method,
        **settings,
    )
    splits = Splits(images, images if test is None else as_images(test))
    path = None if output is None else Path(output)
    result = train_run(run, path, model=model, splits=splits, resume=resume, callbacks=callbacks)
    return Trained(result.model, result.rows if path is None else read_metrics(RunDir(path).metrics), path)

"""Training from Python in one call: any nn.Module, any images."""

from collections.abc import Iterable
from dataclasses import fields, replace
from inspect import signature
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from doubly.attacks import Attack
from doubly.bilevel.arguments import check_arguments
from doubly.callbacks import Callback
from doubly.config.optimizers import SGD, Factory, InMemoryOptimizer, OptimizerConfig, as_optimizer_config
from doubly.config.run import Run, Validation
from doubly.config.serialize import suggestion
from doubly.config.user_code import InMemoryData, InMemoryModel
from doubly.data import Augmentation, Balanced, Data, Imbalance, Splits, Unchanged
from doubly.data.convert import AnyImages, as_images
from doubly.errors import UsageError
from doubly.evaluation.attacks import reference_pgd
from doubly.methods import METHODS, Method
from doubly.models.adapt import Statistics, adapt_model, normalization, original_model
from doubly.recipes.methods import method_by_name
from doubly.rundir import RunDir, read_metrics
from doubly.schedules import Cyclic, Schedule
from doubly.threat import LinfBall, Threat
from doubly.training.loop import train_run
from doubly.training.progress import PrintProgress

CHECKED = (
    "threat",
    "holdout",
    "mean",
    "std",
    "augment",
    "imbalance",
    "output",
    "resume",
    "callbacks",
)
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

    def __repr__(self) -> str:
        where = "" if self.directory is None else f", directory={str(self.directory)!r}"
        return f"Trained({type(self.model).__name__}, {len(self.metrics)} epochs{where})"


def train(
    model: nn.Module,
    data: AnyImages,
    method: Method | type[Method] | str,
    *,
    epochs: int = 60,
    lr: float | Schedule | None = None,
    batch_size: int = 128,
    optimizer: OptimizerConfig | Factory | None = None,
    threat: Threat | None = None,
    test: AnyImages | None = None,
    holdout: float | None = None,
    mean: Statistics | None = None,
    std: Statistics | None = None,
    augment: Augmentation | None = None,
    imbalance: Imbalance | None = None,
    output: Path | str | None = None,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    verbose: bool = True,
    **settings: Any,
) -> Trained:
    """Train a network in place.

    Args:
        model: The network, from images in [0, 1] to logits. It may also return an object with `.logits`, a dict with
            "logits", or a tuple whose first entry is the logits.
        data: Training images: `Images`, a pair (pixels, labels), a map-style dataset, or a DataLoader.
        method: How to train, such as `AT(PGD(LinfBall(8/255)))`; or a name from `doubly list recipes`, such as
            "done_pgd", with the settings of the paper.
        epochs: Passes over the training images.
        lr: Highest learning rate of the cyclic schedule, or a schedule of `doubly.schedules`; None is the optimizer's.
        batch_size: Images per step.
        optimizer: `SGD(…)`, `Adam(…)` or `AdamW(…)` of `doubly.config`, or a function from a list of parameters to a
            torch optimizer, such as `torch.optim.RMSprop`. By default `SGD()`.
        threat: What the attacker may do, if the method is given by name; `LinfBall()` by default.
        test: Images for the evaluation during training. Without them a tenth of the data is held out for it.
        holdout: Share of the data that is held out, which may choose the best epoch.
        mean: Mean of the channels, if the network expects normalized images; it is applied inside, after the attack.
        std: Standard deviation of the channels.
        augment: Random changes of each batch.
        imbalance: Which training images are kept.
        output: Run directory to write.
        resume: Whether a run in `output` is continued.
        callbacks: Listeners, such as `TensorBoard(folder)`.
        verbose: Whether to print what is held out, validations and alarms, and a progress bar on terminals.
        **settings: Further fields of `Run`: seed, validation, warm_up, ema_decay, device, …

    Returns:
        The trained network, its metrics, and the run directory.

    Raises:
        UsageError: If something does not fit; the message says what to do.
        NonFiniteError: If a loss, gradient or weight is NaN or infinite.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument is the network, an nn.Module, got {type(model).__name__}: build it first")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("the network has no values, its parameters are on the device meta: call model.to_empty(…)")
    if isinstance(data, Method) or (isinstance(data, type) and issubclass(data, Method)):
        raise UsageError("the second argument is the data, got a method: the order is train(model, data, method)")
    _check_names(settings)
    check_arguments(train, {k: v for k, v in locals().items() if k in CHECKED}, UsageError)
    images = as_images(data)
    chosen = _as_method(method, threat, len(images))
    share = holdout if holdout is not None else (DEFAULT_HOLDOUT if test is None else 0.0)
    if test is None and share == 0:
        raise UsageError("nothing is left to measure on: pass test=…, or hold out a share of the data")
    settings |= {"epochs": _whole("epochs", epochs), "batch_size": _whole("batch_size", batch_size)}
    if chosen.attack is not None:  # validated at the radius that it is trained at
        settings.setdefault("validation", Validation(attack=reference_pgd(chosen.attack.threat)))
    statistics = normalization(mean, std, images.pixels(slice(0, 1)).shape[1])
    run = Run(
        Data(InMemoryData(), imbalance or Balanced(), share, augment=augment or Unchanged()),
        InMemoryModel() if statistics is None else InMemoryModel(*map(tuple, statistics)),
        chosen,
        optimizer=_as_optimizer(optimizer, lr),
        **settings,
    )
    network = adapt_model(model, images.pixels(slice(0, 2)), mean, std)
    splits = Splits(images, images if test is None else as_images(test))
    path = None if output is None else Path(output)
    if resume and (path is None or not RunDir(path).config.exists()):
        where = "resume=True needs output=…" if path is None else f"there is no run in {path} to resume"
        raise UsageError(f"{where}: leave out resume, or name the directory of an earlier run")
    listeners = [*([PrintProgress(run.epochs)] if verbose else []), *callbacks]
    result = train_run(run, path, model=network, splits=splits, resume=resume, callbacks=listeners)
    metrics = result.rows if path is None else read_metrics(RunDir(path).metrics)
    return Trained(original_model(result.model), metrics, path)


def _check_names(settings: dict[str, Any]) -> None:
    """Refuse a setting that neither `train` nor `Run` has."""
    own = [name for name in signature(train).parameters if name != "settings"]
    further = [f.name for f in fields(Run) if f.name not in (*own, "data", "model", "method")]
    for name in settings:
        if name not in further:
            near = suggestion(name, [*own, *further]).partition("did you mean")[2]
            hint = f"; did you mean{near}" if near else ""
            raise UsageError(f"train has no setting '{name}': it has {', '.join((*own[3:], *further))}{hint}")


def _as_method(method: Any, threat: Threat | None, images: int) -> Method:
    """Return the method of a value, a class or a name."""
    if isinstance(method, str):
        return method_by_name(method, threat or LinfBall(), images)
    if threat is not None:
        raise UsageError(
            "threat goes with a method's name; a method has its own in its attack: write AT(PGD(LinfBall(4 / 255)))"
        )
    if isinstance(method, type) and issubclass(method, Method):
        method = method()
    if not isinstance(method, Method):
        raise UsageError(
            f"the third argument is the method, such as AT() or 'at', got {method!r:.60}: methods are "
            f"{', '.join(METHODS)}"
        )
    if method.attack is not None and not isinstance(method.attack, Attack):
        raise UsageError(
            f"{type(method).__name__} has {type(method.attack).__name__} as its attack: write "
            f"{type(method).__name__}(PGD(LinfBall(8 / 255)))"
        )
    return method


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):  # numpy's whole numbers are integral, too
        near = max(1, round(value)) if isinstance(value, float) and isfinite(value) else 10
        raise UsageError(f"{name} is a whole number, got {value!r:.40}: write {name}={near}")
    return int(value)


def _as_optimizer(optimizer: OptimizerConfig | Factory | None, lr: float | Schedule | None) -> OptimizerConfig:
    """Return the optimizer with its learning rate."""
    config = SGD() if optimizer is None else as_optimizer_config(optimizer)
    if lr is None:
        return config
    lr = float(lr) if isinstance(lr, Real) and not isinstance(lr, bool) else lr
    if not isinstance(lr, float | Schedule):
        raise UsageError(f"lr is a number or a schedule of doubly.schedules, got {type(lr).__name__}: write lr=0.1")
    if not isinstance(lr, Schedule) and not lr > 0:
        raise UsageError(f"lr must be above 0, got {lr}: write lr=0.1")
    schedule = lr if isinstance(lr, Schedule) else Cyclic(float(lr))
    if isinstance(config, InMemoryOptimizer):
        return InMemoryOptimizer(config.factory, schedule, config.clip)
    return replace(config, lr=schedule)  # type: ignore[type-var]  # subclasses are dataclasses

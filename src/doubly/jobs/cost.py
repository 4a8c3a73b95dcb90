"""Estimates of how long a run takes on this machine: passes of the network, counted, times seconds of a pass."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, attack_context
from doubly.config.device import select_device
from doubly.config.run import Run
from doubly.data import DATASETS, Data, Images, load_splits, train_split
from doubly.data.download.published import PUBLISHED
from doubly.data.loader import steps_per_epoch
from doubly.distributed import SINGLE_PROCESS
from doubly.errors import UsageError
from doubly.evaluation.attacks import select_attacks
from doubly.evaluation.autoattack.eta import passes_per_image
from doubly.evaluation.autoattack.runner import ROBUST_SHARE
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.predict import predict
from doubly.evaluation.radius_curve import FACTORS
from doubly.seeding import global_generators
from doubly.training.passes import Passes, average_passes, counted_passes, holdout_batches, random_images, tiny_network
from doubly.training.precision import Precision
from doubly.training.recompute import recomputed_activations
from doubly.training.setup import is_channels_last_faster
from doubly.training.state import set_memory_format

MAX_SECONDS = 1.5  # for timing each of the three kinds of passes
MAX_REPEATS = 7
TINY = 1e-9  # factor of the radius
TRUST_STEPS = 11, 50  # further attack steps of the checks of trust at most: as a multiple of PGD's steps, and fixed


@dataclass(frozen=True)
class DataSize:
    """The size of a run's data: numbers of training, test and held-out images, shape of an image, number of classes."""

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int
    held_out: int = 0


@dataclass(frozen=True)
class PassTimes:
    """Seconds per image of each kind of pass, measured on this machine.

    Attributes:
        forward: A forward pass.
        attack: A forward pass, and backward to the image.
        update: A forward pass, and backward to the weights.
        batch_size: Images of a training step.
        threads: Threads that were used.
    """

    forward: float
    attack: float
    update: float
    batch_size: int
    threads: int

    def attack_seconds(self, passes: Passes) -> float:
        """Return the seconds of attacks with these passes, per image."""
        return passes.forward * self.forward + passes.backward * (self.attack - self.forward)

    def step_seconds(self, passes: Passes) -> float:
        """Return the seconds of a training step: one backward pass goes to the weights, the others to the images."""
        return self.batch_size * (self.attack_seconds(passes) + self.update - self.attack)


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a run: passes per step, with those on held-out images, and seconds of both phases."""

    step_passes: Passes
    train_seconds: float
    eval_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of training and evaluation."""
        return self.train_seconds + self.eval_seconds


def data_sizes(runs: Iterable[Run]) -> tuple[dict[Data, DataSize], list[str]]:
    """Read the data of runs.

    Returns:
        The sizes of the data that can be read, and the messages about those that cannot.
    """
    sizes: dict[Data, DataSize] = {}
    errors: dict[str, None] = {}
    for data in dict.fromkeys(run.data for run in runs):
        try:
            splits = load_splits(data)
            train, held_out = train_split(data, splits)
            shape, count = tuple(train.x.shape[1:]), 0 if held_out is None else len(held_out)
            sizes[data] = DataSize(len(train), len(splits.test), shape, len(train.classes), count)
        except UsageError as error:
            errors[str(error)] = None
    return sizes, list(errors)


def published_size(data: Data) -> DataSize:
    """Return the size of a published dataset without its files, as if its classes had equally many images.

    Raises:
        UsageError: If the dataset is not a published one.
    """
    name = next(name for name, kind in DATASETS.items() if kind is type(data.source))
    if name not in PUBLISHED:
        raise UsageError(f"the size of the dataset {name} is unknown without its files: give their folder")
    published = PUBLISHED[name]
    count = min(published.train, data.train_images or published.train)
    held_out = round(data.holdout * count)
    remaining = data.imbalance.keep(torch.arange(count - held_out) % published.classes, published.classes)
    return DataSize(len(remaining), published.test, published.shape, published.classes, held_out)


def estimate_run(
    run: Run, size: DataSize, times: PassTimes, epochs: int, evaluate: EvalConfig | None, attacks: Sequence[str]
) -> Estimate:
    """Estimate how long a run takes.

    Args:
        run: The run.
        size: Size of its data.
        times: Seconds of its passes.
        epochs: Epochs that are left to train.
        evaluate: How it is evaluated afterwards; None if it is not.
        attacks: Attacks of the evaluation.
    """
    channels, classes = size.shape[0], size.classes
    epoch_steps = steps_per_epoch(size.train, run.batch_size)
    driver = round((0.5 if run.data.driver_share is None else run.data.driver_share) * size.held_out)
    share = holdout_batches(run.method, driver, run.batch_size, epoch_steps)
    passes = average_passes(run.method, size.shape, classes, share)
    remaining = range(run.epochs - epochs, run.epochs)
    validations = sum((epoch + 1) % run.validation.every == 0 or epoch + 1 == run.epochs for epoch in remaining)
    validation_passes = _image_passes(run.validation.attack, ("pgd", "margin"), channels, classes)
    validation_seconds = min(run.validation.size, size.test) * times.attack_seconds(validation_passes)
    train_seconds = epochs * epoch_steps * times.step_seconds(passes) + validations * validation_seconds
    eval_seconds = 0.0 if evaluate is None else _evaluation_seconds(run, size, times, evaluate, tuple(attacks))
    return Estimate(passes, train_seconds, eval_seconds)


def _evaluation_seconds(
    run: Run, size: DataSize, times: PassTimes, config: EvalConfig, attacks: tuple[str, ...]
) -> float:
    count, pgd = min(size.test, config.images or size.test), run.validation.attack
    seconds = count * times.attack_seconds(_image_passes(pgd, attacks, size.shape[0], size.classes))
    if config.curve_images is not None:
        seconds += min(count, config.curve_images) * len(FACTORS) * (pgd.steps + 1) * times.attack
    if config.trust:
        steps = TRUST_STEPS[0] * pgd.steps + TRUST_STEPS[1]
        seconds += min(count, config.trust_images) * steps * times.attack
    ensemble = select_attacks(attacks, pgd).ensemble
    if ensemble is not None:
        images = ROBUST_SHARE * min(count, config.autoattack_images or count)
        seconds += images * sum(passes_per_image(ensemble, size.classes).values()) * times.forward
    return seconds


@cache
def _image_passes(pgd: PGD, attacks: tuple[str, ...], channels: int, classes: int) -> Passes:
    """Count the passes per image of an evaluation with these attacks, AutoAttack aside; at most, for early stops."""
    images, model = random_images(4, (channels, 8, 8), classes), tiny_network(channels, classes)
    with torch.no_grad():
        predictions = model.eval()(images.pixels(slice(None))).argmax(1)
    selected = select_attacks(attacks, pgd).attacks
    # Correct images that a tiny ball cannot change: an attack that stops early takes all of its steps.
    unbroken = {name: replace(attack, threat=attack.threat.scaled(TINY)) for name, attack in selected.items()}  # type: ignore[type-var]
    with counted_passes(model, len(images)) as passes:
        predict(model, replace(images, y=predictions), unbroken)
    return passes


def measure_passes(run: Run, size: DataSize, threads: int) -> PassTimes:
    """Time the run's network on random images, which takes a few seconds; a large batch is timed in part.

    Args:
        run: The run, with its network, batch size, device and precision.
        size: Size of its data.
        threads: Threads to use.
    """
    threads_before, device = torch.get_num_threads(), select_device(run.device, SINGLE_PROCESS)
    torch.set_num_threads(threads)
    try:
        with global_generators(0):
            channels = size.shape[0]
            model = run.model.build(channels, size.classes, [0.5] * channels, [0.25] * channels).to(device)
        images = random_images(run.batch_size, size.shape, size.classes).to(device)
        count = _affordable_count(model, images, run.batch_size)
        channels_last = run.channels_last == "yes" or (
            run.channels_last == "auto" and is_channels_last_faster(model, images, count, 1)
        )
        set_memory_format(model, channels_last)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        x = images.pixels(slice(0, count)).contiguous(memory_format=layout)
        recompute = recomputed_activations(model) if run.recompute_activations else nullcontext()
        with recompute, Precision(run.precision, device).autocast():
            forward, attack, update = (_timed(partial(kind, model, x)) / count for kind in (_forward, _attack, _update))
        return PassTimes(forward, attack, update, run.batch_size, threads)
    finally:
        torch.set_num_threads(threads_before)


def _affordable_count(model: nn.Module, images: Images, batch_size: int) -> int:
    """Return how many images to time at once: two images of a large network may take a second."""
    x = images.pixels(slice(0, 2))
    return max(2, min(batch_size, round(2 * 0.2 * MAX_SECONDS / _timed(partial(_update, model, x), 1))))


def _timed(work: Callable[[], object], max_repeats: int = MAX_REPEATS) -> float:
    """Return the median of a few repeats after one to warm up; the time of the first if it takes very long."""
    first = _seconds(work)
    if first > MAX_SECONDS:
        return first
    seconds = [_seconds(work)]
    while len(seconds) < max_repeats and sum(seconds) < MAX_SECONDS:
        seconds.append(_seconds(work))
    return statistics.median(seconds)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _forward(model: nn.Module, x: Tensor) -> None:
    with attack_context(model, "eval"), torch.no_grad():
        model(x).sum().item()


def _attack(model: nn.Module, x: Tensor) -> None:
    point = x.clone().requires_grad_()
    with attack_context(model, "eval"):
        torch.autograd.grad(model(point).sum(), point)[0].sum().item()


def _update(model: nn.Module, x: Tensor) -> None:
    model.train().zero_grad()
    model(x).sum().backward()
    next(p.grad for p in model.parameters() if p.grad is not None).sum().item()

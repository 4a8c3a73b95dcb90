"""How long a run will take here: its passes of the network, counted, times the seconds of a pass, measured."""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, attacked
from doubly.attacks.autoattack import AutoAttack
from doubly.config.run import Data, Run
from doubly.data import DATASETS, Images, load_splits, train_split
from doubly.data.download.published import PUBLISHED
from doubly.data.loader import steps_per_epoch
from doubly.errors import UsageError
from doubly.evaluation.attacks import chosen
from doubly.evaluation.autoattack.eta import Remaining
from doubly.evaluation.autoattack.runner import STANDING
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.predict import answers
from doubly.evaluation.radius_curve import SHARES
from doubly.seeding import global_generators
from doubly.training.passes import Passes, counted, predicted, random_images, tiny_network
from doubly.training.precision import Precision
from doubly.training.recompute import recomputing
from doubly.training.setup import chosen_device, faster_channels_last

PATIENCE = 1.5  # seconds for each of the three things that are timed


@dataclass(frozen=True)
class Size:
    """Of a run's data."""

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int


@dataclass(frozen=True)
class Pace:
    """Seconds per image, on this machine with so many threads."""

    forward: float
    attack: float  # forward, and backward to the image
    update: float  # forward, and backward to the weights
    batch: int
    threads: int

    def seconds(self, cost: Passes) -> float:
        """Of attacks with these passes of one image."""
        return cost.forward * self.forward + cost.backward * (self.attack - self.forward)

    def step(self, cost: Passes) -> float:
        """Of a step with these passes of a batch: one backward goes to the weights, the others to the images."""
        return self.batch * (self.seconds(cost) + self.update - self.attack)


@dataclass(frozen=True)
class Estimate:
    cost: Passes  # of a step
    train: float  # seconds, for the epochs that are left
    measure: float


def sizes(runs: Iterable[Run]) -> tuple[dict[Data, Size], list[str]]:
    """Of the data as they are here; and a sentence for each dataset that cannot be read, which is not among them."""
    found: dict[Data, Size] = {}
    problems: dict[str, None] = {}
    for run in {run.data: run for run in runs}.values():
        try:
            splits = load_splits(run.data)
            train = train_split(run.data, splits).train
            found[run.data] = Size(len(train), len(splits.test), tuple(train.x.shape[1:]), len(train.classes))
        except UsageError as problem:
            problems[str(problem)] = None
    return found, list(problems)


def published_size(data: Data) -> Size:
    """Of data that are not here, as they were published; as if its classes had equally many images."""
    name = next(name for name, kind in DATASETS.items() if kind is type(data.source))
    if name not in PUBLISHED:
        raise UsageError(f"how large the data are cannot be known without them, as {name} is no published dataset")
    about = PUBLISHED[name]
    n = min(about.train, data.train_images or about.train)
    kept = data.imbalance.keep(torch.arange(n) % about.classes, about.classes)
    return Size(len(kept), about.test, about.shape, about.classes)


def estimate(
    run: Run, size: Size, pace: Pace, epochs: int, how: EvalConfig | None, attacks: tuple[str, ...]
) -> Estimate:
    """`epochs`: how many are left to train."""
    channels, classes = size.shape[0], size.classes
    cost = predicted(run.method, channels, classes)  # type: ignore[arg-type]  # methods are frozen, so hashable
    left = range(run.epochs - epochs, run.epochs)
    validations = sum((epoch + 1) % run.validation.every == 0 or epoch + 1 == run.epochs for epoch in left)
    validate = min(run.validation.size, size.test) * pace.seconds(
        _image_cost(run.validation.attack, ("pgd", "margin"), channels, classes)
    )
    train = epochs * steps_per_epoch(size.train, run.batch_size) * pace.step(cost) + validations * validate
    return Estimate(cost, train, 0.0 if how is None else _measuring(run, size, pace, how, attacks))


def _measuring(run: Run, size: Size, pace: Pace, how: EvalConfig, attacks: tuple[str, ...]) -> float:
    n, steps = min(size.test, how.images or size.test), run.validation.attack.steps
    seconds = n * pace.seconds(_image_cost(run.validation.attack, attacks, size.shape[0], size.classes))
    if how.curve_images is not None:
        seconds += min(n, how.curve_images) * len(SHARES) * (steps + 1) * pace.attack
    if how.trust:  # at most: its further attacks are on what stands
        seconds += min(n, how.trust_images) * (11 * steps + 50) * pace.attack
    ensemble = chosen(attacks, run.validation.attack)[1]
    if ensemble is not None:
        seconds += min(n, how.autoattack_images or n) * STANDING * _work(ensemble, size.classes) * pace.forward
    return seconds


def _work(attack: AutoAttack, classes: int) -> int:
    """Forward passes of an image that stands to the end."""
    return sum(Remaining(attack, classes, 1).work.values())


@cache
def _image_cost(pgd: PGD, attacks: tuple[str, ...], channels: int, classes: int) -> Passes:
    images, model = random_images(4, (channels, 8, 8), classes), tiny_network(channels, classes)
    with counted(model, len(images)) as found:
        answers(model, images, chosen(attacks, pgd)[0])
    return found


def calibrated(run: Run, size: Size, threads: int) -> Pace:
    """Time the run's network on random images, a few seconds in all; large batches in part."""
    before, device = torch.get_num_threads(), chosen_device(run.device)
    torch.set_num_threads(threads)
    try:
        with global_generators(0):
            channels = size.shape[0]
            model = run.model.build(channels, size.classes, [0.5] * channels, [0.25] * channels).to(device)
        images = random_images(run.batch_size, size.shape, size.classes).to(device)
        n = _affordable(model, images, run.batch_size)
        last = run.channels_last == "yes" or (run.channels_last == "auto" and faster_channels_last(model, images, n, 1))
        layout = torch.channels_last if last else torch.contiguous_format
        model.to(memory_format=layout)  # type: ignore[call-overload]
        x = images.pixels(slice(0, n)).contiguous(memory_format=layout)
        recompute = recomputing(model) if run.recompute_activations else nullcontext()
        with recompute, Precision(run.precision, device).autocast():
            forward, attack, update = (_timed(partial(kind, model, x)) / n for kind in (_forward, _attack, _update))
        return Pace(forward, attack, update, run.batch_size, threads)
    finally:
        torch.set_num_threads(before)


def _affordable(model: nn.Module, images: Images, batch: int) -> int:
    """How many images to time at once: two of a large network may take a second."""
    x = images.pixels(slice(0, 2))
    return max(2, min(batch, round(2 * 0.2 * PATIENCE / _timed(partial(_update, model, x), 1))))


def _timed(work: Callable[[], object], most: int = 7) -> float:
    """The median of a few, after one to warm up; that one, where even it takes long."""
    first = _seconds(work)
    if first > PATIENCE:
        return first
    seconds = [_seconds(work)]
    while len(seconds) < most and sum(seconds) < PATIENCE:
        seconds.append(_seconds(work))
    return statistics.median(seconds)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _forward(model: nn.Module, x: Tensor) -> None:
    with attacked(model, "eval"), torch.no_grad():
        model(x).sum().item()


def _attack(model: nn.Module, x: Tensor) -> None:
    point = x.clone().requires_grad_()
    with attacked(model, "eval"):
        torch.autograd.grad(model(point).sum(), point)[0].sum().item()


def _update(model: nn.Module, x: Tensor) -> None:
    model.train().zero_grad()
    model(x).sum().backward()
    next(p.grad for p in model.parameters() if p.grad is not None).sum().item()

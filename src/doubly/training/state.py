"""The state of a run in training: everything that changes from step to step."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from doubly.checks import check_finite
from doubly.config.run import Run
from doubly.data import Images
from doubly.data.loader import batches, steps_per_epoch
from doubly.distributed import Communicator
from doubly.errors import UsageError
from doubly.methods import Method
from doubly.models.batch_norm import GlobalBatchNorm
from doubly.training.memory import peak_memory
from doubly.training.metrics import EpochMetrics
from doubly.training.passes import Passes
from doubly.training.precision import Precision
from doubly.training.recompute import recomputed_activations
from doubly.types import Batch, Objective, State, TrainStep

MIN_WARM_UP = 0.01  # of epsilon: an attack of radius 0 is none


@dataclass(frozen=True)
class TrainData:
    """The images of a run.

    Attributes:
        train: Training images.
        validation: Part of the hold-out, or of the test set if nothing is held out.
        held_out: Whether the validation images were held out, and so may choose the best epoch.
        driver: Held-out images that the method learns from; none of them is a validation image.
    """

    train: Images
    validation: Images
    held_out: bool
    driver: Images | None = None


@dataclass
class TrainState:
    """A run in training, on one of its processes."""

    run: Run
    communicator: Communicator
    device: torch.device
    data: TrainData
    model: nn.Module
    ema: nn.Module | None  # exponential moving average of the model
    optimizer: torch.optim.Optimizer
    precision: Precision
    channels_last: bool
    method_state: State
    class_probabilities: Tensor | None = None  # that this epoch is drawn by
    metrics: EpochMetrics = field(default_factory=EpochMetrics)
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0  # spent in this epoch
    best_score: float | None = None  # on the hold-out
    peak_ra_pgd: float = 0.0  # highest accuracy under attack of the validations

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return steps_per_epoch(len(self.data.train), self.run.batch_size, self.communicator.world_size)

    @property
    def evaluated_model(self) -> nn.Module:
        """The network that is evaluated and returned: the averaged one if there is one."""
        return self.model if self.ema is None else self.ema

    def progress(self, step: int) -> float:
        """Return the share of training done at a step of this epoch."""
        return (self.epoch + step / self.steps_per_epoch) / self.run.epochs

    def train_step(self, count: int) -> TrainStep:
        """Return the current training step, for a batch of `count` images of this process."""
        return TrainStep(
            self.epoch,
            self.step,
            self.progress(self.step),
            self.run.seed,
            self.communicator,
            self.communicator.rows(count),
        )

    def draw_classes(self) -> None:
        """Choose the class probabilities that this epoch is drawn by; None for one pass over the images."""
        self.class_probabilities = self.run.method.sampling(self.method_state, self.progress(0))
        if self.run.sampling == "balanced":
            if self.class_probabilities is not None:
                raise UsageError("the method draws classes itself: use sampling shuffled")
            present = (self.data.train.counts() > 0).double()
            self.class_probabilities = present / present.sum()

    def remaining_batches(self) -> Iterator[Batch]:
        """Return the batches of this epoch that are left, this process's part of each."""
        return batches(
            self.data.train,
            self.run.batch_size,
            self.run.seed,
            self.epoch,
            augment=self.run.data.augment,
            probabilities=self.class_probabilities,
            start=self.step,
            channels_last=self.channels_last,
            rank=self.communicator.rank,
            world_size=self.communicator.world_size,
        )

    def warmed_up_method(self, progress: float) -> Method:
        """Return the method with the epsilon of this share of training."""
        warm_up, method = self.run.warm_up, self.run.method
        return method if progress >= warm_up else method.scaled(max(MIN_WARM_UP, progress / warm_up))

    def metrics_row(self) -> dict[str, Any]:
        """Return the metrics of this epoch; collective over the processes."""
        row = {
            "epoch": self.epoch,
            **self.metrics.row(self.communicator),
            "lr": self.run.optimizer.learning_rate(self.optimizer, self.progress(self.steps_per_epoch - 1)),
            "seconds": self.seconds,
            "peak_memory": peak_memory(self.device),
        }
        return row | self.run.method.recorded_state(self.method_state)

    def start_next_epoch(self) -> None:
        """Advance to the first step of the next epoch."""
        self.epoch, self.step, self.seconds, self.metrics = self.epoch + 1, 0, 0.0, EpochMetrics()

    @contextmanager
    def compute_context(self) -> Iterator[None]:
        """Compute objectives inside with the run's precision and activation checkpointing."""
        recompute = recomputed_activations(self.model) if self.run.recompute_activations else nullcontext()
        with recompute, self.precision.autocast():
            yield

    @property
    def local_statistics(self) -> list[Tensor]:
        """Running statistics that each process has computed for itself, and that are averaged after a step."""
        if self.communicator.world_size == 1:
            return []
        layers = list(self.model.modules())
        if self.run.batch_norm == "global":  # layers of other classes could not be made global
            layers = [layer for layer in layers if isinstance(layer, _BatchNorm) and type(layer) is not GlobalBatchNorm]
        buffers = (buffer for layer in layers for buffer in layer.buffers(recurse=False))
        return [buffer for buffer in buffers if buffer.is_floating_point()]

    def apply(self, objective: Objective, batch: Batch, passes: Passes | None) -> None:
        """Take an optimizer step on the gradients, update the EMA, and record the objective.

        An overflow in fp16 is no error: weights and EMA stay as they are, and the scale is halved. Batch norm and the
        method have seen the batch by then, as they would without a scale.
        """
        check_finite(objective.sample_losses, "the losses")
        usable = self._gradients_usable()
        if usable:
            self.optimizer.step()
            self._update_ema()
        if self.precision.scaled:
            self.metrics.count("skipped_steps", torch.tensor(float(not usable), device=self.device))
        self.method_state = objective.state
        self.metrics.add(objective, batch, passes)

    def _gradients_usable(self) -> bool:
        """Refuse a gradient that is not finite, unless the fp16 scale may be to blame; clip one that is too long."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.precision.unscale(self.optimizer)
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        finite = bool(torch.isfinite(norm))
        if self.precision.scaled:
            self.precision.update(finite)
        elif not finite:
            for name, gradient in gradients.items():
                check_finite(gradient, f"the gradient of {name}")
            check_finite(norm, "the norm of the gradient")
        if finite and self.run.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.run.optimizer.clip, norm)
        return finite

    def _update_ema(self) -> None:
        """Move the average toward the weights; at first it is short, so that the initial weights soon leave it."""
        if self.ema is None or self.run.ema_decay is None:
            return
        updates = self.epoch * self.steps_per_epoch + self.step
        decay = min(self.run.ema_decay, (1 + updates) / (10 + updates))
        with torch.no_grad():
            for mean, value in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
            for averaged, buffer in zip(self.ema.buffers(), self.model.buffers(), strict=True):
                if self.run.ema_buffers == "average" and buffer.is_floating_point():
                    averaged.lerp_(buffer, 1 - decay)
                else:  # a counter has no average
                    averaged.copy_(buffer)

    @cached_property
    def data_fingerprint(self) -> str:
        """A hash of the training images."""
        return self.data.train.fingerprint()


def set_memory_format(model: nn.Module, channels_last: bool) -> None:
    """Put the network's weights into one memory format."""
    model.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)  # type: ignore[call-overload]


def copy_for_ema(model: nn.Module) -> nn.Module:
    """Return a copy of the network that is not trained."""
    return copy.deepcopy(model).requires_grad_(False)

"""A run in motion: all that changes while it trains, and all that a checkpoint must hold to go on to the same bits."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from doubly.checks import check_finite
from doubly.config.run import Run
from doubly.config.user_code import fill
from doubly.data import Splits
from doubly.data.loader import steps_per_epoch
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.models.batch_norm import is_global
from doubly.training.metrics import Meter
from doubly.training.precision import Precision
from doubly.training.recompute import blocks, recomputing
from doubly.training.setup import Prepared, build_model, check_model, chosen_device, faster_channels_last, prepare
from doubly.types import State


@dataclass
class Training:
    run: Run
    model: nn.Module
    images: Prepared
    device: torch.device
    optimizer: torch.optim.Optimizer
    channels_last: bool
    average: nn.Module | None  # exponential moving average of the model
    state: State  # of the method
    precision: Precision
    sampling: Tensor | None = None  # class probabilities of this epoch
    meter: Meter = field(default_factory=Meter)
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0  # spent in this epoch
    best: float | None = None  # highest score on the hold-out
    peak: float = 0.0  # highest accuracy under attack of the validations

    @staticmethod
    def begin(run: Run, splits: Splits, model: nn.Module | None) -> "Training":
        device = chosen_device(run.device)
        precision = Precision(run.precision, device)
        images = prepare(run, splits, device)
        steps_per_epoch(len(images.train), run.batch_size, parallel.world()[1])  # refuses what cannot be shared
        model = (model if model is not None else build_model(run, splits.train)).to(device)
        check_model(model, images.train)
        if parallel.world()[1] > 1:
            parallel.agree("training images", images.train.fingerprint(), "give every process the same data")
        parallel.from_first([*model.parameters(), *model.buffers()])
        share = min(run.batch_size // parallel.world()[1], run.microbatch or run.batch_size)
        if run.recompute_activations:
            blocks(model)  # refused here, before anything is written
        channels_last = run.channels_last == "yes" or (
            run.channels_last == "auto" and parallel.same(faster_channels_last(model, images.train, share))
        )
        model.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)  # type: ignore[call-overload]
        settings = run.optimizer
        free = [p for p in model.parameters() if p.requires_grad]
        if not free:
            raise UsageError("the model has no parameters to train: make some require a gradient")
        optimizer = torch.optim.SGD(
            free, lr=settings.lr.at(0.0), momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        state = run.method.init(images.train.counts())
        average = copy.deepcopy(model).requires_grad_(False) if run.ema_decay is not None else None
        return Training(run, model, images, device, optimizer, channels_last, average, state, precision)

    @cached_property
    def fingerprint(self) -> str:
        return self.images.train.fingerprint()

    @property
    def evaluated(self) -> nn.Module:
        """The network that counts: the averaged one where there is one."""
        return self.model if self.average is None else self.average

    @property
    def local_statistics(self) -> list[Tensor]:
        """What each process has counted for itself, and all should know."""
        if parallel.world()[1] == 1:
            return []
        layers = list(self.model.modules())
        if self.run.batch_norm == "global":  # also layers of somebody's own kind, that could not be made global
            layers = [each for each in layers if isinstance(each, _BatchNorm) and not is_global(each)]
        buffers = (buffer for each in layers for buffer in each.buffers(recurse=False))
        return [buffer for buffer in buffers if buffer.is_floating_point()]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """How the passes of an objective are computed."""
        recompute = recomputing(self.model) if self.run.recompute_activations else nullcontext()
        with recompute, self.precision.autocast():
            yield

    def take_step(self) -> None:
        """Step on the gradients. An overflow in fp16 is no error: weights and average stay, and the scale is halved.

        Batch norm and the method have seen the batch by then, and remember it; so they would without a scale.
        """
        usable = self._gradients_usable()
        if usable:
            self.optimizer.step()
            self.update_average()
        if self.precision.scaled:
            self.meter.count("skipped_steps", torch.tensor(float(not usable), device=self.device))

    def _gradients_usable(self) -> bool:
        """Refuse a gradient that is not finite, unless the scale may be to blame; shorten one longer than allowed."""
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.precision.unscale(self.optimizer)
        norm = torch.nn.utils.get_total_norm(list(named.values()))
        finite = bool(torch.isfinite(norm))
        if self.precision.scaled:
            self.precision.update(finite)
        elif not finite:
            for name, gradient in named.items():
                check_finite(gradient, f"the gradient of {name}")
            check_finite(norm, "the norm of the gradient")
        if finite and self.run.optimizer.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.run.optimizer.clip, norm)
        return finite

    def check_weights(self) -> None:
        """No checkpoint holds weights that are not finite, so the last one is always a good one."""
        for name, parameter in self.model.named_parameters():
            check_finite(parameter, f"the model's {name}")

    def update_average(self) -> None:
        """The early average is a short one, so that the initial weights do not linger in it."""
        if self.average is None or self.run.ema_decay is None:
            return
        updates = self.epoch * steps_per_epoch(len(self.images.train), self.run.batch_size, parallel.world()[1])
        updates += self.step
        decay = min(self.run.ema_decay, (1 + updates) / (10 + updates))
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
            for kept, buffer in zip(self.average.buffers(), self.model.buffers(), strict=True):
                kept.copy_(buffer)

    def snapshot(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(tensors, info) for the checkpoint."""
        kept = self.optimizer.state_dict()["state"]
        state = {
            **{f"method/{name}": value for name, value in self.state.items()},
            **{f"meter/{name}": value for name, value in self.meter.collected().items()},
            **{f"optimizer/{i}/{name}": v for i, part in kept.items() for name, v in part.items() if v is not None},
        }
        if self.sampling is not None:
            state["sampling"] = self.sampling
        tensors = {"model": dict(self.model.state_dict()), "state": state}
        if self.average is not None:
            tensors["average"] = dict(self.average.state_dict())
        info = {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "peak": self.peak,
            "channels": self.images.train.x.shape[1],
            "classes": list(self.images.train.classes),
            "data": self.fingerprint,
            "scaler": self.precision.snapshot(),
            "choices": {
                "channels_last": self.channels_last,
                "threads": torch.get_num_threads(),
                "processes": parallel.world()[1],
            },
        }
        return tensors, info

    def restore(self, tensors: dict[str, dict[str, Tensor]], info: dict[str, Any], path: Path) -> None:
        """Go back to a snapshot, with the choices that were made by measuring when it began."""
        try:
            self._restore(tensors, info, path)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            if isinstance(problem, UsageError):
                raise
            raise UsageError(f"checkpoint {path} is damaged ({problem!r}): delete it to begin again") from None

    def _restore(self, tensors: dict[str, dict[str, Tensor]], info: dict[str, Any], path: Path) -> None:
        choices = info["choices"]
        if info.get("data", self.fingerprint) != self.fingerprint:
            raise UsageError(f"{path} was trained on other images than those here: resume it with the same data")
        if choices.get("processes", 1) == parallel.world()[1]:  # else each has another share of the cores
            torch.set_num_threads(choices["threads"])  # sums are split by threads, so their last bits depend on them
        self.channels_last = choices["channels_last"]
        for network, group in ((self.model, "model"), (self.average, "average")):
            if network is not None:
                network.to(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)  # type: ignore[call-overload]
                fill(network, tensors.get(group, {}), path)
        parts: dict[str, State] = {"method": {}, "meter": {}, "optimizer": {}}
        for name, value in tensors["state"].items():
            group, _, rest = name.partition("/")
            parts.setdefault(group, {})[rest] = value.to(self.device)
        self.state, self.meter = parts["method"], Meter(parts["meter"])
        self.sampling = tensors["state"].get("sampling")
        optimizer = self.optimizer.state_dict()
        for name, value in parts["optimizer"].items():
            index, _, key = name.partition("/")
            optimizer["state"].setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(optimizer)
        self.epoch, self.step, self.seconds, self.best = (info[key] for key in ("epoch", "step", "seconds", "best"))
        self.peak = info.get("peak", 0.0)
        self.precision.restore(info.get("scaler", {}))

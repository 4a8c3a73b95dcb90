"""The training loop, on plain torch: batch -> objective -> backward -> step, and what is kept of it."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from doubly.checkpoints import files as checkpoint
from doubly.checks import check_finite
from doubly.config.run import Run
from doubly.config.user_code import without_initial_weights
from doubly.data import Splits
from doubly.data.loader import batches, steps_per_epoch
from doubly.distributed import collectives as parallel
from doubly.distributed.launch import joined
from doubly.errors import Interrupted, NonFiniteError, UsageError
from doubly.evaluation.memory import fitted, forget_peak, peak_memory
from doubly.models.batch_norm import normalised_globally
from doubly.rundir import RunDir, append_metrics
from doubly.training.accumulation import gradient
from doubly.training.alarms import alarms
from doubly.training.metrics import Meter
from doubly.training.passes import counted
from doubly.training.resume import claim, go_on
from doubly.training.second_derivatives import check_second_derivatives
from doubly.training.setup import fetched_splits
from doubly.training.state import Training
from doubly.training.validation import score, validate
from doubly.training.warm_up import warmed
from doubly.types import TrainStep


class Callback(Protocol):
    """Somebody who looks on: told of every step, every row of metrics, and what is worth a sentence."""

    def step(self, epoch: int, step: int, steps: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def say(self, sentence: str) -> None: ...


class NullCallback:
    def step(self, epoch: int, step: int, steps: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def say(self, sentence: str) -> None: ...


def train_run(
    run: Run,
    output: Path | None,
    *,
    model: nn.Module | None = None,
    splits: Splits | None = None,
    resume: bool = False,
    watch: Callback | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> nn.Module:
    """Train, and write the run directory `output` if one is named; returns the network, averaged if asked for."""
    watch = watch or NullCallback()
    threads = torch.get_num_threads()
    try:
        with joined(), ExitStack() as held:
            parallel.agree("settings", _words(run), "give every process the same command")
            rundir = None if output is None else RunDir(output)
            if rundir is not None:
                claim(held, run, rundir, resume)
                if checkpoint.find(rundir.checkpoints, "last"):
                    run = replace(run, model=without_initial_weights(run.model))
            training = Training.begin(run, splits or _loaded(run, watch), model)
            if rundir is not None:
                told = go_on(training, rundir)
                if told:
                    watch.say(told)
            if run.batch_norm == "global":
                held.enter_context(normalised_globally(training.model))
            return _train(training, rundir, watch, stop)
    finally:
        torch.set_num_threads(threads)


def _words(run: Run) -> str:
    """The run, without the places in memory of what a caller handed over."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(run))


def _loaded(run: Run, watch: Callback) -> Splits:
    splits = fetched_splits(run)
    if splits.note:
        watch.say(splits.note)
    return splits


def _train(t: Training, rundir: RunDir | None, watch: Callback, stop: Callable[[], bool]) -> nn.Module:
    """The epochs that are left; where a number is not finite the error says when, where memory ends what would fit."""
    try:
        trained = fitted(lambda: _epochs(t, rundir, watch, stop))
        if trained is None:
            raise UsageError(_too_large(t))
        return trained[0]
    except NonFiniteError as problem:
        standing = checkpoint.find(rundir.checkpoints, "last") if rundir else None
        kept = f"; the last good checkpoint is {standing}" if standing else ""
        raise NonFiniteError(f"epoch {t.epoch}, step {t.step}: {problem}{kept}") from None


def _too_large(t: Training) -> str:
    """What to do about a batch that does not fit."""
    processes = parallel.world()[1]
    tried = min(t.run.microbatch or t.run.batch_size, t.run.batch_size // processes)
    if tried == 1:
        return "out of memory with a single image at a time: use a smaller network, or --recompute-activations"
    return (
        f"out of memory with {tried} images at a time: add --microbatch {max(1, tried // 2)} --resume, which keeps the "
        "batch and its weights, or lower the batch size; --recompute-activations saves memory too"
    )


def _epochs(t: Training, rundir: RunDir | None, watch: Callback, stop: Callable[[], bool]) -> nn.Module:
    forget_peak(t.device)
    _check_method(t)
    run, saved = t.run, time.monotonic()
    rank, world_size = parallel.world()
    steps = steps_per_epoch(len(t.images.train), run.batch_size, world_size)

    def save(name: str = "last") -> None:
        nonlocal saved
        if rundir is not None:
            t.check_weights()
            found = t.snapshot()  # of all processes
            if parallel.world()[0] == 0:
                checkpoint.save(rundir.checkpoints, name, *found)
            saved = time.monotonic() if name == "last" else saved

    def wishes() -> tuple[bool, bool]:
        return stop(), due()

    def due() -> bool:
        return time.monotonic() - saved > run.save_seconds

    def progress(step: int) -> float:
        return (t.epoch + step / steps) / run.epochs

    while t.epoch < run.epochs:
        begun = time.perf_counter() - t.seconds
        t.model.train()
        if t.step == 0:
            t.sampling = run.method.sampling(t.state)
        for batch in batches(
            t.images.train,
            run.batch_size,
            run.seed,
            t.epoch,
            augment=run.data.augment,
            probabilities=t.sampling,
            start=t.step,
            channels_last=t.channels_last,
            rank=rank,
            world_size=world_size,
        ):
            stopping, saving = _step(t, batch, TrainStep(t.epoch, t.step, progress(t.step), run.seed), wishes)
            t.step += 1
            t.seconds = time.perf_counter() - begun
            watch.step(t.epoch, t.step, steps)
            if stopping:
                save()
                raise Interrupted(f"stopped at epoch {t.epoch}, step {t.step}")
            if saving:
                save()
        row, last = _row(t, run.optimizer.lr.at(progress(steps - 1))), t.epoch + 1 == run.epochs
        if (last or (t.epoch + 1) % run.validation.every == 0) and _best(t, row, watch):
            save("best")
        t.epoch, t.step, t.seconds, t.meter = t.epoch + 1, 0, 0.0, Meter()
        if rundir is not None and parallel.world()[0] == 0:
            append_metrics(rundir, row)
        watch.row(row)
        if last or parallel.same(due()):
            save()
    parallel.same(None)  # nobody goes on before the last checkpoint stands
    return t.evaluated


def _check_method(t: Training) -> None:
    """Refuse a network that would train without the second derivatives that the method needs."""
    if t.epoch < t.run.epochs and getattr(t.run.method, "differentiates_twice", False):
        t.model.train()
        rank, world_size = parallel.world()
        images, channels_last = t.images.train, t.channels_last
        epoch = batches(images, t.run.batch_size, 0, 0, channels_last=channels_last, rank=rank, world_size=world_size)
        check_second_derivatives(t.model, next(epoch))


def _row(t: Training, lr: float) -> dict[str, Any]:
    """What is kept of an epoch."""
    row = {"epoch": t.epoch, **t.meter.row(), "lr": lr, "seconds": t.seconds, "peak_memory": peak_memory(t.device)}
    return row | ({"r": float(t.state["r"])} if "r" in t.state else {})


def _best(t: Training, row: dict[str, Any], watch: Callback) -> bool:
    """Adds the validation to the row, and says whether no epoch before was as good on the hold-out."""
    row["validation"] = validate(t)
    row["alarms"] = alarms(row, t.peak)
    t.peak = max(t.peak, row["validation"]["ra_pgd"])
    for sentence in row["alarms"]:
        watch.say(f"epoch {t.epoch}: {sentence}")
    found = score(row["validation"], t.run.validation)
    better = t.images.chooses and (t.best is None or found > t.best)
    t.best = found if better else t.best
    return better


def _step(t: Training, batch: Any, moment: TrainStep, wishes: Callable[[], Sequence[bool]]) -> list[bool]:
    """One step of the optimizer; returns which wishes any process has."""
    for group in t.optimizer.param_groups:
        group["lr"] = t.run.optimizer.lr.at(moment.progress)
    with counted(t.model, len(batch.y)) if moment.step == 0 else nullcontext() as passes:
        t.optimizer.zero_grad()
        method = warmed(t.run, moment.progress)
        objective = gradient(
            method, t.model, batch, t.state, moment, t.run.microbatch, t.computing, t.precision.backward
        )
    agreed = parallel.average_gradients(t.model.parameters(), t.local_statistics, wishes())
    check_finite(
        objective.sample_losses, "the losses"
    )  # only now: a process that left before would keep the others waiting
    t.take_step()
    t.state = objective.state
    t.meter.add(objective, batch, passes)
    return agreed

"""The training loop, on plain torch: batch -> objective -> backward -> step, and what is kept of it."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from doubly import parallel
from doubly.attacks import fast
from doubly.checks import check_finite
from doubly.data import Splits
from doubly.data.loader import batches, steps_per_epoch
from doubly.errors import Interrupted, NonFiniteError, UsageError
from doubly.evaluation.result import EvalResult, number
from doubly.rundir import RunDir, append_metrics, lock, truncate_metrics, write_json
from doubly.runs import checkpoint, compiling
from doubly.runs.alarms import alarms
from doubly.runs.answers import answers
from doubly.runs.build import load_splits
from doubly.runs.config import Probe, Run
from doubly.runs.environment import environment
from doubly.runs.load import other_configuration
from doubly.runs.memory import forget_peak, peak_memory
from doubly.runs.meter import Meter
from doubly.runs.own_model import without_initial_weights
from doubly.runs.passes import counted
from doubly.runs.saved_config import to_json
from doubly.runs.standard_attacks import chosen
from doubly.runs.training import Training
from doubly.runs.warm_up import warmed
from doubly.seeding import derived_seed, global_generators
from doubly.types import Moment


class Watch(Protocol):
    """Somebody who looks on: told of every step, every row of metrics, and what is worth a sentence."""

    def step(self, epoch: int, step: int, steps: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def say(self, sentence: str) -> None: ...


class Unwatched:
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
    watch: Watch | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> nn.Module:
    """Train, and write the run directory `output` if one is named; returns the network, averaged if asked for."""
    watch = watch or Unwatched()
    threads = torch.get_num_threads()
    try:
        if output is None:
            return _train(Training.begin(run, splits or _loaded(run, watch), model), None, watch, stop)
        with lock(output):
            _claim(run, RunDir(output), resume)
            if checkpoint.find(RunDir(output).checkpoints, "last"):
                run = replace(run, model=without_initial_weights(run.model))
            training = Training.begin(run, splits or _loaded(run, watch), model)
            _continue(training, RunDir(output), watch)
            return _train(training, RunDir(output), watch, stop)
    finally:
        torch.set_num_threads(threads)


def _loaded(run: Run, watch: Watch) -> Splits:
    splits = load_splits(run)
    if splits.note:
        watch.say(splits.note)
    return splits


def _claim(run: Run, rundir: RunDir, resume: bool) -> None:
    """Make sure that the directory is free for this run, or already holds it."""
    if rundir.config.exists():
        if not resume:
            raise UsageError(
                f"{rundir.path} already holds a run: add --resume to continue it, or choose another --output"
            )
        changed = other_configuration(rundir.path, run)
        if changed:
            raise UsageError(
                f"{rundir.path} was begun with another configuration ({changed}): resume it without that change"
            )
        return
    strangers = [p.name for p in rundir.path.iterdir() if not p.name.startswith(".")]  # ours may have died at once
    if strangers:
        raise UsageError(f"{rundir.path} is not empty ({strangers[0]}): choose another --output")


def _continue(training: Training, rundir: RunDir, watch: Watch) -> None:
    """Go on from the checkpoint, if one stands, and bring the metrics back to it; else the directory is now ours."""
    standing = checkpoint.find(rundir.checkpoints, "last")
    if standing is not None:
        training.restore(*checkpoint.load(standing), standing)
        watch.say(f"continuing at epoch {training.epoch}, step {training.step}")
    truncate_metrics(rundir.metrics, training.epoch)
    if training.epoch < training.run.epochs:  # what was measured of an earlier epoch is true no longer
        rundir.evaluation.unlink(missing_ok=True)
        rundir.predictions.unlink(missing_ok=True)
        rundir.gallery.unlink(missing_ok=True)
    if not rundir.config.exists():
        write_json(rundir.config, to_json(training.run))
    if not rundir.environment.exists():
        write_json(rundir.environment, environment(training.device))


def _train(t: Training, rundir: RunDir | None, watch: Watch, stop: Callable[[], bool]) -> nn.Module:
    """The epochs that are left; where a number is not finite, the error says when."""
    try:
        compiling.prepare(t, watch.say)
        return _epochs(t, rundir, watch, stop)
    except NonFiniteError as problem:
        standing = checkpoint.find(rundir.checkpoints, "last") if rundir else None
        kept = f"; the last good checkpoint is {standing}" if standing else ""
        raise NonFiniteError(f"epoch {t.epoch}, step {t.step}: {problem}{kept}") from None


def _epochs(t: Training, rundir: RunDir | None, watch: Watch, stop: Callable[[], bool]) -> nn.Module:
    run, saved = t.run, time.monotonic()
    forget_peak(t.device)
    steps = steps_per_epoch(len(t.images.train), run.batch)

    def save(name: str = "last") -> None:
        nonlocal saved
        if rundir is not None and parallel.world()[0] == 0:
            t.check_weights()
            checkpoint.save(rundir.checkpoints, name, *t.snapshot())
            saved = time.monotonic() if name == "last" else saved

    def progress(step: int) -> float:
        return (t.epoch + step / steps) / run.epochs

    while t.epoch < run.epochs:
        begun = time.perf_counter() - t.seconds
        t.model.train()
        if t.step == 0:
            t.sampling = run.method.sampling(t.state)
        for batch in batches(
            t.images.train,
            run.batch,
            run.seed,
            t.epoch,
            augment=run.data.augment,
            probabilities=t.sampling,
            start=t.step,
            channels_last=t.channels_last,
        ):
            _step(t, batch, Moment(t.epoch, t.step, progress(t.step), run.seed))
            t.step += 1
            t.seconds = time.perf_counter() - begun
            watch.step(t.epoch, t.step, steps)
            if stop():
                save()
                raise Interrupted(f"stopped at epoch {t.epoch}, step {t.step}")
            if time.monotonic() - saved > run.save_seconds:
                save()
        row: dict[str, Any] = {
            "epoch": t.epoch,
            **t.meter.row(),
            "lr": run.optimiser.lr.at(progress(steps - 1)),
            "seconds": t.seconds,
            "peak_memory": peak_memory(t.device),
        }
        if "r" in t.state:
            row["r"] = float(t.state["r"])
        last = t.epoch + 1 == run.epochs
        if last or (t.epoch + 1) % run.probe.every == 0:
            row["probe"] = _probe(t)
            row["alarms"] = alarms(row, t.peak)
            t.peak = max(t.peak, row["probe"]["ra_pgd"])
            for sentence in row["alarms"]:
                watch.say(f"epoch {t.epoch}: {sentence}")
            score = _score(row["probe"], run.probe)
            if t.images.chooses and (t.best is None or score > t.best):
                t.best = score
                save("best")
        t.epoch, t.step, t.seconds, t.meter = t.epoch + 1, 0, 0.0, Meter()
        if rundir is not None and parallel.world()[0] == 0:
            append_metrics(rundir, row)
        watch.row(row)
        if last or time.monotonic() - saved > run.save_seconds:
            save()
    return t.evaluated


def _step(t: Training, batch: Any, moment: Moment) -> None:
    """One step of the optimiser."""
    for group in t.optimizer.param_groups:
        group["lr"] = t.run.optimiser.lr.at(moment.progress)
    with counted(t.model, len(batch.y)) if moment.step == 0 else nullcontext() as passes:
        seed = derived_seed(moment.seed, moment.epoch, moment.step, "network")
        with global_generators(seed), t.autocast(), fast(t.model, t.twins):
            objective = warmed(t.run, moment.progress).objective(t.model, batch, t.state, moment)
        check_finite(objective.losses, "the losses")
        t.optimizer.zero_grad()
        objective.scalar.backward()  # type: ignore[no-untyped-call]
    parallel.average_gradients(t.model.parameters())
    t.check_gradients()
    t.optimizer.step()
    t.state = objective.state
    t.update_average()
    t.meter.add(objective, batch, passes)


def _probe(t: Training) -> dict[str, Any]:
    images, attacks = t.images.probe, chosen(("pgd", "margin"), t.run.probe.attack)[0]
    found = EvalResult(images.y.cpu().numpy(), images.classes, answers(t.evaluated, images, attacks).classes)
    worst, value = found.worst("pgd")
    return {
        "on": "holdout" if t.images.chooses else "test",
        "n": found.n,
        "sa": found.accuracy("clean"),
        "ra_pgd": found.accuracy("pgd"),
        "ra_tail_30": found.tail("pgd")[0],
        "worst_class": {"name": worst, "ra_pgd": value},
        "ra_margin": found.accuracy("margin"),
        "commonest": _commonest(found),
        "per_class": {name: number(value) for name, value in zip(found.names, found.per_class("pgd"), strict=True)},
    }


def _commonest(found: EvalResult) -> dict[str, Any]:
    """The class that clean images are most often taken for: its share of the answers and of the images."""
    counts = np.array(found.confusion("clean"))  # a row per label
    most = int(counts.sum(0).argmax())
    share, true_share = counts.sum(0)[most] / found.n, counts.sum(1)[most] / found.n
    return {"name": found.names[most], "share": float(share), "true_share": float(true_share)}


def _score(probe: dict[str, Any], settings: Probe) -> float:
    if settings.choose == "both":
        return float(probe["ra_pgd"] + probe["ra_tail_30"]) / 2
    return float(probe[settings.choose])

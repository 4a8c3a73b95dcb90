"""Whether attacks call a compiled twin of the network: decided by measuring, said in one line, kept with the run."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from doubly import parallel
from doubly.attacks import attacked
from doubly.attacks.forward import Backend, Forward, Mode, can_compile, twin
from doubly.data.loader import batches, steps_per_epoch
from doubly.rundir import duration
from doubly.runs.passes import attack_passes, is_ours
from doubly.runs.second_derivatives import check_second_derivatives, is_compiled
from doubly.runs.training import Training
from doubly.seeding import global_generators
from doubly.types import Batch

Compile = Literal["auto", "yes", "no"]
Twins = dict[Mode, Forward]
HOPED = 0.5  # of an attack's time, the most that compiling has saved here
START, LAYER = 12.0, 1.0  # seconds that compiling takes: the compiler's own start, and each layer with parameters
FASTER = 0.97  # of the network's own time: a twin that takes more is noise, and not worth other bits
MOST = 50  # input gradients that a step asks for, and hardly any method more
ROUNDS = 3
TOO_SHORT = "not compiled: the run is too short"


def prepare(t: Training, say: Callable[[str], None]) -> None:
    """At the start of a run: refuse what would lose the implicit term, and give it its twins, decided anew or again."""
    left = t.run.epochs * _steps(t) - (t.epoch * _steps(t) + t.step)
    if left == 0:
        return
    t.model.train()
    batch = next(batches(t.images.train, t.run.batch, 0, 0, channels_last=t.channels_last))
    if getattr(t.run.method, "differentiates_twice", False):
        check_second_derivatives(t.model, batch)
    share = len(batch.y)
    if t.run.microbatch is not None:
        batch = Batch(*(part[: t.run.microbatch] for part in batch))
    setting = t.run.compile if t.compile is None else ("yes" if t.compile else "no")
    reason = _excluded(t, setting)
    if reason:
        say(f"not compiled: {reason}")
        setting = "no"
    if setting == "auto" and not _could_pay(t.model, batch.x, left * share / len(batch.y)):
        say(TOO_SHORT)
        setting = "no"
    if setting != "no":
        with t.computing():
            counted = attack_passes(t.run.method, t.model, batch, t.images.train.counts())
            passes = {mode: left * count * share / len(batch.y) for mode, count in counted.items()}
            t.twins, sentence = compiled_for(t.model, batch.x, passes, setting)
        if sentence:
            say(sentence)
    t.compile = bool(t.twins)


def _excluded(t: Training, setting: Compile) -> str:
    """What of a run's settings a compiled network has no part in, or nothing."""
    if setting == "no":
        return ""
    if t.run.recompute_activations:
        return "activations are recomputed"
    if t.precision.scaled:
        return "in fp16 attacks scale their gradients by hooks"
    if setting == "auto" and not is_ours(t.run.method):
        return "what attacks take of a method of your own is not known; --compile yes tries it"
    return ""


def _could_pay(model: nn.Module, x: Tensor, batches_left: float) -> bool:
    """Before the method is asked what its attacks take: whether the run is long enough for any attack."""
    seconds = MOST * batches_left * statistics.median(_turns(model, x, "eval")[0])
    return parallel.same(HOPED * seconds > _cost(model))


def _steps(t: Training) -> int:
    return steps_per_epoch(len(t.images.train), t.run.batch)


def compiled_for(
    model: nn.Module,
    x: Tensor,
    passes: Mapping[Mode, float],
    setting: Compile = "auto",
    backend: Backend = "inductor",
) -> tuple[Twins, str]:
    """(what `fast` takes, a sentence). `passes`: how many input gradients of batches like x attacks will ask for.

    auto: where even half of their time would not repay the compiler, it is not tried; else compiled network and
    network take turns, and the compiled one is kept if it is faster. yes: kept if it agrees.
    """
    modes = [mode for mode, count in passes.items() if count > 0]
    if setting == "no" or not modes:
        return {}, ""
    reason = next(filter(None, parallel.everybodys(obstacle(model, x.device, modes))), "")
    if reason:
        return {}, f"not compiled: {reason}"
    with global_generators(0):
        if setting == "auto":
            in_all = sum(passes[mode] * statistics.median(_turns(model, x, mode)[0]) for mode in modes)
            cost = len(modes) * _cost(model)
            in_all, worth = parallel.same([in_all, HOPED * in_all > cost])
            if not worth:
                costs = f"the attacks take about {duration(in_all)} in all, compiling about {duration(cost)}"
                return {}, f"not compiled: {costs}"
        return _made(model, x, {mode: passes[mode] for mode in modes}, setting, backend)


def _made(
    model: nn.Module, x: Tensor, passes: Mapping[Mode, float], setting: Compile, backend: Backend
) -> tuple[Twins, str]:
    begun, twins = time.perf_counter(), Twins()
    for mode in passes:
        with attacked(model, mode):
            made, sentence = twin(model, x, mode, backend)
        if not all(parallel.everybodys("" if made is None else "made")) or made is None:
            return {}, sentence if made is None else "not compiled: another process cannot"
        twins[mode] = made
    took = f"compiled in {duration(time.perf_counter() - begun)}"
    if setting == "yes":
        return twins, took
    saved, before = 0.0, 0.0
    for mode, made in twins.items():
        plain, quick = _turns(model, x, mode, made)
        before += passes[mode] * statistics.median(plain)
        saved += passes[mode] * statistics.median(a - b for a, b in zip(plain, quick, strict=True))
    ratio, saved = parallel.same([1 - saved / before, saved])
    step = f"an attack step takes {ratio:.2f} of its time"
    if ratio > FASTER:
        return {}, f"{took} and not used: {step}"
    return twins, f"{took}: {step}, about {duration(saved)} saved from here on"


def obstacle(model: nn.Module, device: torch.device, modes: list[Mode]) -> str:
    """Why the network cannot have a twin, or nothing."""
    if not can_compile(device):
        return "there is no C++ compiler"
    if is_compiled(model):
        return "the model is compiled already"
    if model._forward_hooks or model._forward_pre_hooks:
        return "the model has hooks, which a compiled one would pass by"
    if "train" in modes and parallel.world()[1] > 1:
        return "an attack in training mode may need the statistics of all processes"
    return ""


def _cost(model: nn.Module) -> float:
    """Seconds that compiling one twin may take."""
    own = (next(module.parameters(recurse=False), None) for module in model.modules())
    return START + LAYER * sum(parameter is not None for parameter in own)


def _turns(model: nn.Module, x: Tensor, mode: Mode, made: Forward | None = None) -> tuple[list[float], list[float]]:
    """Seconds of an input gradient by the network, and by its twin if there is one, in turns."""
    contestants = (model,) if made is None else (model, made)
    seconds: tuple[list[float], list[float]] = [], []
    with attacked(model, mode):
        for _ in range(ROUNDS):
            for kept, forward in zip(seconds, contestants, strict=False):
                begun, point = time.perf_counter(), x.detach().clone().requires_grad_()
                torch.autograd.grad(forward(point).sum(), point)[0].sum().item()
                kept.append(time.perf_counter() - begun)
    return seconds

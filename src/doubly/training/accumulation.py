"""The gradient of one batch, whole or in parts that fit the memory: gradient accumulation.

The parts are taken for the shares of as many processes, which take turns (`parallel.Turns`). So a method's weights, u
and draws are those of the whole batch, and every method accumulates without knowing it. What a method gathers is known
only once all parts have come to it; until then each part is begun and abandoned there. Attacks are run once. What it
costs is what a method computes before each exchange: none for AT, a forward pass for DONE, more for first_order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from doubly.attacks import CachedAttack
from doubly.distributed import collectives as parallel
from doubly.seeding import derived_seed, global_generators
from doubly.types import Batch, Method, Objective, State, TrainStep


def gradient(
    method: Method,
    model: nn.Module,
    batch: Batch,
    state: State,
    moment: TrainStep,
    most: int | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], None] = lambda scalar: scalar.backward(),  # type: ignore[no-untyped-call]
) -> Objective:
    """Leaves the gradient in the parameters, added to what is there; with at most so many images at a time.

    Objectives are formed inside `context`, and `backward` is shown each one's scalar, outside of it.
    """
    parts = _parts(len(batch.y), most)
    if parts == 1:
        with context():
            found = _objective(method, model, batch, state, moment)
        backward(found.loss)
        return found
    shares = [Batch(*part) for part in zip(*(torch.tensor_split(values, parts) for values in batch), strict=True)]
    attacks: list[list[CachedAttack]] = [[] for _ in shares]
    methods = [_attacking_once(method, kept) for kept in attacks]
    turns = parallel.Turns([len(share.y) for share in shares])
    statistics = [(buffer, buffer.clone()) for buffer in model.buffers()]
    while True:
        complete = []
        for k, (share, own) in enumerate(zip(shares, methods, strict=True)):
            for attack in attacks[k]:
                attack.again()
            with turns.turn(k), context(), suppress(parallel.Turns.Waiting):
                found = _objective(own, model, share, state, moment)
                complete.append(found)
            if len(complete) == k + 1:
                backward(found.loss * len(share.y) / len(batch.y))
                complete[-1] = replace(found, loss=found.loss.detach())
        if len(complete) == parts:
            return _together(complete)
        assert not complete, "parts of a batch must ask for the same exchanges"
        turns.answer()
        with torch.no_grad():
            for buffer, before in statistics:  # an abandoned pass is not to be remembered
                buffer.copy_(before)


def _parts(count: int, most: int | None) -> int:
    """As few as will do; none of a single image, with which batch norm can do nothing, unless asked for."""
    parts = -(-count // (most or count))
    return parts if most == 1 else max(1, min(parts, count // 2))


def _objective(method: Method, model: nn.Module, batch: Batch, state: State, moment: TrainStep) -> Objective:
    """Each process, and each part, has dropout of its own."""
    purpose = "network" if parallel.world()[0] == 0 else f"network/{parallel.world()[0]}"
    with global_generators(derived_seed(moment.seed, moment.epoch, moment.step, purpose)):
        return method.objective(model, batch, state, moment)


def _attacking_once(method: Any, kept: list[CachedAttack]) -> Any:
    if hasattr(method, "method"):  # a wrapper
        return replace(method, method=_attacking_once(method.method, kept))
    if not hasattr(method, "attack") or not hasattr(method, "__dataclass_fields__"):  # somebody's own: attacked anew
        return method
    kept.append(CachedAttack(method.attack))
    return replace(method, attack=kept[-1])


def _together(parts: list[Objective]) -> Objective:
    losses, weights, logits = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("sample_losses", "weights", "logits")
    )
    shares = torch.tensor([len(part.sample_losses) / len(losses) for part in parts]).to(losses)
    record = {name: shares @ torch.stack([part.record[name].to(losses) for part in parts]) for name in parts[0].record}
    scalar = shares @ torch.stack([part.loss for part in parts])
    return Objective(scalar, losses, weights, logits, parts[-1].state, record)

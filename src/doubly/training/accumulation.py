"""The gradient of one batch, whole or in microbatches that fit into memory (gradient accumulation)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from doubly.distributed.microbatch import microbatch_rows, microbatch_sizes
from doubly.methods import Method
from doubly.seeding import Rows
from doubly.types import Batch, Objective, State, TrainStep


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def accumulate_gradient(
    method: Method,
    model: nn.Module,
    batch: Batch,
    state: State,
    step: TrainStep,
    microbatch: int | None = None,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], None] = _backward,
) -> Objective:
    """Add the gradient of a batch's objective to the parameters' `.grad`.

    Weights, state and random draws are those of the whole batch, however many microbatches there are; batch norm sees
    one microbatch at a time.

    Args:
        method: How to train.
        model: The network, in training mode.
        batch: The batch of this process.
        state: The method's state before the batch.
        step: The training step.
        microbatch: Most images at a time; None takes all at once.
        context: What objectives are computed in, such as autocast.
        backward: Differentiates a loss; called outside of `context`.

    Returns:
        The objective of the whole batch, with a detached loss.
    """
    sizes = microbatch_sizes(len(batch.y), microbatch)
    parts = split_batch(batch, sizes)
    rows = microbatch_rows(step.rows or Rows(0, len(batch.y)), sizes)
    first_stream = step.communicator.rank * len(parts)
    steps = [step._replace(rows=rows[k], stream=first_stream + k) for k in range(len(parts))]
    objectives: list[Objective] = []
    remaining = method.microbatch_objectives(model, parts, state, steps)
    while True:
        with context():
            objective = next(remaining, None)
        if objective is None:
            return _merge(objectives)
        share = len(objective.sample_losses) / len(batch.y)
        backward(objective.loss if share == 1 else objective.loss * share)
        objectives.append(replace(objective, loss=objective.loss.detach()))


def split_batch(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Return the microbatches of these sizes."""
    if len(sizes) == 1:
        return [batch]
    columns = [
        torch.split(values, sizes) if len(values) else [values] * len(sizes) for values in batch
    ]  # ids may be missing
    return [Batch(*values) for values in zip(*columns, strict=True)]


def _merge(parts: list[Objective]) -> Objective:
    """Return the objective of the whole batch: samples concatenated, losses and records averaged."""
    if len(parts) == 1:
        return parts[0]
    losses, weights, logits = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("sample_losses", "weights", "logits")
    )
    shares = torch.tensor([len(part.sample_losses) / len(losses) for part in parts]).to(losses)
    record = {name: shares @ torch.stack([part.record[name].to(losses) for part in parts]) for name in parts[0].record}
    loss = shares @ torch.stack([part.loss for part in parts])
    return Objective(loss, losses, weights, logits, parts[-1].state, record)

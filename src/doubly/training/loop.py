"""The training loop: set up, epochs, steps, validate, save."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from doubly.callbacks import Callback, CallbackList
from doubly.config.run import Run
from doubly.data import Splits
from doubly.distributed import join_processes
from doubly.errors import Interrupted
from doubly.training.accumulation import accumulate_gradient
from doubly.training.passes import counted_passes
from doubly.training.saving import RunWriter
from doubly.training.setup import begin_run, explained_errors
from doubly.training.state import TrainState
from doubly.training.validation import update_from_holdout, validate_epoch
from doubly.types import Batch


class TrainResult(NamedTuple):
    """The trained network (averaged if the run keeps an EMA), and the metrics of the epochs that were trained."""

    model: nn.Module
    rows: list[dict[str, Any]]


def train_run(
    run: Run,
    output: Path | None,
    *,
    model: nn.Module | None = None,
    splits: Splits | None = None,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    lock: bool = True,
) -> TrainResult:
    """Train a run, from its beginning or its last checkpoint.

    Args:
        run: The configuration.
        output: Run directory to write; None writes nothing.
        model: A network handed in from Python, trained in place; built from the configuration if None.
        splits: Images handed in from Python; read as the configuration says if None.
        resume: Whether a run in `output` is continued.
        callbacks: Listeners, called on the first process.
        stop: Called after each step; True means to save and stop.
        lock: Whether to keep other runs out of `output`; False is for file systems without locks.

    Raises:
        UsageError: If something does not fit; the message says what to do.
        NonFiniteError: If a loss, gradient or weight is NaN or infinite.
        Interrupted: If `stop` returned True; the state is saved.
    """
    with join_processes() as communicator, ExitStack() as stack:
        callback = CallbackList(callbacks if communicator.is_first else ())
        stack.callback(callback.close)
        state, writer = begin_run(run, output, model, splits, resume, communicator, callback, stack, lock)
        rows = []
        with explained_errors(state, writer):
            while state.epoch < run.epochs:
                train_epoch(state, writer, callback, stop)
                rows.append(finish_epoch(state, writer, callback))
        communicator.barrier()  # no process continues before the last checkpoint is complete
        return TrainResult(state.evaluated_model, rows)


def train_epoch(state: TrainState, writer: RunWriter, callback: Callback, stop: Callable[[], bool]) -> None:
    """Take the steps of this epoch that are left."""
    start = time.perf_counter() - state.seconds
    state.model.train()
    if state.step == 0:
        state.draw_classes()
    for batch in state.remaining_batches():
        stopping, saving = train_step(state, batch, lambda: (stop(), writer.is_due))
        state.step += 1
        state.seconds = time.perf_counter() - start
        callback.on_step(state.epoch, state.step, state.steps_per_epoch)
        if stopping or saving:
            writer.save(state)
        if stopping:
            raise Interrupted(f"stopped at epoch {state.epoch}, step {state.step}")


def train_step(state: TrainState, batch: Batch, read_flags: Callable[[], tuple[bool, bool]]) -> list[bool]:
    """Take one optimizer step; return for each flag whether any process has set it."""
    run, step = state.run, state.train_step(len(batch.y))
    run.optimizer.set_learning_rate(state.optimizer, step.progress)
    with counted_passes(state.model, len(batch.y)) if state.step == 0 else nullcontext() as passes:
        state.model.zero_grad()  # also of parameters that an optimizer of the user leaves out
        objective = accumulate_gradient(
            state.warmed_up_method(step.progress),
            state.model,
            batch,
            state.method_state,
            step,
            run.microbatch,
            context=state.compute_context,
            backward=state.precision.backward,
        )
    flags = state.communicator.average_gradients(state.model.parameters(), state.local_statistics, read_flags())
    state.apply(objective, batch, passes)  # checks are only in here: a process that left earlier would block the others
    update_from_holdout(state)
    return flags


def finish_epoch(state: TrainState, writer: RunWriter, callback: Callback) -> dict[str, Any]:
    """Validate if it is time to, save, and return the epoch's row of metrics."""
    row, last = state.metrics_row(), state.epoch + 1 == state.run.epochs
    if (last or (state.epoch + 1) % state.run.validation.every == 0) and validate_epoch(state, row, callback):
        writer.save(state, "best")
    state.start_next_epoch()
    writer.append(state, row)
    callback.on_epoch(row)
    if last or state.communicator.broadcast_value(writer.is_due):
        writer.save(state)
    return row

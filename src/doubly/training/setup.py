"""Set up a run: data, network, device and optimizer, and everything that must be checked before training."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from doubly.attacks import attack_context, eval_mode
from doubly.callbacks import Callback
from doubly.checkpoints import find_checkpoint
from doubly.checks import check_scores, is_out_of_memory
from doubly.config.device import select_device
from doubly.config.run import Run
from doubly.data import Images, Splits
from doubly.data.holdout import stratified_subset
from doubly.data.loader import batches, steps_per_epoch
from doubly.data.splits import divide_holdout, load_splits_once, train_split
from doubly.distributed import Communicator
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.memory import run_if_fits
from doubly.evaluation.metrics import extended_names
from doubly.evaluation.network import check_not_probabilities
from doubly.models.adapt import adapt_model
from doubly.models.batch_norm import global_batch_norm
from doubly.rundir import RunDir
from doubly.seeding import derived_seed, global_generators
from doubly.training.memory import reset_peak_memory
from doubly.training.precision import Precision
from doubly.training.recompute import find_blocks
from doubly.training.resume import lock_run_dir, restore_last_checkpoint
from doubly.training.saving import RunWriter
from doubly.training.second_derivatives import check_second_derivatives
from doubly.training.state import TrainData, TrainState, copy_for_ema, set_memory_format


def begin_run(
    run: Run,
    output: Path | None,
    model: nn.Module | None,
    splits: Splits | None,
    resume: bool,
    communicator: Communicator,
    callback: Callback,
    stack: ExitStack,
    lock: bool = True,
) -> tuple[TrainState, RunWriter]:
    """Lock the run directory, read the data, build the state and restore the last checkpoint; see `train_run`.

    `stack` undoes at its end what has to be undone: the lock, the number of threads, the network's layers.
    """
    stack.callback(torch.set_num_threads, torch.get_num_threads())  # a checkpoint may have set another number
    communicator.require_equal("settings", describe_settings(run), "give every process the same command")
    rundir = None if output is None else RunDir(output)
    held = None
    if rundir is not None:
        held = lock_run_dir(stack, run, rundir, resume, communicator, lock)
        if find_checkpoint(rundir.checkpoints, "last"):
            run = replace(run, model=run.model.without_initial_weights())
    state = build_state(run, splits or load_run_splits(run, communicator, callback), model, communicator)
    if rundir is not None and (message := restore_last_checkpoint(state, rundir)):
        callback.on_message(message)
    if run.batch_norm == "global":
        twice = run.method.needs_second_derivatives
        stack.enter_context(global_batch_norm(state.model, communicator, twice_differentiable=twice))
    reset_peak_memory(state.device)
    check_method(state)
    callback.on_message(describe_data(state.data))
    for attack in (run.method.attack, run.validation.attack):
        if attack is not None and attack.weakness:
            callback.on_message(attack.weakness)
    return state, RunWriter(rundir, run.save_seconds, held)


@contextmanager
def explained_errors(state: TrainState, writer: RunWriter) -> Iterator[None]:
    """Say where a number was not finite, and what to do where memory ran out."""
    try:
        yield
    except NonFiniteError as error:
        where = f"epoch {state.epoch}, step {state.step}"
        raise NonFiniteError(f"{where}: {error}{_rate_remedy(state)}{writer.describe_last()}") from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(_out_of_memory(state)) from None


def _rate_remedy(state: TrainState) -> str:
    """Return what usually helps against NaN in training; nothing before the first step: the network is to blame."""
    if state.epoch == 0 and state.step == 0:
        return ""
    rate = state.run.optimizer.learning_rate(state.optimizer, state.train_step(1).progress)
    return f"; the learning rate was {rate:.3g}: lower it (--lr), or bound the gradient (--optimizer.clip 1)"


def _out_of_memory(state: TrainState) -> str:
    run = state.run
    images = min(run.microbatch or run.batch_size, run.batch_size // state.communicator.world_size)
    if images == 1:
        return "out of memory with a single image at a time: use a smaller network, or --recompute-activations"
    return (
        f"out of memory with {images} images at a time: add --microbatch {images // 2} --resume, which keeps the batch "
        "and its weights (in Python microbatch=… and resume=True), or lower the batch size; "
        "--recompute-activations saves memory too"
    )


def build_state(run: Run, splits: Splits, model: nn.Module | None, communicator: Communicator) -> TrainState:
    """Return the state at the beginning of a run.

    Everything that cannot work is refused here, before files are written.

    Args:
        run: The configuration.
        splits: The images.
        model: A network handed in from Python; built from the configuration if None.
        communicator: The processes.

    Raises:
        UsageError: If data, network, device and settings do not fit each other, or differ between processes.
    """
    device = select_device(run.device, communicator)
    precision = Precision(run.precision, device)
    data = prepare_data(run, splits, device)
    steps_per_epoch(len(data.train), run.batch_size, communicator.world_size)  # refuses what cannot be shared
    model = (model if model is not None else build_model(run, splits.train)).to(device)
    model = adapt_model(model, data.train.pixels(slice(0, 2)))
    data = with_class_names(data, check_model(model, data.train))
    if communicator.world_size > 1:
        communicator.require_equal("training images", data.train.fingerprint(), "give every process the same data")
    communicator.broadcast([*model.parameters(), *model.buffers()])
    if run.recompute_activations:
        find_blocks(model)
    channels_last = _choose_channels_last(run, model, data.train, communicator)
    set_memory_format(model, channels_last)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError("the model has no parameters to train: make some require a gradient")
    return TrainState(
        run=run,
        communicator=communicator,
        device=device,
        data=data,
        model=model,
        ema=None if run.ema_decay is None else copy_for_ema(model),
        optimizer=run.optimizer.build(parameters),
        precision=precision,
        channels_last=channels_last,
        method_state=run.method.init(data.train.counts()),
    )


def check_method(state: TrainState) -> None:
    """Refuse a network that would train without the second derivatives that the method needs."""
    if state.epoch < state.run.epochs and state.run.method.needs_second_derivatives:
        state.model.train()
        batch = next(
            batches(
                state.data.train,
                state.run.batch_size,
                0,
                0,
                channels_last=state.channels_last,
                rank=state.communicator.rank,
                world_size=state.communicator.world_size,
            )
        )
        check_second_derivatives(state.model, batch, state.communicator)


def describe_data(data: TrainData) -> str:
    """Return a sentence about the images: how many are trained on, and which ones validate."""
    driver = "" if data.driver is None else f", {len(data.driver):,} held-out images drive the method"
    held_out = "held-out images, which choose the best epoch" if data.held_out else "test images, which choose nothing"
    return f"training on {len(data.train):,} images{driver}; validating on {len(data.validation):,} {held_out}"


def describe_settings(run: Run) -> str:
    """Return the run as text for comparison, without the memory addresses of objects handed in from Python."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(run))


def load_run_splits(run: Run, communicator: Communicator, callback: Callback) -> Splits:
    """Read the images of a run, and pass a note about them to the callback."""
    splits = load_splits_once(run.data, communicator)
    if splits.note:
        callback.on_message(splits.note)
    return splits


def prepare_data(run: Run, splits: Splits, device: torch.device) -> TrainData:
    """Hold out, apply the imbalance, and pick the validation images and those that the method learns from."""
    train, held_out = train_split(run.data, splits)
    driver, held_out = divide_holdout(run.data, held_out, run.method.validation_interval is not None)
    measured = splits.test if held_out is None else held_out
    validation = measured.subset(stratified_subset(measured.y, run.validation.size, run.data.split))
    driver = None if driver is None else driver.to(device)
    return TrainData(train.to(device), validation.to(device), held_out is not None, driver)


def build_model(run: Run, images: Images) -> nn.Module:
    """Return a new network; its initial weights follow from the seed."""
    mean, std = images.channel_statistics()
    with global_generators(derived_seed(run.seed, 0, 0, "weights")):
        return run.model.build(images.x.shape[1], len(images.classes), mean, std)


def with_class_names(data: TrainData, logits: int) -> TrainData:
    """Return the data with a class for every logit: those that the data do not name are numbered, as in evaluation."""
    names = extended_names(data.train.classes, logits - 1)
    driver = None if data.driver is None else replace(data.driver, classes=names)
    train, validation = (replace(images, classes=names) for images in (data.train, data.validation))
    return replace(data, train=train, validation=validation, driver=driver)


def check_model(model: nn.Module, images: Images) -> int:
    """Pass a few images through the network.

    Returns:
        The number of logits.

    Raises:
        UsageError: If it cannot take them, returns probabilities, or fewer logits than there are classes.
    """
    x, y = images.pixels(slice(0, 2)), images.y[:2]
    try:
        with eval_mode(model), torch.no_grad(), global_generators(0):
            logits = model(x)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"the model cannot take images of shape {tuple(x.shape[1:])} ({reason:.160}): build it for images of this "
            "size and number of channels"
        ) from None
    check_scores(logits, y)
    check_not_probabilities(logits)
    if logits.shape[1] < len(images.classes):
        low = int(images.y.min())
        if low > 0 and len(images.classes) - low <= logits.shape[1]:
            raise UsageError(
                f"labels run from {low} to {int(images.y.max())}, but the {logits.shape[1]} logits of the model are "
                f"numbered from 0: subtract {low} from the labels"
            )
        raise UsageError(
            f"the model returns {logits.shape[1]} logits for {len(images.classes)} classes: build it with that many"
        )
    return int(logits.shape[1])


def _choose_channels_last(run: Run, model: nn.Module, images: Images, communicator: Communicator) -> bool:
    if run.channels_last != "auto":
        return run.channels_last == "yes"
    share = min(run.batch_size // communicator.world_size, run.microbatch or run.batch_size)
    return communicator.broadcast_value(is_channels_last_faster(model, images, share))


def is_channels_last_faster(model: nn.Module, images: Images, batch_size: int, repeats: int = 3) -> bool:
    """Time an input gradient, which attacks are made of, in both memory formats, alternating."""
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    if not convolutions or any(map(_corrupts_memory, convolutions)):
        return False
    x = images.pixels(slice(0, batch_size))
    seconds = {False: float("inf"), True: float("inf")}

    def gradient(channels_last: bool) -> None:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        point = x.contiguous(memory_format=layout).requires_grad_()
        with attack_context(model, "eval", point.detach()) as forward:
            torch.autograd.grad(forward(point).sum(), point)[0].sum().item()

    for channels_last in (False, True) * repeats:
        set_memory_format(model, channels_last)
        start = time.perf_counter()
        if run_if_fits(partial(gradient, channels_last)) is None:  # training will say so, or has a smaller microbatch
            return False
        seconds[channels_last] = min(seconds[channels_last], time.perf_counter() - start)
    return seconds[True] < seconds[False]


def _corrupts_memory(layer: nn.Conv2d) -> bool:
    """Return whether torch 2.13 writes past its buffers in this layer's weight gradient, with channels last."""
    vector_width = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    narrow = layer.in_channels < vector_width and layer.weight.device.type == "cpu"
    return narrow and layer.kernel_size == (1, 1) and layer.stride != (1, 1)

"""The contents of a checkpoint of training, from which a run resumes to the same bits."""

from pathlib import Path
from typing import Any

import torch

from doubly.checkpoints import Checkpoint
from doubly.checkpoints.load import config_sha256
from doubly.checks import check_finite
from doubly.errors import UsageError
from doubly.models.weights import fill_model
from doubly.training.metrics import EpochMetrics
from doubly.training.state import TrainState, set_memory_format
from doubly.types import State


def make_checkpoint(state: TrainState) -> Checkpoint:
    """Return what a checkpoint keeps; collective over the processes.

    Raises:
        NonFiniteError: If a weight is not finite, so that the last checkpoint is always a good one.
    """
    for name, parameter in state.model.named_parameters():
        check_finite(parameter, f"the model's {name}")
    optimizer_state = state.optimizer.state_dict()["state"]
    tensors = {
        **{f"method/{name}": value for name, value in state.method_state.items()},
        **{f"metrics/{name}": value for name, value in state.metrics.collected(state.communicator).items()},
        **{
            f"optimizer/{index}/{name}": torch.as_tensor(value)
            for index, values in optimizer_state.items()
            for name, value in values.items()
            if value is not None
        },
    }
    if state.class_probabilities is not None:
        tensors["class_probabilities"] = state.class_probabilities
    groups = {"model": dict(state.model.state_dict()), "state": tensors}
    if state.ema is not None:
        groups["ema"] = dict(state.ema.state_dict())
    return Checkpoint(groups, _info(state))


def _info(state: TrainState) -> dict[str, Any]:
    return {
        "epoch": state.epoch,
        "step": state.step,
        "seconds": state.seconds,
        "best_score": state.best_score,
        "peak_ra_pgd": state.peak_ra_pgd,
        "channels": state.data.train.x.shape[1],
        "image_size": list(state.data.train.pixels(slice(0, 1)).shape[2:]),
        "classes": list(state.data.train.classes),
        "data": state.data_fingerprint,
        "config_sha256": config_sha256(state.run),
        "scaler": state.precision.state_dict(),
        "choices": {
            "channels_last": state.channels_last,
            "threads": torch.get_num_threads(),
            "processes": state.communicator.world_size,
        },
    }


def restore_checkpoint(state: TrainState, checkpoint: Checkpoint, path: Path) -> None:
    """Return to a checkpoint, with the choices that were measured when the run began.

    Raises:
        UsageError: If it is damaged, or was trained on other images.
    """
    try:
        _restore(state, checkpoint, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"checkpoint {path} is damaged ({error!r}): delete it to begin again") from None


def _restore(state: TrainState, checkpoint: Checkpoint, path: Path) -> None:
    tensors, info = checkpoint
    choices = info["choices"]
    if info["data"] != state.data_fingerprint:
        raise UsageError(f"{path} was trained on other images than those here: resume it with the same data")
    if info.get("config_sha256", config_sha256(state.run)) != config_sha256(state.run):  # older ones have none
        raise UsageError(f"config.json was changed after {path} was written: restore it, or begin again elsewhere")
    if choices["processes"] == state.communicator.world_size:  # else each has another share of the cores
        torch.set_num_threads(choices["threads"])  # sums are split by threads, so their last bits depend on them
    state.channels_last = choices["channels_last"]
    for network, group in ((state.model, "model"), (state.ema, "ema")):
        if network is not None:
            set_memory_format(network, state.channels_last)
            fill_model(network, tensors.get(group, {}), path)
    groups: dict[str, State] = {"method": {}, "metrics": {}, "optimizer": {}}
    for name, value in tensors["state"].items():
        group, _, key = name.partition("/")
        groups.setdefault(group, {})[key] = value.to(state.device)
    state.method_state, state.metrics = groups["method"], EpochMetrics(groups["metrics"])
    state.class_probabilities = tensors["state"].get("class_probabilities")
    optimizer = state.optimizer.state_dict()
    for name, value in groups["optimizer"].items():
        index, _, key = name.partition("/")
        optimizer["state"].setdefault(int(index), {})[key] = value
    state.optimizer.load_state_dict(optimizer)
    state.epoch, state.step, state.seconds = info["epoch"], info["step"], info["seconds"]
    state.best_score, state.peak_ra_pgd = info["best_score"], info["peak_ra_pgd"]
    state.precision.load_state_dict(info["scaler"])

"""Load what a run directory holds: its configuration, and the network that it trained."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from doubly.bilevel.arguments import check_arguments
from doubly.checkpoints.files import find_checkpoint, load_checkpoint
from doubly.config.run import Run
from doubly.config.serialize import first_difference, from_json, to_json
from doubly.config.user_code import InMemoryModel, WithOffsets
from doubly.errors import UsageError
from doubly.models import Model
from doubly.models.weights import fill_model
from doubly.rundir import RunDir, read_json
from doubly.seeding import global_generators

# How a run is named in tables, and how and where it is computed: a run may be resumed with other values.
NOT_COMPARED = ("label", "table", "device", "save_seconds", "microbatch", "recompute_activations")
MAX_ATTEMPTS, RETRY_SECONDS = 10, 0.1  # a run that is training may replace a checkpoint while it is read


class TrainedWeights(NamedTuple):
    """The weights of a checkpoint.

    Attributes:
        tensors: The state dict; that of the averaged weights if the run kept an EMA.
        info: The checkpoint's state.json.
        path: Where the checkpoint is.
    """

    tensors: dict[str, Tensor]
    info: dict[str, Any]
    path: Path


def load_run(path: Path) -> Run:
    """Read the configuration of a run directory.

    Raises:
        UsageError: If it is not a run directory, or its config.json is not valid.
    """
    if not RunDir(path).config.is_file():
        raise UsageError(f"{path} is no run directory: it has no config.json; give one that `doubly train` wrote")
    run = from_json(read_json(RunDir(path).config))
    if not isinstance(run, Run):
        raise UsageError(
            f"{RunDir(path).config} does not describe a run: restore it, or give a directory that `doubly train` wrote"
        )
    return run


def config_difference(path: Path, run: Run) -> str | None:
    """Return how a run directory's configuration differs from `run`; None if only in how and where it is computed."""
    return first_difference(_compared(load_run(path)), _compared(run))


def config_sha256(run: Run) -> str:
    """Return a checksum of what decides the numbers of a run, for its checkpoints."""
    return hashlib.sha256(json.dumps(_compared(run), sort_keys=True).encode()).hexdigest()


def _compared(run: Run) -> Any:
    """Return the configuration as JSON without what says how and where it is computed."""
    tree = to_json(run)
    for name in NOT_COMPARED:
        tree.pop(name, None)
    tree["data"].pop("root", None)
    for name in ("mean", "std"):  # where there is no normalization, the checksum is that of before these fields
        if name in tree["model"] and tree["model"][name] is None:
            del tree["model"][name]
    return tree


def load_trained_weights(path: Path, checkpoint: str) -> TrainedWeights:
    """Read the weights of a run directory's checkpoint.

    Args:
        path: The run directory.
        checkpoint: last or best.

    Raises:
        UsageError: If there is no such checkpoint, or it is damaged.
    """
    for attempt in range(MAX_ATTEMPTS):
        before = _identity(path, checkpoint)
        try:
            return _load_weights(path, checkpoint)
        except UsageError:
            time.sleep(RETRY_SECONDS)
            if attempt > 0 and _identity(path, checkpoint) == before:  # nobody replaces it: it is damaged
                raise
    return _load_weights(path, checkpoint)


def _load_weights(path: Path, checkpoint: str) -> TrainedWeights:
    folder = RunDir(path).checkpoints
    location = find_checkpoint(folder, checkpoint)
    if location is None:
        names = ", ".join(sorted(p.name for p in folder.glob("[!.]*"))) or "none"
        raise UsageError(
            f"{path} has no checkpoint '{checkpoint}' (there are: {names}): train first, or choose another"
        )
    tensors, info = load_checkpoint(location)
    weights = tensors.get("ema") or tensors.get("model")
    if weights is None:
        raise UsageError(f"checkpoint {location} is damaged (it holds no network): delete it to begin again")
    return TrainedWeights(weights, info, location)


def _identity(path: Path, checkpoint: str) -> tuple[Path, int] | None:
    """Return what changes when a checkpoint is replaced: where it is found, and the number of that folder."""
    location = find_checkpoint(RunDir(path).checkpoints, checkpoint)
    try:
        return None if location is None else (location, location.stat().st_ino)
    except OSError:
        return None


def load(
    path: Path | str, checkpoint: str = "last", *, model: nn.Module | None = None, device: str = "cpu"
) -> nn.Module:
    """Return the trained network of a run directory, ready for inference: in evaluation mode, with frozen parameters.

    Its attribute `classes` holds the names of the classes, in the order of the logits.

    Args:
        path: The run directory.
        checkpoint: Name of the checkpoint: last or best.
        model: A network of the same architecture to fill, for a run that trained a network handed in from Python.
        device: Where to put it, such as cpu or cuda.

    Returns:
        A network from images in [0, 1], (N, C, H, W), to logits.

    Raises:
        UsageError: If it is not a run directory, there is no such checkpoint, or the network does not fit its weights.
    """
    check_arguments(load, {"path": path, "checkpoint": checkpoint, "model": model, "device": device}, UsageError)
    folder = Path(path)
    if model is None:
        if isinstance(load_run(folder).model, InMemoryModel):
            raise UsageError(
                f"{folder} trained a network that was handed in from Python: build it again, and pass it as model=…"
            )
        model, info = load_model_and_info(folder, checkpoint, None)
    else:
        weights = load_trained_weights(folder, checkpoint)
        info = weights.info
        fill_model(model, weights.tensors, weights.path)
    model.classes = tuple(info["classes"])  # type: ignore[assignment]  # plain attributes are not parameters
    return model.to(device).eval().requires_grad_(False)


def load_model(path: Path, checkpoint: str = "last", architecture: Model | None = None) -> nn.Module:
    """Return the trained network of a run directory.

    Args:
        path: The run directory.
        checkpoint: last or best.
        architecture: What builds the network, if not the run's own configuration.

    Raises:
        UsageError: If there is no such checkpoint, it is damaged, or the network does not fit its weights.
    """
    return load_model_and_info(path, checkpoint, architecture)[0]


def load_model_and_info(path: Path, checkpoint: str, architecture: Model | None) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network and the state.json of one and the same checkpoint; see `load_model`."""
    run, weights = load_run(path), load_trained_weights(path, checkpoint)
    try:
        channels, classes = int(weights.info["channels"]), len(weights.info["classes"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"checkpoint {weights.path} is damaged: state.json lacks the channels or the classes; "
            "delete it to begin again"
        ) from None
    if isinstance(run.model, WithOffsets) and not isinstance(architecture, WithOffsets | None):
        architecture = WithOffsets(architecture)  # the weights of the run have the offsets
    source = (architecture or run.model).without_initial_weights()
    # Mean and standard deviation are buffers of the network, and come with its weights.
    with global_generators(0):
        model = source.build(channels, classes, [0.0] * channels, [1.0] * channels)
    fill_model(model, weights.tensors, weights.path)
    return model, weights.info

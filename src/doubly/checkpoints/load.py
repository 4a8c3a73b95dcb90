"""What a run directory holds: its configuration, and the network that it trained."""

import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from doubly.checkpoints import files as checkpoint
from doubly.config.run import Run
from doubly.config.serialize import difference, from_json, to_json
from doubly.config.user_code import OwnModel, fill, without_initial_weights
from doubly.errors import UsageError
from doubly.rundir import RunDir, read_json
from doubly.seeding import global_generators


def load_run(path: Path) -> Run:
    """The configuration of a run directory."""
    if not RunDir(path).config.is_file():
        raise UsageError(f"{path} is no run directory: it has no config.json; give one that `doubly train` wrote")
    run = from_json(read_json(RunDir(path).config))
    if not isinstance(run, Run):
        raise UsageError(f"{RunDir(path).config} does not describe a run")
    return run


def other_configuration(path: Path, run: Run) -> str | None:
    """How a run directory differs from this run, but for where its files are and how it is run; None if it does not."""
    saved, config = to_json(load_run(path)), to_json(run)
    for tree in (saved, config):
        for name in ("label", "table", "device", "save_seconds", "microbatch", "recompute_activations"):
            tree.pop(name, None)
        tree["data"].pop("root", None)
    return difference(saved, config)


def trained_weights(path: Path, which: str) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """(state dict, info, where it stands) of a run's checkpoint; the averaged weights where the run kept an average."""
    folder = RunDir(path).checkpoints
    standing = checkpoint.find(folder, which)
    if standing is None:
        known = ", ".join(sorted(p.name for p in folder.glob("[!.]*"))) or "none"
        raise UsageError(f"{path} has no checkpoint '{which}' (there are: {known}): train first, or choose another")
    try:
        tensors, info = checkpoint.load(standing)
    except UsageError:  # a run that is still training may have put a new one in its place meanwhile
        time.sleep(0.2)
        standing = checkpoint.find(folder, which) or standing
        tensors, info = checkpoint.load(standing)
    return tensors.get("average") or tensors["model"], info, standing


def load_model(path: Path, which: str = "last", own: OwnModel | None = None) -> nn.Module:
    """The trained network of a run directory."""
    return trained(path, which, own)[0]


def trained(path: Path, which: str, own: OwnModel | None) -> tuple[nn.Module, dict[str, Any]]:
    """(network, info) of one and the same checkpoint."""
    run = load_run(path)
    tensors, info, standing = trained_weights(path, which)
    try:
        channels, classes = int(info["channels"]), len(info["classes"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"checkpoint {standing} is damaged: state.json lacks the channels or the classes") from None
    source = without_initial_weights(own or run.model)
    # Mean and standard deviation are buffers of the network, and come with its weights.
    with global_generators(0):
        model = source.build(channels, classes, [0.0] * channels, [1.0] * channels)
    fill(model, tensors, standing)
    return model, info

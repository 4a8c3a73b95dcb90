"""The frontier of a network: average and tail under attack at several factors of its fitted class offsets."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from doubly.attacks import model_device
from doubly.callbacks import Callback, CallbackList
from doubly.checkpoints.load import load_model_and_info, load_run
from doubly.config.device import select_device
from doubly.config.environment import command_line
from doubly.config.run import Run
from doubly.data import Images, load_splits
from doubly.distributed import SINGLE_PROCESS
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.attacks import describe_attacks, reference_pgd, select_attacks
from doubly.evaluation.metrics import Bools, Ints
from doubly.evaluation.network import model_sha256
from doubly.evaluation.result import EvalResult
from doubly.evaluation.task import select_images
from doubly.files import json_bytes, remove_leftovers, replacing, write_arrays
from doubly.models import Model
from doubly.models.shifted import ShiftedLogits
from doubly.offsets.api import fit_network, run_images, with_root
from doubly.offsets.config import FrontierConfig, RepairConfig
from doubly.offsets.held_out import validation_images
from doubly.reading import load_npz
from doubly.report.frontier import SCHEMA, read_frontier
from doubly.rundir import RunDir
from doubly.text import method_label
from doubly.threat import Threat


@dataclass(frozen=True, eq=False)
class Frontier:
    """The frontier of one network.

    Attributes:
        label: Name of the network in tables.
        summary: The contents of frontier.json.
        correct: Whether each image is predicted correctly under attack at each scale, (points, n).
        y: Labels, (n,).
    """

    label: str
    summary: dict[str, Any]
    correct: Bools
    y: Ints


def frontier_run(
    path: Path,
    *,
    checkpoint: str = "last",
    architecture: Model | None = None,
    device: str = "auto",
    threat: Threat | None = None,
    root: str | None = None,
    config: FrontierConfig | None = None,
    repair: RepairConfig | None = None,
    callbacks: Iterable[Callback] = (),
) -> Frontier:
    """Evaluate the network of a run directory along its class offsets, and write frontier.json and frontier.npz.

    With split validation these are frontier-validation.json and frontier-validation.npz.

    A frontier that was made with the same network and settings is read and not computed again.

    Args:
        path: The run directory.
        checkpoint: Name of the checkpoint: last or best.
        architecture: What builds the network, if not the run's own configuration.
        device: auto, cpu, cuda, …
        threat: Another threat than that of the run's validation.
        root: Folder with the dataset's files, if not the one used in training.
        config: The scales, the attack and the images.
        repair: How the offsets are fitted.
        callbacks: Listeners.

    Returns:
        The points, with their intervals.

    Raises:
        UsageError: If it is not a run directory, has no held-out images, or something does not fit.
        NonFiniteError: If the network returns NaN or infinity.
    """
    config, repair, callback = config or FrontierConfig(), repair or RepairConfig(), CallbackList(callbacks)
    run = with_root(load_run(path), root)
    model = load_model_and_info(path, checkpoint, architecture)[0].to(select_device(device, SINGLE_PROCESS))
    pgd = run.validation.attack if threat is None else reference_pgd(threat)
    attacks = select_attacks(config.attack, pgd, config.eval_seed)
    if attacks.ensemble is not None:
        raise UsageError(
            "a frontier takes an attack with one perturbation per image, not AutoAttack: use strong or margin"
        )
    images, parts = _images(run, config), run_images(run, repair)
    protocol = {
        **describe_attacks(attacks.attacks),
        **_describe_images(images, config),
        "checkpoint": checkpoint,
        "model_sha256": model_sha256(model),
        "repair": asdict(repair),
        "fit_sha256": parts.fit.sha256(),
    }
    file = RunDir(path).frontier if config.split == "test" else RunDir(path).validation_frontier
    if (saved := _read_saved(file, run, protocol)) is not None:
        callback.on_message(f"{path}: {file.name} was made with the same network and settings, and is reused")
        return saved
    fit, notes = fit_network(model, parts, pgd.threat, repair, callback)
    results = _evaluate_scales(model, fit.offsets, images, attacks.attacks, config, callback)
    summary = {
        "schema": SCHEMA,
        "label": _label(run),
        "points": [_point(scale, result, config.attack) for scale, result in results],
        "offsets": fit.offsets.tolist(),
        "protocol": protocol,
        "notes": notes,
        "command": command_line(),
    }
    frontier = Frontier(
        _label(run), summary, np.stack([result.correct[config.attack] for _, result in results]), results[0][1].y
    )
    remove_leftovers(file.parent)
    with replacing(file) as unfinished:  # both are complete before one is replaced
        unfinished.write_bytes(json_bytes(frontier.summary, indent=2))
        write_arrays(file.with_suffix(".npz"), {"correct": frontier.correct, "y": frontier.y}, compressed=True)
    return frontier


def _images(run: Run, config: FrontierConfig) -> Images:
    if config.split == "test":
        images = load_splits(run.data).test
    else:
        images = validation_images(run.data, method_learns=run.method.validation_interval is not None)
    return select_images(images, config.images, config.skip_images)


def _describe_images(images: Images, config: FrontierConfig) -> dict[str, Any]:
    """Return the fields of the protocol about the images and how they are evaluated."""
    return {
        "name": config.attack,
        **({"split": config.split} if config.split != "test" else {}),
        **({"skip_images": config.skip_images} if config.skip_images else {}),
        "n": len(images),
        "seed": config.eval_seed,
        "data_sha256": images.sha256(),
        "scales": list(config.scales),
    }


def _evaluate_scales(
    model: nn.Module,
    offsets: torch.Tensor,
    images: Images,
    attacks: Any,
    config: FrontierConfig,
    callback: Callback,
) -> list[tuple[float, EvalResult]]:
    results = []
    device = model_device(model)
    for scale in sorted(config.scales):
        network = ShiftedLogits(model, scale * offsets.to(device))
        result = evaluate(network, images, None, attacks, callbacks=[callback], trust=False, seed=config.eval_seed)
        results.append((scale, result))
        callback.on_message(f"offsets x {scale:g}: {_describe(results[-1][1], config.attack)}")
    return results


def _describe(result: EvalResult, attack: str) -> str:
    average, weakest = result.accuracy(attack), result.tail(attack)[0]
    return f"average {average:.1%}, tail {weakest:.1%}, worst class {result.worst(attack)[1]:.1%}"


def _point(scale: float, result: EvalResult, attack: str) -> dict[str, Any]:
    parts = {of: list(result.interval(attack, of)) for of in ("average", "tail", "worst")}
    return {"scale": scale, **parts, "sa": list(result.interval("clean"))}


def _label(run: Run) -> str:
    return run.label or method_label(run.name)


def _read_saved(file: Path, run: Run, protocol: dict[str, Any]) -> Frontier | None:
    """Return the frontier in a file if it was made with the same network and settings."""
    try:
        saved = read_frontier(file)
        if saved is None or {**saved["protocol"]} != _as_json(protocol):
            return None
        arrays = load_npz(file.with_suffix(".npz"))
        correct, y = arrays["correct"], arrays["y"]
        is_whole = correct.dtype == bool and correct.shape == (len(saved["points"]), len(y)) and y.dtype.kind in "iu"
        if not is_whole or not all(len(point["sa"]) == 3 for point in saved["points"]):
            return None
        return Frontier(_label(run), saved, correct, y)
    except (UsageError, OSError, LookupError, ValueError, TypeError):  # nothing that can be read: computed again
        return None


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))

"""Repair from Python: of any network with held-out images, or of a run directory."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from doubly.attacks import model_device
from doubly.bilevel.arguments import check_arguments
from doubly.callbacks import Callback, CallbackList
from doubly.checkpoints.load import load_model_and_info, load_run
from doubly.checks import check_images
from doubly.config.device import select_device
from doubly.config.environment import command_line
from doubly.config.run import Run
from doubly.config.serialize import to_json
from doubly.data import AnyImages, Images, as_images
from doubly.distributed import SINGLE_PROCESS
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.attacks import Attacks
from doubly.evaluation.network import check_network, model_sha256
from doubly.evaluation.result import EvalResult
from doubly.models import Model
from doubly.models.adapt import Statistics, adapt_model
from doubly.offsets.config import RepairConfig
from doubly.offsets.files import check_output, write_run_dir
from doubly.offsets.fit import FittedOffsets, fit_offsets
from doubly.offsets.folding import fold_offsets
from doubly.offsets.held_out import (
    RepairImages,
    divide,
    held_out_images,
    notes_on_few_images,
    without_test_images,
)
from doubly.offsets.result import RepairResult, folded_or_wrapped
from doubly.threat import LinfBall, Threat

CHECKED_IMAGES = 16  # on which the network, and the folded one, are checked


def repair(
    model: nn.Module,
    held_out: AnyImages,
    threat: Threat | None = None,
    *,
    test: AnyImages | None = None,
    attacks: Attacks = ("margin",),
    mean: Statistics | None = None,
    std: Statistics | None = None,
    output: Path | str | None = None,
    callbacks: Iterable[Callback] = (),
    about: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RepairResult:
    """Raise the weakest classes of a finished network by one number per class, which is added to the logits.

    A part of the held-out images fits the offsets, the others judge the result.

    Args:
        model: The network, from images in [0, 1] to logits, or with other outputs as for `evaluate`. It is not changed.
        held_out: Images that it was not trained on and that are not its test images: `Images`, a pair (pixels, labels),
            a map-style dataset, or a DataLoader.
        threat: What the attacker may do; `LinfBall()` if not given.
        test: The test images, if there are some: they are compared with `held_out`, and used for nothing else.
        attacks: Attacks under which the result is judged, as for `evaluate`.
        mean: Mean of the channels, if the network expects normalized images.
        std: Standard deviation of the channels.
        output: Folder for weights.safetensors and repair.json.
        callbacks: Listeners.
        about: Further fields of repair.json.
        **settings: Fields of `RepairConfig`: priority, temperature, smoothing, fit_on, …

    Returns:
        A repaired copy of the network, the offsets, and the accuracies before and after.

    Raises:
        UsageError: If something does not fit, or held-out images are test images; the message says what to do.
        NonFiniteError: If the network returns NaN or infinity.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument is the network, an nn.Module, got {type(model).__name__}")
    if threat is not None and not isinstance(threat, Threat):
        raise UsageError(f"the third argument is the threat, such as LinfBall(8 / 255), got {type(threat).__name__}")
    names = [f.name for f in fields(RepairConfig)]
    if unknown := [name for name in settings if name not in names]:
        raise UsageError(f"repair has no setting '{unknown[0]}': it has {', '.join(names)}")
    given = {"mean": mean, "std": std, "callbacks": callbacks, "about": about, "output": output}
    check_arguments(repair, given, UsageError)
    config, callback = RepairConfig(**settings), CallbackList(callbacks)
    if output is not None:
        check_output(Path(output))
    images, notes = without_test_images(as_images(held_out), None if test is None else as_images(test))
    parts = divide(images, config)
    parts = parts._replace(notes=[*notes, *parts.notes])
    network = adapt_model(model, images.pixels(slice(0, 2)), mean, std)
    result = _repair(network, parts, threat or LinfBall(), attacks, config, callback, about or {})
    if output is not None:
        result.save(output)
    return result


def repair_run(
    path: Path,
    output: Path,
    *,
    checkpoint: str = "last",
    architecture: Model | None = None,
    device: str = "auto",
    threat: Threat | None = None,
    attacks: Attacks = ("margin",),
    root: str | None = None,
    config: RepairConfig | None = None,
    callbacks: Iterable[Callback] = (),
) -> RepairResult:
    """Repair the network of a run directory, and write another run directory with the repaired one.

    Args:
        path: The run directory.
        output: The run directory to write.
        checkpoint: Name of the checkpoint: last or best.
        architecture: What builds the network, if not the run's own configuration.
        device: auto, cpu, cuda, …
        threat: Another threat than that of the run's validation.
        attacks: Attacks under which the result is judged, as for `evaluate`.
        root: Folder with the dataset's files, if not the one used in training.
        config: The settings.
        callbacks: Listeners.

    Returns:
        The repaired network, the offsets, and the accuracies before and after.

    Raises:
        UsageError: If it is not a run directory, has no held-out images, or something does not fit.
        NonFiniteError: If the network returns NaN or infinity.
    """
    check_output(output)
    config, callback = config or RepairConfig(), CallbackList(callbacks)
    run = with_root(load_run(path), root)
    parts = run_images(run, config)
    model, info = load_model_and_info(path, checkpoint, architecture)
    about = {"source": str(path), "checkpoint": checkpoint, "command": command_line()}
    network = adapt_model(model.to(select_device(device, SINGLE_PROCESS)), parts.fit.pixels(slice(0, 2)))
    result = _repair(network, parts, threat or run.validation.attack.threat, attacks, config, callback, about)
    write_run_dir(result, path, output, info, architecture)
    return result


def with_root(run: Run, root: str | None) -> Run:
    """Return the run with its dataset's files in another folder; the same run if `root` is None."""
    return run if root is None else replace(run, data=replace(run.data, root=root))


def run_images(run: Run, config: RepairConfig) -> RepairImages:
    """Return the held-out images of a run that fit, and those that judge.

    Raises:
        UsageError: If there are none, or too few.
    """
    held_out, splits, notes = held_out_images(
        run.data, trained_here=True, method_learns=run.method.validation_interval is not None
    )
    held_out, duplicates = without_test_images(held_out, splits.test)
    parts = divide(held_out, config)
    return parts._replace(notes=[*notes, *duplicates, *parts.notes])


def fit_network(
    model: nn.Module, parts: RepairImages, threat: Threat, config: RepairConfig, callback: Callback
) -> tuple[FittedOffsets, list[str]]:
    """Check the network, fit its offsets and return them with the notes; see `repair`."""
    x, y = _few(model, parts.fit)
    check_images(x, y)
    check_network(model, x, y)
    with torch.no_grad():
        if model(x[:1]).shape[1] < 2:
            raise UsageError("the network has one logit: offsets shift the decision between at least two classes")
    for note in parts.notes:
        callback.on_message(note)
    fit = fit_offsets(model, parts.fit, threat, config, lambda done: callback.on_images(done, config.rounds))
    notes = [*notes_on_few_images(parts.fit, fit.errors[0]), *_implicit_note(fit, config)]
    for note in notes:
        callback.on_message(note)
    return fit, [*parts.notes, *notes]


def _repair(
    model: nn.Module,
    parts: RepairImages,
    threat: Threat,
    attacks: Attacks,
    config: RepairConfig,
    callback: Callback,
    about: Mapping[str, Any],
) -> RepairResult:
    fit, notes = fit_network(model, parts, threat, config, callback)
    offsets = config.priority * fit.offsets
    folded = fold_offsets(model, offsets, _few(model, parts.judge)[0])

    def judge(network: nn.Module) -> EvalResult:
        return evaluate(
            network,
            parts.judge,
            threat,
            attacks,
            callbacks=[callback],
            about={"split": "held out"},
            trust=False,
            seed=config.seed,
            chunk_size=config.chunk_size,
        )

    about = {
        **about,
        "threat": to_json(threat),
        "model_sha256": model_sha256(model),
        "fit_images": _describe(parts.fit),
        "judge_images": _describe(parts.judge),
    }
    more = folded_or_wrapped(folded)
    for note in more:
        callback.on_message(note)
    return RepairResult(
        folded.model,
        folded.layer,
        offsets,
        fit,
        judge(model),
        judge(folded.model),
        config,
        (*notes, *more),
        dict(about),
    )


def _few(model: nn.Module, images: Images) -> tuple[torch.Tensor, torch.Tensor]:
    device = model_device(model)
    return images.pixels(slice(0, CHECKED_IMAGES)).to(device), images.y[:CHECKED_IMAGES].to(device)


def _describe(images: Images) -> dict[str, Any]:
    per_class = dict(zip(images.classes, images.counts().tolist(), strict=True))
    return {"n": len(images), "per_class": per_class, "ids": images.ids.tolist(), "sha256": images.sha256()}


def _implicit_note(fit: FittedOffsets, config: RepairConfig) -> list[str]:
    if fit.implicit_share is None:
        return []
    used = "and was used" if config.implicit else "and was left out, since it would take second derivatives"
    zero = "; for the margin, which was attacked, it is 0" if config.fit_on == "margin" else ""
    return [
        f"implicit term: {fit.implicit_share:.2%} of the direct one for an attack on the cross-entropy, {used}{zero}"
    ]

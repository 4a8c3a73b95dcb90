"""Evaluation: predictions on clean and on attacked images, and everything that follows from them."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from doubly.attacks import PGD, evaluating
from doubly.checks import check_logits
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.summary import summarise
from doubly.losses import CrossEntropy, LogitMargin
from doubly.rundir import RunDir, read_json, write_json
from doubly.runs import checkpoint
from doubly.runs.build import chosen_device, load_splits
from doubly.runs.config import Run
from doubly.runs.own_model import AnyImages, OwnModel, as_images, fill, without_initial_weights
from doubly.runs.saved_config import from_json, to_json
from doubly.seeding import generator, global_generators


class Predictions(NamedTuple):
    """Per sample, in the order of the images."""

    clean: NDArray[np.int64]
    pgd: NDArray[np.int64]
    margin: NDArray[np.int64]  # under the same attack on the logit margin
    pgd_losses: NDArray[np.float64]


def predictions(
    model: nn.Module,
    images: Images,
    attack: PGD,
    seed: int = 0,
    chunk: int = 500,
    done: Callable[[int], None] = lambda count: None,
) -> Predictions:
    """Attack every image, and once more on the logit margin: methods that reweight look better under cross-entropy
    than they are. The draws belong to the chunk, so `chunk` is part of the protocol.
    """
    on_margin = replace(attack, loss=LogitMargin())
    device = next((p.device for p in model.parameters()), images.x.device)
    images = images.to(device)
    found: list[tuple[torch.Tensor, ...]] = []
    with evaluating(model):
        for index, start in enumerate(range(0, len(images), chunk)):
            x, y = images.pixels(slice(start, start + chunk)), images.y[start : start + chunk]
            with torch.no_grad():
                clean = model(x)
            check_logits(clean, y)
            found.append((clean.argmax(1), *_attacked(model, x, y, attack, on_margin, (seed, index))))
            done(start + len(y))
    clean_all, pgd_all, margin_all, losses = (torch.cat(part).cpu().numpy() for part in zip(*found, strict=True))
    return Predictions(clean_all, pgd_all, margin_all, losses.astype(np.float64))


def _attacked(
    model: nn.Module, x: Tensor, y: Tensor, attack: PGD, on_margin: PGD, where: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(answers under the attack, answers under that on the margin, losses under the attack), from the same start."""
    seed, index = where
    logits = []
    for each in (attack, on_margin):
        delta = each(model, x, y, generator(seed, 0, index, "evaluation"))
        with torch.no_grad():
            logits.append(model(x + delta))
        check_logits(logits[-1], y)
    return logits[0].argmax(1), logits[1].argmax(1), CrossEntropy()(logits[0], y)


def protocol(attack: PGD, seed: int, chunk: int, **more: Any) -> dict[str, Any]:
    """What a number needs beside it."""
    return {"attack": to_json(attack), "seed": seed, "chunk": chunk, **more}


def evaluate(
    model: nn.Module, data: AnyImages, attack: PGD | None = None, *, seed: int = 0, chunk: int = 500, **more: Any
) -> dict[str, Any]:
    """The contents of evaluation.json for any network that takes images in [0,1] and returns logits."""
    images, attack = as_images(data), attack or PGD(steps=20)
    found = predictions(model, images, attack, seed, chunk)
    answered = (
        int(max(found.clean.max(), found.pgd.max(), found.margin.max())) + 1
    )  # the network may know classes that are not in the data
    names = (*images.classes, *(str(k) for k in range(len(images.classes), answered)))
    about = protocol(attack, seed, chunk, **more)
    return summarise(images.y.cpu().numpy(), names, found.clean, found.pgd, about, found.margin)


def load_run(path: Path) -> Run:
    """The configuration of a run directory."""
    if not RunDir(path).config.is_file():
        raise UsageError(f"{path} is no run directory: it has no config.json; give one that `doubly train` wrote")
    run = from_json(read_json(RunDir(path).config))
    if not isinstance(run, Run):
        raise UsageError(f"{RunDir(path).config} does not describe a run")
    return run


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
    return _trained(path, which, own)[0]


def _trained(path: Path, which: str, own: OwnModel | None) -> tuple[nn.Module, dict[str, Any]]:
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


def evaluate_run(
    path: Path,
    which: str = "last",
    own: OwnModel | None = None,
    device: str = "auto",
    done: Callable[[int], None] = lambda count: None,
    root: str | None = None,
) -> dict[str, Any]:
    """Evaluate a run directory on its test images with its own protocol, and write evaluation.json and .npz into it.

    `root`: where the dataset's files are, if not where they were in training.
    """
    run, rundir = load_run(path), RunDir(path)
    run = run if root is None else replace(run, data=replace(run.data, root=root))
    model, info = _trained(path, which, own)
    model.to(chosen_device(device))
    splits = load_splits(run)
    test, subset = splits.test, {"note": splits.note} if splits.note else {}
    seed, chunk = 0, 500
    found = predictions(model, test, run.probe.attack, seed, chunk, done)
    about = protocol(run.probe.attack, seed, chunk, split="test", checkpoint=which, data_sha256=test.sha256(), **subset)
    y = test.y.cpu().numpy()
    result = {"epoch": info["epoch"], **summarise(y, test.classes, found.clean, found.pgd, about, found.margin)}
    unfinished = rundir.predictions.with_name(".evaluation.npz")
    np.savez(unfinished, y=y, ids=test.ids.cpu().numpy(), **found._asdict())
    unfinished.replace(rundir.predictions)
    write_json(rundir.evaluation, result)
    return result

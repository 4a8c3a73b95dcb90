"""Evaluation from Python: of any network on any images, or of a run directory."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from doubly.bilevel.arguments import check_arguments
from doubly.callbacks import Callback, CallbackList
from doubly.checkpoints.load import load_model_and_info, load_run
from doubly.config.device import select_device
from doubly.config.environment import command_line
from doubly.config.run import Run
from doubly.config.serialize import from_json
from doubly.data import AnyImages, Images, as_images
from doubly.data.holdout import holdout
from doubly.data.splits import load_splits_once
from doubly.distributed import Communicator, join_processes
from doubly.errors import UsageError
from doubly.evaluation.attacks import Attacks, reference_pgd, select_attacks, shared_threat
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.pipeline import run_evaluation
from doubly.evaluation.result import EvalResult
from doubly.evaluation.searches import failure_sentences
from doubly.evaluation.task import EvalTask
from doubly.metric_names import attack_metric
from doubly.models import Model
from doubly.models.adapt import Statistics, adapt_model
from doubly.rundir import RunDir, read_json
from doubly.threat import Threat


def evaluate(
    model: nn.Module,
    data: AnyImages,
    threat: Threat | None = None,
    attacks: Attacks = ("pgd", "margin"),
    *,
    validation: AnyImages | None = None,
    mean: Statistics | None = None,
    std: Statistics | None = None,
    callbacks: Iterable[Callback] = (),
    about: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EvalResult:
    """Evaluate a network: predict every image, clean and under every attack.

    Under torchrun all processes share the work and return the same result.

    Args:
        model: The network, from images in [0, 1] to logits. It may also return an object with `.logits`, a dict with
            "logits", or a tuple whose first entry is the logits. It is left as it was found.
        data: Images to evaluate on: `Images`, a pair (pixels, labels), a map-style dataset, or a DataLoader.
        threat: What the attacker may do; that of the attacks if not given, else `LinfBall()`.
        attacks: Names from `doubly list attacks`, or quick for the two APGD attacks of AutoAttack; attacks such as
            `PGD(…)`; or a mapping from names to attacks.
        validation: Other images, on which the classes of the tail are selected as well.
        mean: Mean of the channels, if the network expects normalized images.
        std: Standard deviation of the channels.
        callbacks: Listeners, called on the first process.
        about: Further fields of the protocol in evaluation.json.
        **settings: Fields of `EvalConfig`: output, seed, images, chunk_size, autoattack_images, trust, …

    Returns:
        The prediction of every image under every attack, and what follows from these.

    Raises:
        UsageError: If something does not fit; the message says what to do.
        NonFiniteError: If the network returns NaN or infinity.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the first argument is the network, an nn.Module, got {type(model).__name__}: of a run directory pass "
            "doubly.load(path)"
        )
    if threat is not None and not isinstance(threat, Threat):
        raise UsageError(f"the third argument is the threat, got {type(threat).__name__}: pass attacks=[…] by name")
    check_arguments(evaluate, {"mean": mean, "std": std, "callbacks": callbacks, "about": about}, UsageError)
    config = _config(settings)
    shared = shared_threat(attacks, threat)
    images = as_images(data)
    task = EvalTask(
        adapt_model(model, images.pixels(slice(0, 2)), mean, std),
        images,
        select_attacks(attacks, reference_pgd(shared), config.seed),
        shared,
        config,
        None if validation is None else as_images(validation),
        about or {},
    )
    listeners = list(callbacks)
    for weakness in () if listeners else task.weaknesses:
        warnings.warn(weakness, stacklevel=2)
    with join_processes() as communicator, _callback_of_first_process(listeners, communicator) as callback:
        result = run_evaluation(task, communicator, callback)
    for sentence in () if listeners else failure_sentences(result):
        warnings.warn(sentence, stacklevel=2)
    return result


def evaluate_run(
    path: Path,
    *,
    checkpoint: str = "last",
    architecture: Model | None = None,
    device: str = "auto",
    attacks: Attacks = ("pgd", "margin"),
    threat: Threat | None = None,
    root: str | None = None,
    config: EvalConfig | None = None,
    callbacks: Iterable[Callback] = (),
) -> EvalResult:
    """Evaluate the network of a run directory on its test images, and write the files into the directory.

    If the run holds images out, the classes of the tail are selected on these as well.

    Args:
        path: The run directory.
        checkpoint: last or best.
        architecture: What builds the network, if not the run's own configuration.
        device: auto, cpu, cuda, …
        attacks: As for `evaluate`; pgd is the attack of the run's validation.
        threat: Another threat than the run's; pgd is then the reference PGD within it.
        root: Folder with the dataset's files, if not the one used in training.
        config: Settings; the files are written into the run directory unless it names another output.
        callbacks: Listeners, called on the first process.

    Returns:
        The prediction of every test image under every attack, and what follows from these.

    Raises:
        UsageError: If it is not a run directory, or something does not fit; the message says what to do.
        NonFiniteError: If the network returns NaN or infinity.
    """
    run, config = load_run(path), config or EvalConfig()
    run = run if root is None else replace(run, data=replace(run.data, root=root))
    with join_processes() as communicator, _callback_of_first_process(callbacks, communicator) as callback:
        model, info = load_model_and_info(path, checkpoint, architecture)
        splits = load_splits_once(run.data, communicator)
        pgd = run.validation.attack if threat is None else reference_pgd(threat)
        task = EvalTask(
            adapt_model(model.to(select_device(device, communicator)), splits.test.pixels(slice(0, 2))),
            splits.test,
            select_attacks(attacks, pgd, config.seed),
            pgd.threat,
            replace(config, output=config.output or path),
            _held_out(run, splits.train),
            {"split": "test", "checkpoint": checkpoint, **({"note": splits.note} if splits.note else {})},
            {"epoch": info["epoch"], "test_images": len(splits.test), "command": command_line()},
        )
        return run_evaluation(task, communicator, callback)


def is_evaluated(path: Path, run: Run, attacks: Sequence[str], config: EvalConfig) -> bool:
    """Return whether a run directory holds an evaluation of the fully trained network with these settings.

    Args:
        path: The run directory.
        run: Its configuration.
        attacks: Names of the requested attacks.
        config: Settings of the requested evaluation.

    Returns:
        False also if there is no evaluation, or none that can be read.
    """
    try:
        saved = read_json(RunDir(path).evaluation)
        keys = [attack_metric(name).key for name in attacks]
        protocol, tail = saved["protocol"], saved["tail"]
        return (
            saved["epoch"] == run.epochs
            and all(key in saved for key in keys)
            and from_json(protocol["attack"]) == run.validation.attack
            and ("trust" in saved or not config.trust)
            and (protocol["seed"], protocol["chunk"]) == (config.seed, config.chunk_size)
            and (tail["share"], tail["rounding"]) == (config.tail_share, config.tail_rounding)
            and (config.curve_images is None or _has_count(saved["curve"]["n"], config.curve_images, saved["n"]))
            and protocol.get("skip_images", 0) == config.skip_images
            and _has_count(saved["n"], config.images, _available(saved))
            and ("ra_aa" not in keys or _has_count(saved["autoattack"]["n"], config.autoattack_images, saved["n"]))
        )
    except (UsageError, LookupError, TypeError, AttributeError):  # nothing there, or nothing that can be read
        return False


def _available(saved: Mapping[str, Any]) -> int | None:
    """Return the number of test images without those skipped; None in files of older versions."""
    return saved["test_images"] - saved["protocol"].get("skip_images", 0) if "test_images" in saved else None


def _has_count(n: int, requested: int | None, available: int | None) -> bool:
    """Return whether `n` images are as many as requested; `available` is None in files of older versions."""
    if available is None:
        return requested in (None, n)
    return n == available if requested is None else n == min(requested, available)


def _config(settings: Mapping[str, Any]) -> EvalConfig:
    names = [f.name for f in fields(EvalConfig)]
    if unknown := [name for name in settings if name not in names]:
        raise UsageError(f"evaluate has no setting '{unknown[0]}': it has {', '.join(names)}")
    paths = {
        name: Path(settings[name]) for name in ("output", "state", "corruptions") if settings.get(name) is not None
    }
    return EvalConfig(**{**settings, **paths})


@contextmanager
def _callback_of_first_process(callbacks: Iterable[Callback], communicator: Communicator) -> Iterator[Callback]:
    """Yield all callbacks as one, on the first process; the other processes call none."""
    callback = CallbackList(callbacks if communicator.is_first else ())
    try:
        yield callback
    finally:
        callback.close()


def _held_out(run: Run, train: Images) -> Images | None:
    if run.data.holdout == 0:
        return None
    return train.subset(holdout(train.y, run.data.holdout, run.data.split, train.groups)[1])

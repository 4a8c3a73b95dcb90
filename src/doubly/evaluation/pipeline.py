"""The steps of one evaluation, from a network and images to a result and its files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doubly.attacks import PGD, eval_mode, model_device
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.data.holdout import stratified_subset
from doubly.distributed import Communicator, on_rank_zero, run_together
from doubly.errors import UsageError
from doubly.evaluation import trust
from doubly.evaluation.attacks import describe_attacks, reference_pgd, stopping_attacks
from doubly.evaluation.autoattack.step import check_autoattack, run_autoattack, with_earlier_autoattack
from doubly.evaluation.corruptions import corruption_accuracies, open_corruptions
from doubly.evaluation.examples import AttackedImages, check_format, save_examples
from doubly.evaluation.gallery import Gallery
from doubly.evaluation.io import check_folder, write_gallery
from doubly.evaluation.memory import MicrobatchedModel, MicrobatchLimit
from doubly.evaluation.metrics import extended_names
from doubly.evaluation.network import RANDOM_WEIGHTS, check_network, model_sha256
from doubly.evaluation.predict import Predictions, predict
from doubly.evaluation.radius_curve import curve_attack, radius_curve
from doubly.evaluation.result import EvalResult
from doubly.evaluation.searches import curve_of_radii, failure_sentences
from doubly.evaluation.task import EvalTask, Resources, select_images
from doubly.rundir import RunDir


def run_evaluation(task: EvalTask, communicator: Communicator, callback: Callback) -> EvalResult:
    """Evaluate a network, and write the files if there is an output folder.

    Several processes share the work, and all return the same result; the first one writes.

    Args:
        task: What is evaluated, and how.
        communicator: The processes.
        callback: Called as the evaluation proceeds.

    Raises:
        UsageError: If the network cannot be evaluated, settings do not fit each other, or files cannot be written.
        NonFiniteError: If the network returns NaN or infinity.
    """
    resources = Resources(communicator, callback, MicrobatchLimit(callback.on_message))
    if task.config.accuracy_only:
        task = replace(task, attacks=stopping_attacks(task.attacks))
    if communicator.world_size > 1:
        _require_equal_tasks(task, communicator)
    for weakness in task.weaknesses:
        callback.on_message(weakness)
    task = with_earlier_autoattack(_with_selected_images(task), resources)
    config, ensemble, gallery = task.config, task.attacks.ensemble, Gallery()
    existed = config.output is not None and config.output.is_dir()
    sample = select_images(task.images, min(config.trust_images, config.chunk_size)).to(model_device(task.model))
    differences = run_together(communicator, lambda: _check(task, sample, resources))
    if RANDOM_WEIGHTS in (note := str(task.protocol.get("note", ""))):
        callback.on_message(note)  # before minutes or hours are spent on it
    if ensemble is not None and config.sharded:
        clean = _predict(task, resources, task.images, {})
        return run_autoattack(task, ensemble, _result(task, task.images, clean), resources)[0]
    result, examples = _attack(task, gallery, resources)
    if config.trust:
        result = replace(result, trust=_trust(task, result, sample, differences, resources))
    if config.curve_images is not None:
        result = replace(result, curve=_radius_curve(task, config.curve_images, resources))
    elif result.radii:
        result = replace(result, curve=curve_of_radii(result, task.attacks.attacks, task.threat))
    if config.corruptions is not None:
        result = replace(result, corruptions=_corruptions(task, config.corruptions, resources))
    if ensemble is not None:
        _write(task, result, gallery, communicator, existed, overwrite=False)  # AutoAttack may take hours
        result, broken = run_autoattack(task, ensemble, result, resources)
        result = replace(result, trust=trust.update_checks(result.trust, result, differences))
        examples += broken
    if examples:
        on_rank_zero(communicator, lambda: _require_output(task, existed))
        saved = _save_examples(task, examples, resources)
        result = replace(result, examples={**result.examples, "saved": saved})
    _write(task, result, gallery, communicator, existed)
    return result


def _require_equal_tasks(task: EvalTask, communicator: Communicator) -> None:
    settings = f"{task.config} {describe_attacks(task.attacks.attacks)}"
    communicator.require_equal("weights", model_sha256(task.model), "give every process the same network")
    communicator.require_equal("images", task.images.sha256(), "give every process the same ones, in the same order")
    communicator.require_equal("settings", settings, "give every process the same")


def _with_selected_images(task: EvalTask) -> EvalTask:
    count, skip = task.config.images, task.config.skip_images
    validation = None if task.validation is None else select_images(task.validation, count)
    protocol = {**task.protocol, "skip_images": skip} if skip else task.protocol
    return replace(task, images=select_images(task.images, count, skip), validation=validation, protocol=protocol)


def _check(task: EvalTask, sample: Images, resources: Resources) -> dict[str, float]:
    """Refuse what cannot be evaluated, before any attack; returns what `check_network` returns."""
    config, ensemble = task.config, task.attacks.ensemble
    if config.sharded and ensemble is None:
        raise UsageError("a shard is a part of AutoAttack's chunks: ask for autoattack or quick as well")
    if config.sharded and resources.communicator.world_size > 1:
        raise UsageError("the processes of torchrun share AutoAttack's chunks by themselves: leave out the shard")
    if config.output is not None:
        check_folder(config.output)
    if config.save_examples is not None:
        if config.output is None:
            raise UsageError("attacked images need a folder to be saved in: give an output")
        check_format(config.save_examples, task.images.x.shape[1])
    if config.corruptions is not None:
        open_corruptions(config.corruptions, task.images)
    if config.curve_images is not None:
        curve_attack(task.attacks.attacks, task.threat)
    x = sample.pixels(slice(None))
    differences = resources.limit.map(
        len(sample), lambda start, end: check_network(task.model, x[start:end], sample.y[start:end])
    )
    if ensemble is not None:
        check_autoattack(task, ensemble, resources)
    return {name: max(part[name] for part in differences) for name in differences[0]}


def _attack(task: EvalTask, gallery: Gallery, resources: Resources) -> tuple[EvalResult, list[AttackedImages]]:
    """Predict all images under all attacks; returns the result, and the attacked images that are to be written."""
    config, images, attacks = task.config, task.images, task.attacks.attacks
    keep = None if config.save_examples is None else stratified_subset(images.y, config.max_examples, seed=0)
    predictions = _predict(
        task,
        resources,
        images,
        attacks,
        keep=keep,
        on_chunk=gallery.add_chunk,
        on_images=lambda done: resources.callback.on_images(done, len(images)),
    )
    result = _result(task, images, predictions)
    for sentence in failure_sentences(result):
        resources.callback.on_message(sentence)
    if task.validation is not None:
        general = {name: attack for name, attack in attacks.items() if attack.for_any_images}
        validation = _predict(task, resources, task.validation, general)
        result = replace(result, validation=_result(task, task.validation, validation))
    if keep is None:
        return result, []
    attacked = predictions.attacked
    return result, [AttackedImages(name, keep, x, attacks[name].threat) for name, x in attacked.items()]


def _predict(
    task: EvalTask, resources: Resources, images: Images, attacks: Mapping[str, Any], **options: Any
) -> Predictions:
    return predict(
        task.model,
        images,
        attacks,
        seed=task.config.seed,
        chunk_size=task.config.chunk_size,
        communicator=resources.communicator,
        limit=resources.limit,
        **options,
    )


def _result(task: EvalTask, images: Images, predictions: Predictions) -> EvalResult:
    config = task.config
    protocol = {
        **describe_attacks(task.attacks.attacks),
        "seed": config.seed,
        "chunk": config.chunk_size,
        "data_sha256": images.sha256(),
        **task.protocol,
    }
    return EvalResult(
        y=images.y.cpu().numpy(),
        classes=extended_names(images.classes, max(int(classes.max()) for classes in predictions.classes.values())),
        predictions=predictions.classes,
        protocol=protocol,
        ids=images.ids.cpu().numpy(),
        losses={name: losses for name, losses in predictions.losses.items() if name != "clean"},
        examples=predictions.examples if task.attacks.attacks else {},
        tail_share=config.tail_share,
        tail_rounding=config.tail_rounding,
        weights_r=config.weights_r,
        weights_normalize=config.weights_normalize,
        margins=predictions.margins,
        radii=predictions.radii,
    )


def _trust(
    task: EvalTask, result: EvalResult, sample: Images, differences: Mapping[str, float], resources: Resources
) -> dict[str, Any]:
    checks = trust.checks_of_result(result, differences)
    pgd = task.attacks.attacks.get("pgd", reference_pgd(task.threat))
    if isinstance(pgd, PGD):  # another attack has no steps and restarts to multiply
        model, x, attack = MicrobatchedModel(task.model, resources.limit), sample.pixels(slice(None)), pgd
        checks += resources.limit.retry(lambda: trust.checks_of_attacks(model, x, sample.y, attack, task.config.seed))
    return trust.summarize_checks(checks)


def _radius_curve(task: EvalTask, count: int, resources: Resources) -> dict[str, Any]:
    pgd, images = curve_attack(task.attacks.attacks, task.threat), select_images(task.images, count)
    return radius_curve(task.model, images, pgd, task.config, resources.communicator, resources.limit)


def _corruptions(task: EvalTask, folder: Path, resources: Resources) -> dict[str, Any]:
    corrupted = open_corruptions(folder, task.images)
    with eval_mode(task.model):
        return corruption_accuracies(
            task.model, corrupted, task.images.classes, task.config, resources.communicator, resources.limit
        )


def _save_examples(task: EvalTask, examples: list[AttackedImages], resources: Resources) -> dict[str, Any]:
    """Write attacked images on the first process; returns what evaluation.json keeps about each attack's."""
    config, model = task.config, MicrobatchedModel(task.model, resources.limit)
    saved: dict[str, Any] = {}

    def predict_classes(x: Tensor) -> Tensor:
        with eval_mode(task.model), torch.no_grad():
            return torch.cat([model(chunk).argmax(1) for chunk in torch.split(x, config.chunk_size)])

    def write() -> None:
        assert config.output is not None and config.save_examples is not None  # as _check requires
        for group in examples:
            images = task.images.subset(group.rows).to(model_device(task.model))
            folder = config.output / "examples" / group.attack
            saved[group.attack] = save_examples(folder, config.save_examples, group, images, predict_classes)

    on_rank_zero(resources.communicator, write)
    return resources.communicator.broadcast_value(saved)


def _require_output(task: EvalTask, existed: bool) -> None:
    """Refuse to make a folder again that existed when the evaluation began: it was deleted or has another name."""
    if existed and task.config.output is not None and not task.config.output.is_dir():
        raise UsageError(
            f"{task.config.output} was deleted or renamed during the evaluation, so nothing is written there: evaluate "
            "again, with the name that it has now or with another output"
        )


def _write(
    task: EvalTask,
    result: EvalResult,
    gallery: Gallery,
    communicator: Communicator,
    existed: bool,
    *,
    overwrite: bool = True,
) -> None:
    """Write the files on the first process; unless `overwrite`, only if there is no evaluation yet."""
    folder = task.config.output

    def write() -> None:
        _require_output(task, existed)
        if folder is None or (not overwrite and RunDir(folder).evaluation.exists()):
            return
        clean, broken = (task.images.subset(rows).pixels(slice(None)) for rows in (gallery.rows, gallery.broken))
        write_gallery(folder, gallery.arrays(result, clean, broken) if len(gallery.rows) else None)
        result.save(folder, **task.extra)

    on_rank_zero(communicator, write)

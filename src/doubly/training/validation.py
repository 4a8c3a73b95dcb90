"""Held-out images during training: validation, with warnings if training has gone wrong, and what methods learn."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import numpy as np

from doubly.attacks import eval_mode
from doubly.callbacks import Callback
from doubly.config.run import Validation
from doubly.data import Images
from doubly.data.loader import batches, steps_per_epoch
from doubly.distributed.microbatch import microbatch_rows, microbatch_sizes
from doubly.evaluation.attacks import select_attacks
from doubly.evaluation.metrics import nan_to_none
from doubly.evaluation.predict import predict
from doubly.evaluation.result import EvalResult
from doubly.seeding import Rows
from doubly.training.accumulation import split_batch
from doubly.training.state import TrainState
from doubly.types import Batch

OVERFITTING_DROP = 0.2  # of accuracy under PGD below its highest, while the training attack is still withstood
COLLAPSE_SHARE = 0.9  # of all predictions that are one class
MASKING_GAP = 0.15  # accuracy under cross-entropy PGD above that under margin PGD


def update_from_holdout(state: TrainState) -> None:
    """Let the method learn from held-out images after a step, if it is time to; all processes share the images."""
    method = state.warmed_up_method(state.progress(state.step))
    if method.validation_interval is None or state.data.driver is None:
        return
    with eval_mode(state.model):
        for number, batch in _due_batches(state, state.data.driver, method.validation_interval):
            step, sizes = state.train_step(len(batch.y)), microbatch_sizes(len(batch.y), state.run.microbatch)
            rows = microbatch_rows(step.rows or Rows(0, len(batch.y)), sizes)
            for part, part_rows in zip(split_batch(batch, sizes), rows, strict=True):
                step = step._replace(step=number, rows=part_rows)
                state.method_state = method.on_validation(state.model, part, state.method_state, step)


def _due_batches(state: TrainState, images: Images, interval: int | Literal["epoch"]) -> Iterator[tuple[int, Batch]]:
    """Yield the held-out batches that are due after this step, each with a number for its random draws.

    They are all images after an epoch; or every `interval` steps the next batch, of one pass over the images after
    another. Which ones follows from the number of the step alone, so that resuming needs nothing else.
    """
    run, rank, world_size = state.run, state.communicator.rank, state.communicator.world_size

    def load(number: int, start: int = 0) -> Iterator[Batch]:
        layout = state.channels_last
        return batches(
            images,
            run.batch_size,
            run.seed,
            number,
            start=start,
            channels_last=layout,
            rank=rank,
            world_size=world_size,
        )

    if interval == "epoch":
        if state.step + 1 == state.steps_per_epoch:
            yield from enumerate(load(state.epoch))
        return
    calls, steps_left = divmod(state.epoch * state.steps_per_epoch + state.step + 1, interval)
    if steps_left == 0:
        number, start = divmod(calls - 1, max(1, steps_per_epoch(len(images), run.batch_size, world_size)))
        yield from ((state.step, batch) for batch in islice(load(number, start), 1))


def validate_epoch(state: TrainState, row: dict[str, Any], callback: Callback) -> bool:
    """Add the validation to an epoch's row, and report alarms.

    Returns:
        Whether the epoch is the best so far; the test images never choose.
    """
    row["validation"] = validate(state)
    row["alarms"] = training_alarms(row, state.peak_ra_pgd)
    state.peak_ra_pgd = max(state.peak_ra_pgd, row["validation"]["ra_pgd"])
    for alarm in row["alarms"]:
        callback.on_message(f"epoch {state.epoch + 1}: {alarm}")
    score = validation_score(row["validation"], state.run.validation)
    best = state.data.held_out and (state.best_score is None or score > state.best_score)
    state.best_score = score if best else state.best_score
    return best


def validate(state: TrainState) -> dict[str, Any]:
    """Evaluate the network on the validation images; all processes share the work and know the outcome.

    Returns:
        The part "validation" of a row of metrics.
    """
    images, attacks = state.data.validation, select_attacks(("pgd", "margin"), state.run.validation.attack).attacks
    predictions = predict(state.evaluated_model, images, attacks, communicator=state.communicator)
    result = EvalResult(images.y.cpu().numpy(), images.classes, predictions.classes)
    worst_name, worst_value = result.worst("pgd")
    per_class = zip(result.names, result.per_class("pgd"), strict=True)
    return {
        "on": "holdout" if state.data.held_out else "test",
        "n": result.n,
        "sa": result.accuracy("clean"),
        "ra_pgd": result.accuracy("pgd"),
        "ra_tail_30": result.tail("pgd")[0],
        "worst_class": {"name": worst_name, "ra_pgd": worst_value},
        "ra_margin": result.accuracy("margin"),
        "commonest": _commonest_class(result),
        "per_class": {name: nan_to_none(value) for name, value in per_class},
    }


def _commonest_class(result: EvalResult) -> dict[str, Any]:
    """Return the class that is predicted most often for clean images: its share of predictions and of labels."""
    counts = np.array(result.confusion("clean"))  # a row per label
    index = int(counts.sum(0).argmax())
    share, true_share = counts.sum(0)[index] / result.n, counts.sum(1)[index] / result.n
    return {"name": result.names[index], "share": float(share), "true_share": float(true_share)}


def validation_score(validation: Mapping[str, Any], settings: Validation) -> float:
    """Return the number by which the best epoch is chosen."""
    if settings.choose == "both":
        return float(validation["ra_pgd"] + validation["ra_tail_30"]) / 2
    return float(validation[settings.choose])


def training_alarms(row: Mapping[str, Any], peak: float) -> list[str]:
    """Return sentences about training that has gone wrong.

    Args:
        row: The metrics of an epoch with its validation.
        peak: Highest accuracy under PGD of the validations before it.
    """
    validation, alarms = row["validation"], []
    ra_pgd, train_accuracy = validation["ra_pgd"], row["train_accuracy"]
    if peak - ra_pgd > OVERFITTING_DROP and train_accuracy - ra_pgd > OVERFITTING_DROP:
        alarms.append(
            f"catastrophic overfitting: accuracy under PGD fell from {peak:.0%} to {ra_pgd:.0%}, while the "
            f"attack that it trains on leaves {train_accuracy:.0%}; use more steps, warm_up, or N-FGSM"
        )
    name, share, true_share = (validation["commonest"][key] for key in ("name", "share", "true_share"))
    if share > COLLAPSE_SHARE > true_share:
        alarms.append(
            f"collapse: {share:.0%} of the predictions are '{name}', {true_share:.0%} of the images are; lower the "
            "learning rate, or let epsilon grow with warm_up"
        )
    if ra_pgd - validation["ra_margin"] > MASKING_GAP:
        alarms.append(
            f"masked gradients: accuracy is {ra_pgd:.0%} under PGD on cross-entropy, but "
            f"{validation['ra_margin']:.0%} under PGD on the margin; do not trust the first"
        )
    return alarms

"""The passes of the network that a step of each method takes, as a table: predicted, and counted on digits."""

import torch

from doubly.config import Run
from doubly.data import load_splits, train_split
from doubly.data.loader import steps_per_epoch
from doubly.data.splits import divide_holdout
from doubly.recipes.digits import FAST, METHODS, unsearched
from doubly.text import method_label
from doubly.training.passes import Passes, average_passes, holdout_batches, holdout_passes, step_passes
from doubly.training.setup import build_model


def passes_table() -> str:
    """Return a Markdown table of all methods, with the settings of the recipes on digits."""
    rows = [_row(unsearched(name, imbalanced=True), *both(name)) for name in (*METHODS, *FAST)]
    return "\n".join(["| method | predicted | counted |", "|---|---|---|", *rows])


def _row(run: Run, predicted: Passes, counted: Passes) -> str:
    return f"| {run.label or method_label(run.name)} | {format_passes(predicted)} | {format_passes(counted)} |"


def both(name: str) -> tuple[Passes, Passes]:
    """Return the passes predicted on a tiny network, and those counted with the recipe's own network and images."""
    with torch.random.fork_rng():
        run = unsearched(name, imbalanced=True)
        return average_passes(run.method, (1,), 10, _holdout_share(run)), counted_step_passes(run)


def counted_step_passes(run: Run) -> Passes:
    """Count the passes of one training step of a run, on one batch of its images, and its part of held-out batches."""
    train = load_splits(run.data).train
    model = build_model(run, train)
    held_out = holdout_passes(run.method, model, train, run.batch_size)
    return step_passes(run.method, model, train, run.batch_size).plus(held_out, _holdout_share(run))


def _holdout_share(run: Run) -> float:
    """Return the held-out batches per step."""
    train, held_out = train_split(run.data, load_splits(run.data))
    driver = divide_holdout(run.data, held_out, run.method.validation_interval is not None).driver
    steps = steps_per_epoch(len(train), run.batch_size)
    return holdout_batches(run.method, 0 if driver is None else len(driver), run.batch_size, steps)


def format_passes(passes: Passes) -> str:
    """Return passes as text, forward + backward."""
    return f"{passes.forward:.3g} + {passes.backward:.3g}"

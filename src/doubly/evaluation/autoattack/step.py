"""The step of an evaluation that runs AutoAttack, or reuses the results of an earlier evaluation."""

from dataclasses import replace

import torch
from torch import Tensor

from doubly.attacks.autoattack import AutoAttack
from doubly.data.holdout import stratified_subset
from doubly.evaluation.autoattack.outcome import add_outcome
from doubly.evaluation.autoattack.reuse import NOT_REUSED, REUSED, find_earlier_autoattack
from doubly.evaluation.autoattack.runner import AutoAttackRunner
from doubly.evaluation.examples import AttackedImages
from doubly.evaluation.result import EvalResult
from doubly.evaluation.task import EvalTask, Resources


def with_earlier_autoattack(task: EvalTask, resources: Resources) -> EvalTask:
    """Add AutoAttack to a task that does not ask for it, if it is already computed for its network and images."""
    folder, communicator = task.config.output, resources.communicator
    if task.attacks.ensemble is not None or folder is None:
        return task
    earlier = find_earlier_autoattack(folder, task.threat, len(task.images), task.config)
    finished, extended = False, task
    if earlier is not None:
        extended = replace(task, attacks=task.attacks._replace(ensemble=earlier.attack), config=earlier.config)
        runner = AutoAttackRunner.from_config(earlier.attack, earlier.config, communicator)
        finished = runner.is_finished(task.model, task.images.subset(_rows(extended)))
    reused = bool(communicator.all_gather(torch.tensor([int(finished)])).all())  # all processes see it, or none
    if earlier is not None:
        resources.callback.on_message(f"{earlier.attack.label} {REUSED if reused else NOT_REUSED}")
    return extended if reused else task


def check_autoattack(task: EvalTask, attack: AutoAttack, resources: Resources) -> None:
    """Refuse a state folder of another evaluation, before any attack.

    Raises:
        UsageError: If the folder that was named belongs to another evaluation.
    """
    runner = AutoAttackRunner.from_config(attack, task.config, resources.communicator)
    runner.check(task.model, task.images.subset(_rows(task)))


def run_autoattack(
    task: EvalTask, attack: AutoAttack, result: EvalResult, resources: Resources
) -> tuple[EvalResult, list[AttackedImages]]:
    """Run AutoAttack, or resume it.

    Args:
        task: The evaluation.
        attack: AutoAttack.
        result: The result before.
        resources: What to work with.

    Returns:
        The result with its outcome, if all chunks are finished, and some of the images that it has broken.
    """
    rows = _rows(task)
    runner = AutoAttackRunner.from_config(attack, task.config, resources.communicator)
    outcome, info = runner.run(
        task.model, task.images.subset(rows), resources.communicator, resources.callback, resources.limit
    )
    state = info.pop("state")  # where it is kept is not part of the result
    if not outcome.complete:
        return replace(result, autoattack=info), []
    if len(outcome.examples) < min(runner.max_examples, outcome.broken):
        resources.callback.on_message(
            f"images that AutoAttack broke before --save-examples was given were not kept: to have them, delete {state}"
        )
    result = add_outcome(result, attack.name, outcome, info, rows.numpy())
    if not outcome.examples:
        return result, []
    broken = torch.tensor(sorted(outcome.examples), dtype=torch.int64)
    x = torch.stack([outcome.examples[row] for row in broken.tolist()])
    return result, [AttackedImages(attack.name, rows[broken], x, attack.threat)]


def _rows(task: EvalTask) -> Tensor:
    """Return the positions of the images that AutoAttack is run on."""
    count = task.config.autoattack_images
    return torch.arange(len(task.images)) if count is None else stratified_subset(task.images.y, count, seed=0)

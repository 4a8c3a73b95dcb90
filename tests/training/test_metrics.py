from dataclasses import replace

import pytest
import torch

from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.training.metrics import EpochMetrics, effective_sample_size
from doubly.training.passes import Passes
from doubly.types import Batch, Objective


def objective(losses, weights, correct):
    """Return an objective and a batch of labels 1, in which the logits point at the label where `correct`."""
    losses, weights = torch.tensor(losses), torch.tensor(weights)
    logits = torch.stack([1 - torch.tensor(correct), torch.tensor(correct)], 1).float()
    y = torch.ones(len(losses), dtype=torch.long)
    return Objective(losses.mean(), losses, weights, logits, {}), Batch(torch.zeros(len(y), 1, 1, 1), y, y)


FIRST = objective([1.0, 3.0], [0.5, 1.5], [1, 0])
SECOND = objective([2.0], [4.0], [1])


def collect(*steps, restored=None):
    metrics = EpochMetrics(restored)
    for step in steps:
        metrics.add(*step)
    return metrics


def test_effective_sample_size_by_hand():
    for weights, size in [([1.0] * 7, 7), ([5.0, 0, 0], 1), ([1.0, 1, 0, 0], 2), ([3.0, 1], 1.6), ([0.0, 0.0], 0)]:
        w = torch.tensor(weights).double()
        assert effective_sample_size(w.sum(), w.square().sum()).item() == pytest.approx(size)


def test_a_row_is_the_mean_over_samples_not_over_batches():
    row = collect(FIRST, SECOND).row(SINGLE_PROCESS)
    assert row["loss"] == 2.0 and row["weighted_loss"] == pytest.approx((0.5 + 4.5 + 8) / 3)
    assert row["train_accuracy"] == pytest.approx(2 / 3)
    assert row["weight_mean"] == 2.0 and row["weight_max"] == 4.0
    assert row["weight_quantiles"] == {"5%": 0.6, "50%": 1.5, "95%": 3.75}
    assert row["weight_ess"] == pytest.approx((4 / 2.5 / 2 + 1) / 2)  # of each batch its share, then their mean


def test_records_are_averaged_over_the_batches_counts_are_summed_and_passes_are_those_of_one_step():
    metrics = EpochMetrics()
    for value in (1.0, 4.0):
        metrics.add(replace(FIRST[0], record={"kappa": torch.tensor(value)}), FIRST[1], Passes(3.0, 2.0))
        metrics.count("skipped_steps", torch.tensor(1.0))
    row = metrics.row(SINGLE_PROCESS)
    assert row["kappa"] == 2.5 and row["skipped_steps"] == 2
    assert (row["passes_forward"], row["passes_backward"]) == (3.0, 2.0)
    assert EpochMetrics(metrics.collected(SINGLE_PROCESS)).row(SINGLE_PROCESS) == row


def test_metrics_that_are_restored_give_the_same_row():
    collected = collect(FIRST, SECOND, FIRST).collected(SINGLE_PROCESS)
    restored = collect(SECOND, FIRST, restored=collect(FIRST).collected(SINGLE_PROCESS))
    assert restored.row(SINGLE_PROCESS) == EpochMetrics(collected).row(SINGLE_PROCESS)
    again = restored.collected(SINGLE_PROCESS)
    assert again.keys() == collected.keys() and all(torch.equal(again[name], collected[name]) for name in again)
    assert EpochMetrics().collected(SINGLE_PROCESS) == {} and EpochMetrics({}).parts == {}


def test_two_processes_collect_what_one_would():
    class Two(Communicator):
        """The first of two processes; the other one has the same rows."""

        world_size = 2

        def all_gather(self, values):
            return torch.cat([values, values])

    def doubled(step):
        result, batch = step
        both = {name: torch.cat([getattr(result, name)] * 2) for name in ("sample_losses", "weights", "logits")}
        return replace(result, **both), Batch(*(torch.cat([values] * 2) for values in batch))

    single, several = collect(doubled(FIRST), doubled(SECOND)), collect(FIRST, SECOND)
    ours, theirs = several.collected(Two()), single.collected(SINGLE_PROCESS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert several.row(Two()) == single.row(SINGLE_PROCESS)


def test_what_is_collected_holds_no_graph():
    losses = torch.ones(2, requires_grad=True) * 2
    metrics = EpochMetrics()
    metrics.add(Objective(losses.sum(), losses, torch.ones(2), torch.eye(2), {}), FIRST[1])
    assert not any(value.requires_grad for value in metrics.collected(SINGLE_PROCESS).values())

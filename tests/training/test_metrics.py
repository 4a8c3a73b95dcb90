from dataclasses import replace

import pytest
import torch

from doubly.training.metrics import Meter, effective_sample_size
from doubly.types import Batch, Objective


def objective(losses, weights, correct):
    """A batch of labels 1, in which the logits point at the label where `correct`."""
    losses, weights = torch.tensor(losses), torch.tensor(weights)
    logits = torch.stack([1 - torch.tensor(correct), torch.tensor(correct)], 1).float()
    y = torch.ones(len(losses), dtype=torch.long)
    return Objective(losses.mean(), losses, weights, logits, {}), Batch(torch.zeros(len(y), 1, 1, 1), y, y)


FIRST = objective([1.0, 3.0], [0.5, 1.5], [1, 0])
SECOND = objective([2.0], [4.0], [1])


@pytest.mark.parametrize(
    ("weights", "size"), [([1.0] * 7, 7), ([5.0, 0, 0], 1), ([1.0, 1, 0, 0], 2), ([3.0, 1], 1.6), ([0.0, 0.0], 0)]
)
def test_effective_sample_size(weights, size):
    w = torch.tensor(weights).double()
    assert effective_sample_size(w.sum(), w.square().sum()).item() == pytest.approx(size)


def test_a_row_is_the_mean_over_samples_not_over_batches():
    meter = Meter()
    meter.add(*FIRST)
    meter.add(*SECOND)
    row = meter.row()
    assert row["loss"] == 2.0 and row["weighted_loss"] == pytest.approx((0.5 + 4.5 + 8) / 3)
    assert row["train_accuracy"] == pytest.approx(2 / 3)
    assert row["weight_mean"] == 2.0 and row["weight_max"] == 4.0
    assert row["weight_quantiles"] == {"5%": 0.6, "50%": 1.5, "95%": 3.75}
    assert row["weight_ess"] == pytest.approx((4 / 2.5 / 2 + 1) / 2)  # of each batch its share, then their mean


def test_further_numbers_of_a_method_are_averaged_over_the_batches():
    meter = Meter()
    for value in (1.0, 4.0):
        meter.add(replace(FIRST[0], record={"kappa": torch.tensor(value)}), FIRST[1])
    assert meter.row()["kappa"] == 2.5 and Meter(meter.collected()).row() == meter.row()


def test_a_meter_taken_up_again_gives_the_same_row():
    whole, first = Meter(), Meter()
    for meter in (whole, first):
        meter.add(*FIRST)
    again = Meter(first.collected())
    for meter in (whole, again):
        meter.add(*SECOND)
        meter.add(*FIRST)
    assert again.row() == whole.row()
    collected = whole.collected()
    assert all(torch.equal(value, collected[name]) for name, value in again.collected().items())


def test_an_empty_meter_can_be_saved():
    assert Meter().collected() == {} and Meter({}).parts == {}


def test_what_is_kept_holds_no_graph():
    losses = torch.ones(2, requires_grad=True) * 2
    meter = Meter()
    meter.add(Objective(losses.sum(), losses, torch.ones(2), torch.eye(2), {}), FIRST[1])
    assert not any(value.requires_grad for value in meter.collected().values())

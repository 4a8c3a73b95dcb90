"""A batch in parts: what batch norm and dropout see of it, what it costs, what a batch that does not fit is told."""

import pytest
import torch
from torch import nn

from doubly import AT, DONE, PGD, Batch, LinfBall, TrainStep, train
from doubly.bilevel import SignStep
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.methods import AWP
from doubly.training.accumulation import gradient
from doubly.training.passes import counted

ATTACK = PGD(LinfBall(0.1), 2, SignStep(0.05))


def batch(count=12):
    x = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(36, 3))


def test_passes_that_were_given_up_leave_no_trace_in_batch_norm():
    model = network(nn.BatchNorm1d(36))
    gradient(DONE(ATTACK), model, batch(), {}, TrainStep(), 4)
    assert model[1].num_batches_tracked == 3  # one for each part, though each was begun twice
    expected = torch.zeros(36)
    for part in torch.tensor_split(batch().x, 3):
        expected = 0.9 * expected + 0.1 * part.flatten(1).mean(0)
    assert torch.allclose(model[1].running_mean, expected, atol=0.02)  # of attacked images


def test_parts_do_not_share_their_dropout():
    model, seen = network(nn.Dropout(0.5)).train(), []
    model[1].register_forward_hook(lambda layer, inputs, kept: seen.append(kept == 0))
    gradient(AT(ATTACK), model, batch()._replace(x=torch.ones(12, 1, 6, 6)), {}, TrainStep(), 6)
    first, second = (mask for mask in seen if mask.any())
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("method", "more"), [(AT(ATTACK), 0), (DONE(ATTACK), 1)])
def test_what_a_batch_in_parts_costs_is_a_pass_per_exchange(method, more):
    found = []
    for most in (None, 5):
        model = network()
        with counted(model, 12) as passes:
            gradient(method, model, batch(), {}, TrainStep(), most)
        found.append(passes)
    assert found[1].forward == pytest.approx(found[0].forward + more)
    assert found[1].backward == pytest.approx(found[0].backward)


class Small(nn.Module):
    """A network for which the memory ends above so many images with a gradient."""

    def __init__(self, most):
        super().__init__()
        self.most, self.inside = most, network()

    def forward(self, x):
        if len(x) > self.most and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory")
        return self.inside(x)


def test_a_batch_that_does_not_fit_is_told_the_largest_that_does(tmp_path):
    images = (batch(60).x, batch(60).y)
    settings = {"test": images, "epochs": 1, "batch": 30, "device": "cpu", "channels_last": "no"}
    with pytest.raises(UsageError, match=r"out of memory with 30 images at a time, 7 fit: add --microbatch 7"):
        train(Small(7), images, AT(ATTACK), **settings, output=tmp_path)
    more = {"output": tmp_path, "resume": True, "microbatch": 7}  # the remedy, in the same directory
    assert train(Small(7), images, AT(ATTACK), **settings, **more).metrics[0]["loss"] > 0
    settings["channels_last"] = "auto"  # which is measured on no more images either
    assert train(Small(7), images, AT(ATTACK), **settings, microbatch=7).metrics[0]["loss"] > 0
    with pytest.raises(UsageError, match="with a single image at a time: take a smaller network"):
        train(Small(0), images, AT(ATTACK), **settings)


def test_no_part_is_a_single_image_that_batch_norm_cannot_normalize():
    model = network(nn.BatchNorm1d(36))
    gradient(AT(ATTACK), model, batch(5), {}, TrainStep(), 2)
    assert model[1].num_batches_tracked == 2


def test_gradients_of_parts_are_summed_up_and_not_kept_side_by_side(monkeypatch):
    found, kept = [], parallel.Turns.answer
    monkeypatch.setattr(parallel.Turns, "answer", lambda turns: (kept(turns), found.append(turns.known[-1].numel())))
    model = network()
    gradient(AWP(AT(ATTACK)), model, batch(), {}, TrainStep(), 3)
    assert found == [model[1].weight.numel()]


def test_a_part_has_at_least_one_image():
    images = (batch(6).x, batch(6).y)
    with pytest.raises(UsageError, match="microbatch is at least 1 image, or none for whole batches, got 0"):
        train(network(), images, AT(ATTACK), test=images, microbatch=0)

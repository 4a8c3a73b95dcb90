"""A batch in microbatches: what batch norm and dropout see of it, what it costs, and what to do if it does not fit.

That it trains to the weights of the whole batch is tested in methods/test_method.py and test_world_sizes.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from doubly import AT, DONE, PGD, Batch, LinfBall, TrainStep, train
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.methods import AWP, MAIL
from doubly.training.accumulation import accumulate_gradient
from doubly.training.passes import counted_passes

ATTACK = PGD(LinfBall(0.1), 2, SignStep(0.05))


def batch(count=12):
    x = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(36, 3))


def test_objective_and_gradient_of_microbatches_are_those_of_the_whole_batch():
    for method in (AT(ATTACK), DONE(ATTACK), DONE(ATTACK, implicit="first_order", damping=100.0), AWP(AT(ATTACK))):
        models = network(), network()
        whole, merged = (
            accumulate_gradient(method, model, batch(), {}, TrainStep(), limit)
            for model, limit in zip(models, (None, 5), strict=True)
        )
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.allclose(one.grad, other.grad, atol=1e-5), method
        for name in ("loss", "sample_losses", "weights", "logits"):
            assert torch.allclose(getattr(whole, name), getattr(merged, name), atol=1e-5), name
        assert not merged.loss.requires_grad
        assert whole.record.keys() == merged.record.keys()
        assert all(torch.allclose(whole.record[name], merged.record[name], atol=1e-5) for name in whole.record)
    without_ids = batch()._replace(ids=torch.empty(0, dtype=torch.int64))
    assert accumulate_gradient(AT(ATTACK), network(), without_ids, {}, TrainStep(), 5).loss > 0


def test_batch_norm_sees_each_microbatch_once():
    model = network(nn.BatchNorm1d(36))
    accumulate_gradient(DONE(ATTACK), model, batch(), {}, TrainStep(), 4)
    assert model[1].num_batches_tracked == 3
    expected = torch.zeros(36)
    for part in torch.tensor_split(batch().x, 3):
        expected = 0.9 * expected + 0.1 * part.flatten(1).mean(0)
    assert torch.allclose(model[1].running_mean, expected, atol=0.02)  # of attacked images
    model = network(nn.BatchNorm1d(36))
    accumulate_gradient(AT(ATTACK), model, batch(5), {}, TrainStep(), 2)  # 3 and 2: a single image has no variance
    assert model[1].num_batches_tracked == 2


def test_microbatches_do_not_share_their_dropout():
    model, masks = network(nn.Dropout(0.5)).train(), []
    model[1].register_forward_hook(lambda layer, inputs, output: masks.append(output == 0))
    images = batch()._replace(x=torch.ones(12, 1, 6, 6))
    accumulate_gradient(AT(ATTACK), model, images, {}, TrainStep(), 6)
    first, second = (mask for mask in masks if mask.any())
    assert not torch.equal(first, second)


def test_a_method_whose_weights_depend_on_the_batch_costs_one_more_forward_pass():
    mail = MAIL(ATTACK, normalize="batch", burn_in=0.0)
    for method, more in [(AT(ATTACK), 0), (DONE(ATTACK), 1), (mail, 1), (replace(mail, burn_in=0.5), 0)]:
        counts = []
        for microbatch in (None, 5):
            model = network()
            with counted_passes(model, 12) as passes:
                accumulate_gradient(method, model, batch(), {}, TrainStep(), microbatch)
            counts.append(passes)
        assert counts[1].forward == pytest.approx(counts[0].forward + more)
        assert counts[1].backward == pytest.approx(counts[0].backward)


def test_only_one_microbatch_has_a_graph_at_a_time():
    """Each loss is differentiated before the next microbatch is passed."""
    events, model = [], network()
    model.register_forward_hook(
        lambda module, args, out: events.append(f"forward {len(out)}") if out.requires_grad else None
    )

    def backward(loss):
        events.append("backward")
        loss.backward()

    accumulate_gradient(AWP(DONE(ATTACK)), model, batch(9), {}, TrainStep(), 3, backward=backward)
    trained = events[events.index("backward") - 1 :]
    assert trained == ["forward 3", "backward"] * 3


class Small(nn.Module):
    """A network for which memory runs out above so many images with a gradient."""

    def __init__(self, max_images):
        super().__init__()
        self.max_images, self.inside = max_images, network()

    def forward(self, x):
        if len(x) > self.max_images and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory")
        return self.inside(x)


def test_a_batch_that_does_not_fit_says_what_to_do_and_that_helps(tmp_path):
    images = (batch(60).x, batch(60).y)
    settings = {"test": images, "epochs": 1, "batch_size": 30, "device": "cpu", "channels_last": "no"}
    with pytest.raises(UsageError, match=r"out of memory with 30 images at a time: add --microbatch 15 --resume"):
        train(Small(7), images, AT(ATTACK), **settings, output=tmp_path)
    more = {"output": tmp_path, "resume": True, "microbatch": 7}
    assert train(Small(7), images, AT(ATTACK), **settings, **more).metrics[0]["loss"] > 0
    with pytest.raises(UsageError, match="with a single image at a time: use a smaller network"):
        train(Small(0), images, AT(ATTACK), **settings, microbatch=1)
    with pytest.raises(UsageError, match="microbatch is at least 1 image, or none for whole batches, got 0"):
        train(network(), images, AT(ATTACK), **settings, microbatch=0)

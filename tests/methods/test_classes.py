"""Methods that treat classes differently, where classes are missing, alone, or many."""

from dataclasses import replace

import pytest
import torch

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.data import Images, Splits
from doubly.distributed.microbatch import microbatch_rows
from doubly.methods import AT, ATBSL, CFA, DAFA, FAAL, GroupDRO, RobustLT
from doubly.seeding import Rows
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import flat_gradient
from method_problems import small_network as network

ATTACK = PGD(LinfBall(0.1), 2, SignStep(0.06))
NOISY = replace(ATTACK, start="gaussian")
BY_CLASS = [
    ATBSL(ATTACK),
    DAFA(NOISY, start=0.3),
    CFA(NOISY),
    CFA(ATTACK, "at"),
    FAAL(ATTACK, start=0.3),
    GroupDRO(ATTACK, eta=0.1, adjustment=1.0),
    RobustLT(AT(ATTACK)),
    RobustLT(CFA(NOISY), ramp=0.0),
]
by_class = pytest.mark.parametrize("method", BY_CLASS, ids=lambda m: f"{type(m).__name__}{getattr(m, 'form', '')}")


def noise(y, seed=1):
    x = torch.rand(len(y), 1, 4, 4, generator=torch.Generator().manual_seed(seed)).double()
    return Batch(x, torch.as_tensor(y), torch.arange(len(y)))


def train(method, counts, labels, epochs=4):
    """Take a step per epoch on each of the lists of labels; return the last objective."""
    model, state = network(len(counts)), method.init(torch.tensor(counts))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        for step, y in enumerate(labels):
            progress = (epoch + step / len(labels)) / epochs
            result = method.objective(model, noise(y, step), state, TrainStep(epoch, step, progress))
            state = result.state
            assert result.loss.isfinite() and result.weights.isfinite().all() and (result.weights >= 0).all()
            optimizer.zero_grad()
            result.loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()
    assert not any(value.isnan().any() for value in state.values() if value.is_floating_point())
    return result


@by_class
def test_classes_missing_from_a_batch_from_an_epoch_or_from_the_data(method):
    result = train(method, [4, 3, 0, 1], [[0, 1, 0, 1], [1, 0, 3, 0], [0, 0]])
    assert (result.weights > 0).all()


@by_class
def test_one_class_is_trained_with_equal_weights(method):
    result = train(method, [6], [[0, 0, 0], [0, 0, 0]])
    assert torch.allclose(result.weights, torch.ones(3).double())


@by_class
def test_a_thousand_classes_with_few_images(method):
    counts = [1 + c % 3 for c in range(1000)]
    labels = torch.randint(1000, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
    train(method, counts, labels, epochs=2)


@by_class
def test_microbatches_are_the_whole_batch_also_when_an_epoch_begins(method):
    """With sums of an epoch before, and a class of which a microbatch has no image."""
    counts = torch.tensor([5, 2, 1])
    state = method.init(counts)
    for step in range(2):
        state = method.objective(network(), noise([0, 1, 2, 0], step), state, TrainStep(0, step, step / 10)).state
    results = []
    for sizes in ([8], [3, 3, 2]):
        model, batch = network().eval(), noise([0, 0, 0, 1, 0, 1, 2, 0])
        parts = [Batch(*columns) for columns in zip(*(torch.split(values, sizes) for values in batch), strict=True)]
        steps = [TrainStep(1, 0, 0.5, 4, rows=rows) for rows in microbatch_rows(Rows(0, 8), sizes)]
        loss, weights = 0.0, []
        for objective in method.microbatch_objectives(model, parts, state, steps):
            loss = loss + objective.loss * len(objective.weights) / 8
            weights.append(objective.weights)
        results.append((torch.cat(weights), flat_gradient(loss, model), objective.state))
    (weights, slopes, state), (other_weights, other_slopes, other_state) = results
    assert torch.allclose(weights, other_weights, atol=1e-10)
    assert torch.allclose(slopes, other_slopes, rtol=0, atol=1e-10)
    assert all(torch.allclose(state[key], other_state[key], atol=1e-10) for key in state)


@by_class
def test_a_run_that_was_stopped_ends_with_the_same_bits(method, tiny, tmp_path, same_bits):
    train_images = tiny.splits.train.subset(torch.arange(45)[torch.arange(45) % 9 != 0])
    tiny.splits = Splits(Images(train_images.x, train_images.y, train_images.classes), tiny.splits.test)
    run = tiny.run(method)
    tiny.train(run, tmp_path / "whole")
    tiny.stopped(run, tmp_path / "parts", after=2)
    tiny.stopped(run, tmp_path / "parts", after=3, resume=True)
    tiny.train(run, tmp_path / "parts", resume=True)
    assert same_bits(tiny.checkpoint(tmp_path / "whole")[0], tiny.checkpoint(tmp_path / "parts")[0])

"""An evaluation that runs out of memory continues with fewer images at a time, with the same result."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from doubly.attacks import PGD
from doubly.attacks.autoattack import AutoAttack
from doubly.bilevel import SignStep
from doubly.callbacks import Callback
from doubly.checks import is_out_of_memory
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.memory import MicrobatchedModel, MicrobatchLimit, run_if_fits
from doubly.evaluation.predict import predict
from doubly.threat import LinfBall

BALL = LinfBall(0.08)
ATTACKS = {
    "pgd": PGD(BALL, 3, SignStep(0.07), restarts=2),
    "gaussian": PGD(BALL, 3, SignStep(0.07), "gaussian"),
    "ensemble": AutoAttack(BALL, iterations=2, queries=8),
}


def cpu_error():
    return RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried")


def windows_error():
    return RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.")


def cuda_error():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Activation(torch.autograd.Function):
    """An activation that is saved for the backward pass and takes memory until then."""

    @staticmethod
    def forward(ctx, x, network):
        saved = x.clone()
        ctx.save_for_backward(saved)
        ctx.network = network
        network.allocate(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        if ctx.network.fails_backward and len(ctx.saved_tensors[0]) > ctx.network.limit // 2:
            raise ctx.network.error()
        return upstream, None


class LimitedNetwork(nn.Module):
    """Has memory for `limit` images, activations included; if `fails_backward`, for half as many in a backward pass."""

    def __init__(self, limit=10**6, error=cuda_error, fails_backward=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.inner = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
        self.limit, self.error, self.fails_backward = limit, error, fails_backward
        self.activations = []

    def allocate(self, tensor):
        self.activations = [one for one in self.activations if one() is not None] + [TensorWeakRef(tensor)]
        if sum(len(one()) for one in self.activations) > self.limit:
            raise self.error()

    def forward(self, x):
        if torch.is_grad_enabled() and x.requires_grad:
            return self.inner(Activation.apply(x, self))
        if len(x) > self.limit:
            raise self.error()
        return self.inner(x)


def images(n=23):
    x = 0.1 + 0.8 * torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = LimitedNetwork()(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    return Images.of(x, y, [str(k) for k in range(4)])


class Messages(Callback):
    def __init__(self):
        self.messages = []

    def on_message(self, message):
        self.messages.append(message)


def evaluated(network):
    callback = Messages()
    settings = {"chunk_size": 10, "autoattack_chunk_size": 9, "curve_images": 12}
    return evaluate(network, images(), BALL, ATTACKS, callbacks=[callback], **settings), callback.messages


def test_little_memory_changes_no_result():
    expected, messages = evaluated(LimitedNetwork())
    assert messages == [] and 0 < expected.accuracy("autoattack_in_part") < expected.accuracy("clean") < 1
    for limit, error, fails_backward in ((7, cuda_error, True), (3, cpu_error, False)):
        result, messages = evaluated(LimitedNetwork(limit, error, fails_backward))
        assert len(messages) == 1 and messages[0].startswith("out of memory with 10 images at a time: continuing")
        for name, predictions in expected.predictions.items():
            assert result.predictions[name].tolist() == predictions.tolist(), name
        for name, losses in expected.losses.items():
            np.testing.assert_allclose(result.losses[name], losses, rtol=1e-5)
        for part, robust in expected.robust_after.items():
            assert result.robust_after[part].tolist() == robust.tolist()
        verdicts = [[line["verdict"] for line in one.trust["lines"]] for one in (result, expected)]
        assert verdicts[0] == verdicts[1] and result.curve == expected.curve


def test_an_image_that_does_not_fit_alone_ends_with_a_message(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: None)  # takes long
    quick = {"trust": False}
    for call in (
        lambda: evaluate(LimitedNetwork(0), images(), BALL, {}),
        lambda: evaluate(LimitedNetwork(0), images(), BALL, ATTACKS),
        lambda: evaluate(LimitedNetwork(1, fails_backward=True), images(), BALL, [ATTACKS["ensemble"]], **quick),
    ):
        with pytest.raises(UsageError, match=r"out of memory with a single image: .*another device"):
            call()


def test_no_image_is_counted_twice_if_a_microbatch_fails_midway():
    """The second attack fails where the first one did not."""
    attacks = {"start": PGD(BALL, 0), "pgd": ATTACKS["pgd"]}
    result = predict(LimitedNetwork(4), images(), attacks, chunk_size=10).examples
    assert result["n"] == 46 and result["outside"] + result["changed"] == 0


def test_other_errors_are_not_taken_for_lack_of_memory():
    with pytest.raises(RuntimeError, match="shape"):
        predict(LimitedNetwork(3, lambda: RuntimeError("the shape is wrong")), images(), {}, chunk_size=10)
    for error in (RuntimeError("no memory of it"), KeyError("CUDA out of memory")):
        assert not is_out_of_memory(error)
    for error in (MemoryError(), cpu_error(), windows_error(), cuda_error()):
        assert is_out_of_memory(error)
    assert run_if_fits(lambda: torch.empty(2**60)) is None  # the real allocator
    assert run_if_fits(lambda: 3) == (3,)


def test_what_failed_is_freed_before_the_next_try(monkeypatch):
    references = []

    def work():
        tensor = torch.zeros(3)
        references.append(weakref.ref(tensor))
        raise cuda_error()

    monkeypatch.setattr(gc, "collect", lambda: None)  # without its help
    assert run_if_fits(work) is None and references[0]() is None


def test_gradients_in_microbatches_are_those_of_the_whole_batch():
    x, limit = images().x.double(), MicrobatchLimit()
    model = MicrobatchedModel(LimitedNetwork().double(), limit)

    def gradients():
        point = x.clone().requires_grad_()
        value = model(point).logsumexp(1).sum()
        first = torch.autograd.grad(value, point, retain_graph=True)[0]
        return torch.stack([first, torch.autograd.grad(2 * value, point)[0]])

    expected = gradients()
    limit.max_images = 4
    torch.testing.assert_close(gradients(), expected, rtol=1e-12, atol=1e-12)
    assert model(x[:0]).shape == (0, 4)

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
from doubly.checks import is_out_of_memory
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.autoattack.runner import Callback
from doubly.evaluation.memory import InPieces, Pieces, fitted, largest_that_fits
from doubly.evaluation.predict import answers
from doubly.threat import LinfBall

BALL = LinfBall(0.08)
ATTACKS = {
    "pgd": PGD(BALL, 3, SignStep(0.03), restarts=2),
    "gaussian": PGD(BALL, 3, SignStep(0.03), "gaussian"),
    "whole": AutoAttack(BALL, iterations=2, queries=8),
}


def cpu():
    return RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried")


def windows():
    return RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.")


def cuda():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Activation(torch.autograd.Function):
    """Is kept for the backward pass, and takes memory as long."""

    @staticmethod
    def forward(ctx, x, network):
        kept = x.clone()
        ctx.save_for_backward(kept)
        ctx.network = network
        network.take(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        if ctx.network.late and len(ctx.saved_tensors[0]) > ctx.network.limit // 2:
            raise ctx.network.problem()
        return upstream, None


class Small(nn.Module):
    """Has memory for `limit` images, activations that are kept included; `late`: for half as many backwards."""

    def __init__(self, limit=10**6, problem=cuda, late=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.inner = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
        self.limit, self.problem, self.late = limit, problem, late
        self.kept = []

    def take(self, tensor):
        self.kept = [each for each in self.kept if each() is not None] + [TensorWeakRef(tensor)]
        if sum(len(each()) for each in self.kept) > self.limit:
            raise self.problem()

    def forward(self, x):
        if torch.is_grad_enabled() and x.requires_grad:
            return self.inner(Activation.apply(x, self))
        if len(x) > self.limit:
            raise self.problem()
        return self.inner(x)


def images(n=23):
    x = 0.1 + 0.8 * torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = Small()(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    return Images.of(x, y, [str(k) for k in range(4)])


class Heard(Callback):
    def __init__(self):
        self.said = []

    def say(self, sentence):
        self.said.append(sentence)


def measured(network, **settings):
    heard = Heard()
    settings = {"chunk": 10, "autoattack_chunk": 9, "compile": "no", "curve_images": 12, **settings}
    return evaluate(network, images(), BALL, ATTACKS, watch=heard, **settings), heard.said


@pytest.fixture(scope="module")
def unlimited():
    return measured(Small())


@pytest.mark.parametrize(("limit", "problem", "late"), [(7, cuda, True), (3, cpu, False)])
def test_what_is_found_with_little_memory_is_what_is_found_with_much(limit, problem, late, unlimited):
    expected, nothing = unlimited
    found, said = measured(Small(limit, problem, late))
    assert nothing == [] and len(said) == 1 and said[0].startswith("out of memory with 10 images at a time: going on")
    for name, answered in expected.answers.items():
        assert found.answers[name].tolist() == answered.tolist(), name
    for name, losses in expected.losses.items():
        np.testing.assert_allclose(found.losses[name], losses, rtol=1e-5)
    assert [each.tolist() for each in found.after.values()] == [each.tolist() for each in expected.after.values()]
    assert [line["verdict"] for line in found.trust["lines"]] == [line["verdict"] for line in expected.trust["lines"]]
    assert found.curve == expected.curve
    assert 0 < expected.accuracy("autoattack_in_part") < expected.accuracy("clean") < 1


@pytest.mark.parametrize("attacks", [{}, ATTACKS])
def test_a_single_image_that_does_not_fit_is_a_sentence(attacks):
    with pytest.raises(UsageError, match=r"out of memory with a single image: .*another device"):
        evaluate(Small(0), images(), BALL, attacks)


def test_a_backward_pass_of_one_image_that_does_not_fit_is_a_sentence():
    with pytest.raises(UsageError, match="out of memory with a single image"):
        evaluate(Small(1, late=True), images(), BALL, [ATTACKS["whole"]], compile="no", trust=False)


def test_no_image_is_asked_twice_or_left_out_when_a_piece_fails_midway():
    """The second attack fails where the first one did not; what it counted is counted once."""
    network = Small(4)

    def easy(model, x, y, generator):
        return torch.full_like(x, 0.01)

    found = answers(network, images(), {"easy": easy, "pgd": ATTACKS["pgd"]}, chunk=10, ball=BALL).examples
    assert found["n"] == 46 and found["outside"] + found["changed"] == 0


def test_what_else_goes_wrong_is_not_taken_for_it():
    with pytest.raises(RuntimeError, match="shape"):
        answers(Small(3, lambda: RuntimeError("the shape is wrong")), images(), {}, chunk=10)
    assert not is_out_of_memory(RuntimeError("no memory of it")) and not is_out_of_memory(
        KeyError("CUDA out of memory")
    )
    assert is_out_of_memory(MemoryError()) and all(is_out_of_memory(each) for each in (cpu(), windows(), cuda()))


def test_the_real_allocator_is_recognized():
    assert fitted(lambda: torch.empty(2**60)) is None


def test_what_failed_is_let_go_before_the_next_try(monkeypatch):
    held = []

    def work():
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        raise cuda()

    monkeypatch.setattr(gc, "collect", lambda: None)  # by itself
    assert fitted(work) is None and held[0]() is None


def test_gradients_in_pieces_are_those_of_the_whole():
    x = images().x.double()
    pieces, network = Pieces(), Small().double()
    asked = InPieces(network, pieces)

    def slope():
        point = x.clone().requires_grad_()
        spread = asked(point).logsumexp(1).sum()
        first = torch.autograd.grad(spread, point, retain_graph=True)[0]
        return torch.stack([first, torch.autograd.grad(2 * spread, point)[0]])

    whole = slope()
    pieces.most = 4
    torch.testing.assert_close(slope(), whole, rtol=1e-12, atol=1e-12)
    assert asked(x[:0]).shape == (0, 4)


@pytest.mark.parametrize("most", [1, 2, 7, 128])
def test_the_largest_batch_that_fits_is_found_by_halving(most, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: None)  # takes long
    for limit in {0, 1, most - 1, most, most + 1, 100}:
        tried = []

        def trial(size, limit=limit, tried=tried):
            tried.append(size)
            if size > limit:
                raise cpu()

        assert largest_that_fits(trial, most) == (min(limit, most) or None)
        assert len(tried) <= 8 and max(tried) <= most and min(tried) >= 1


def test_a_trial_that_fails_otherwise_says_so():
    with pytest.raises(ZeroDivisionError):
        largest_that_fits(lambda size: 1 // 0, 8)

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from doubly.distributed import SINGLE_PROCESS
from doubly.errors import UsageError
from doubly.methods import AT, AWP, DONE
from doubly.training.second_derivatives import check_second_derivatives, is_compiled
from doubly.types import Batch

Y = torch.arange(12) % 3
BATCH = Batch(torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0)), Y, torch.arange(12))


class Forgetful(Function):
    """tanh with a backward pass that is a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.detach() * (1 - ctx.saved_tensors[0].detach().tanh().square())


class Once(Forgetful):
    backward = staticmethod(once_differentiable(Forgetful.backward))


class Last(nn.Module):
    """A last layer that applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


def network(*last):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3), *last)


class Apart(nn.Module):
    """Its input gradient does not lead back to its weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 3))

    def forward(self, x):
        return Product.apply(x.flatten(1), self.weight)


class Product(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (t.detach() for t in ctx.saved_tensors)
        with torch.no_grad():
            return gradient.detach() @ weight.T, x.T @ gradient.detach()


def test_a_network_that_has_them_passes_and_is_left_as_it_was():
    model = network()
    buffers, generator = [b.clone() for b in model.buffers()], torch.get_rng_state()
    check_second_derivatives(model, BATCH, SINGLE_PROCESS)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert torch.equal(generator, torch.get_rng_state())


def test_a_network_that_ignores_its_images_has_nothing_to_lose():
    class Prior(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.bias.expand(len(x), 3)

    check_second_derivatives(Prior(), BATCH, SINGLE_PROCESS)


def test_one_that_drops_or_refuses_them_or_is_compiled_is_refused():
    by_method, by_part = network(), network()
    by_method.compile(backend="eager")
    by_part[1] = torch.compile(by_part[1], backend="eager")
    for model, reason in [
        (Apart(), "the mixed derivative is 0"),
        (network(Last(Once)), "once_differentiable"),
        (torch.compile(network(), backend="eager"), "it is compiled"),
        (by_method, "it is compiled"),
        (by_part, "it is compiled"),
    ]:
        assert is_compiled(model) == (reason == "it is compiled")
        with pytest.raises(UsageError, match=rf"twice.*{reason}.*pass the network itself, without torch.compile"):
            check_second_derivatives(model, BATCH, SINGLE_PROCESS)


def test_a_run_that_needs_them_is_refused_before_anything_is_trained(tiny):
    tiny.network = Apart
    with pytest.raises(UsageError, match="pass the network itself"):
        tiny.train(tiny.run(AWP(DONE(tiny.attack))))
    tiny.train(tiny.run(AT(tiny.attack), epochs=1))

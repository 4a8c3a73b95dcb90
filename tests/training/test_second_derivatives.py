import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from doubly.errors import UsageError
from doubly.methods import AT, AWP, DONE, FastATGA, FastBAT
from doubly.training.second_derivatives import check_second_derivatives, is_compiled
from doubly.types import Batch

Y = torch.arange(12) % 3
BATCH = Batch(torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0)), Y, torch.arange(12))
TWICE = [DONE(), FastBAT(), FastATGA(), AWP(DONE()), AWP(FastATGA())]
ONCE = [
    AT(),
    DONE(implicit="first_order"),
    DONE(implicit="none"),
    FastBAT(curvature=float("inf")),
    FastATGA(strength=0),
]


class Forgetful(Function):
    """tanh with a backward pass that is a constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.detach() * (1 - ctx.saved_tensors[0].detach().tanh().square())


class CachedAttack(Forgetful):
    backward = staticmethod(once_differentiable(Forgetful.backward))


class Last(nn.Module):
    """The last thing that happens to the logits."""

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
    buffers, draws = [b.clone() for b in model.buffers()], torch.get_rng_state()
    check_second_derivatives(model, BATCH)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert torch.equal(draws, torch.get_rng_state())


def test_a_network_that_ignores_its_images_has_nothing_to_lose():
    class Prior(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.bias.expand(len(x), 3)

    check_second_derivatives(Prior(), BATCH)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Apart(), "the mixed derivative is 0"), (network(Last(CachedAttack)), "once_differentiable")],
    ids=["dropped", "refused"],
)
def test_one_that_drops_or_refuses_them_is_refused(model, why):
    with pytest.raises(UsageError, match=rf"twice.*{why}.*pass the network itself, doubly compiles what it may"):
        check_second_derivatives(model, BATCH)


@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a part"])
def test_a_compiled_network_is_refused(how):
    model = network()
    assert not is_compiled(model)
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    elif how == "model.compile":
        model.compile(backend="eager")
    else:
        model[1] = torch.compile(model[1], backend="eager")
    assert is_compiled(model)
    with pytest.raises(UsageError, match=r"it is compiled.*pass the network itself"):
        check_second_derivatives(model, BATCH)


@pytest.mark.parametrize("method", TWICE + ONCE, ids=repr)
def test_methods_say_whether_they_need_them(method):
    assert getattr(method, "differentiates_twice", False) is (method in TWICE)


def test_a_run_that_needs_them_is_refused_before_anything_is_trained(tiny):
    tiny.network = lambda: Apart()
    with pytest.raises(UsageError, match="pass the network itself"):
        tiny.train(tiny.run(AWP(DONE(tiny.attack))))
    tiny.train(tiny.run(AT(tiny.attack), epochs=1))

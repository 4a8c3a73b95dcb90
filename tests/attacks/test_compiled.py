"""Compiled networks: the same function as the network, or not used at all. Fake compilers except in the slow test."""

import pytest
import torch
from torch import nn

from doubly.attacks import attack_context
from doubly.attacks.compiled import CompiledForward, PlainForward, can_compile, compile_forward


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        )
        model(torch.rand(8, 2, 5, 5))
    return model.eval()


def images(n, seed=1):
    return torch.rand(n, 2, 5, 5, generator=torch.Generator().manual_seed(seed))


def logits_and_gradient(forward, x):
    """Return logits, and an input gradient to which every logit contributes with another factor."""
    point = x.clone().requires_grad_()
    logits = forward(point)
    factors = torch.linspace(1, 2, logits.numel()).view_as(logits)
    return logits.detach(), torch.autograd.grad((factors * logits).sum(), point)[0]


@pytest.fixture
def calls(monkeypatch):
    """Replace torch.compile by a function that records number of rows and memory format of each call."""
    recorded = []

    def fake_compile(forward, **options):
        def run(x):
            recorded.append((x.shape[0], x.is_contiguous(memory_format=torch.channels_last)))
            return forward(x)

        return run

    monkeypatch.setattr(torch, "compile", fake_compile)
    return recorded


def test_padded_microbatches_give_the_logits_and_gradients_of_the_network(calls):
    model = network()
    for rows in (1, 5, 16):
        forward = CompiledForward(model, rows)
        for n in (1, 7, 16, 17):
            calls.clear()
            x = images(n)
            with torch.no_grad():
                assert torch.allclose(forward(x), model(x), atol=1e-6)
            for ours, theirs in zip(logits_and_gradient(forward, x), logits_and_gradient(model, x), strict=True):
                assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-6)
            assert all(count % 16 == 0 and count < rows + 16 and channels_last for count, channels_last in calls)
            assert len(calls) == 2 * -(-n // rows)
    assert CompiledForward(model, 8)(images(0)).shape == (0, 3)


def test_rows_are_counted_with_and_without_a_graph_and_plain_is_the_network_itself(calls):
    model, x = network(), images(11)
    assert torch.equal(PlainForward(model)(x), model(x))
    for kind in (PlainForward, lambda model, count: CompiledForward(model, 8, count)):
        counted = []
        forward = kind(model, lambda rows, graph, counted=counted: counted.append((rows, graph)))
        forward(x)
        forward(x.clone().requires_grad_())
        with torch.no_grad():
            forward(x[:2].clone().requires_grad_())
        assert counted == [(11, False), (11, True), (2, False)]


@pytest.mark.filterwarnings("ignore:Use of index_put_")
def test_what_square_writes_into_the_logits_stays_out_of_the_network(calls):
    class Prior(nn.Module):
        """Returns a buffer of its own."""

        def __init__(self):
            super().__init__()
            self.register_buffer("logits", torch.arange(3.0))

        def forward(self, x):
            return self.logits.expand(len(x), 3)

    for forward in (PlainForward(model := Prior()), CompiledForward(model, 8)):
        for n in (1, 3):
            forward(images(n))[torch.arange(n), 0] = -torch.inf
            point = images(n).requires_grad_()
            assert torch.autograd.grad(forward(point).sum(), point)[0].abs().max() == 0  # connected, with gradient 0
    assert model.logits.tolist() == [0, 1, 2]


def with_gradient_factors(factors):
    """Return a fake compiler that keeps the logits and multiplies the gradient of each image."""

    def fake_compile(forward, **options):
        return lambda x: forward(x.detach() + factors(len(x)).view(-1, 1, 1, 1) * (x - x.detach()))

    return fake_compile


def raising(error):
    def run(x):
        raise error

    return lambda forward, **options: run


def refusing(forward, **options):
    raise RuntimeError("torch.compile is not supported on Python 3.14+")


def test_a_network_that_compiles_and_agrees_is_used(calls, monkeypatch):
    fast, message = compile_forward(network(), images(9))
    assert isinstance(fast, CompiledForward) and fast.compiled and fast.rows == 64
    assert message.startswith("compiled in")
    # A ReLU at its kink: the gradient of one sample of nine is off by a tenth.
    jump = with_gradient_factors(lambda n: torch.where(torch.arange(n) == 4, 1.1, 1.0))
    monkeypatch.setattr(torch, "compile", jump)
    assert compile_forward(network(), images(9))[0] is not None


def test_a_network_that_does_not_compile_or_agree_is_not_used(monkeypatch):
    cases = [
        (lambda forward, **options: lambda x: forward(x) + 0.05, "differs by"),
        (with_gradient_factors(lambda n: torch.full((n,), 2.0)), "differs by"),
        (lambda forward, **options: lambda x: torch.cat([forward(x[:1]) + 5, forward(x[1:])]), "differs by"),
        (lambda forward, **options: lambda x: forward(x) * torch.nan, "differs by nan"),
        (raising(ZeroDivisionError("division by zero")), "ZeroDivisionError: division by zero"),
        (raising(RuntimeError("first\nsecond")), "RuntimeError: first"),
        (raising(RuntimeError()), "RuntimeError: "),
        (refusing, "RuntimeError: torch.compile is not supported on Python 3.14+"),
    ]
    for fake_compile, text in cases:
        monkeypatch.setattr(torch, "compile", fake_compile)
        fast, message = compile_forward(network(), images(9))
        assert fast is None and message.startswith("not compiled: ") and text in message and "\n" not in message, text


def test_half_precision_may_differ_by_more(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **options: lambda x: 1.01 * forward(x))
    assert compile_forward(network(), images(9))[0] is None
    assert compile_forward(nn.Sequential(network(), Half()), images(9))[0] is not None


class Half(nn.Module):
    def forward(self, x):
        return x.bfloat16()


def test_a_cpu_needs_a_compiler(monkeypatch):
    for path, possible in ((None, False), ("/usr/bin/c++", True)):
        monkeypatch.setattr("shutil.which", lambda name, path=path: path)
        assert can_compile(torch.device("cpu")) is possible
        assert can_compile(torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")
def test_the_real_compiler_agrees_and_leaves_generators_modes_and_gradients_alone():
    model = network(3).train()
    model[1].eval()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    modes, buffers = [m.training for m in model.modules()], [b.clone() for b in model.buffers()]
    with attack_context(model, "eval"):
        fast, message = compile_forward(model, images(16), rows=16)
        assert fast is not None, message
        for n in (1, 5, 16, 21):
            x = images(n, seed=n)
            with torch.no_grad():
                assert torch.allclose(fast(x), model(x), atol=1e-5)
            for ours, theirs in zip(logits_and_gradient(fast, x), logits_and_gradient(model, x), strict=True):
                assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())

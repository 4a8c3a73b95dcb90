import pytest
import torch
from torch import nn

from doubly.attacks import attacked
from doubly.attacks.forward import FewShapes, Plain, can_compile, compiled


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


def both(forward, x):
    """Logits, and a gradient to which every row contributes in its own measure."""
    point = x.clone().requires_grad_()
    logits = forward(point)
    weights = torch.linspace(1, 2, logits.numel()).view_as(logits)
    return logits.detach(), torch.autograd.grad((weights * logits).sum(), point)[0]


@pytest.fixture
def seen(monkeypatch):
    """torch.compile gives a function that notes what it is called with."""
    calls = []

    def note(model, **options):
        def run(x):
            calls.append((x.shape[0], x.is_contiguous(memory_format=torch.channels_last)))
            return model(x)

        return run

    monkeypatch.setattr(torch, "compile", note)
    return calls


def test_plain_is_the_network_itself_and_counts():
    model, x, passed = network(), images(5), []
    forward = Plain(model, lambda rows, graph: passed.append((rows, graph)))
    assert torch.equal(forward(x), model(x))
    forward(x.clone().requires_grad_())
    with torch.no_grad():
        forward(x[:2].clone().requires_grad_())
    assert passed == [(5, False), (5, True), (2, False)]


@pytest.mark.parametrize("rows", [1, 5, 8, 16])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 17, 33])
def test_pieces_that_are_filled_up_give_what_the_network_gives(n, rows, seen):
    model, x = network(), images(n)
    forward = FewShapes(model, rows)
    with torch.no_grad():
        assert torch.allclose(forward(x), model(x), atol=1e-6)
    for ours, theirs in zip(both(forward, x), both(model, x), strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-6)
    assert all(count % 16 == 0 and count < rows + 16 and last for count, last in seen)
    assert len(seen) == 2 * -(-n // rows)


def test_no_images_give_no_logits(seen):
    assert FewShapes(network(), 8)(images(0)).shape == (0, 3)


def test_what_passes_is_counted_with_and_without_a_graph(seen):
    passed = []
    forward = FewShapes(network(), 8, lambda rows, graph: passed.append((rows, graph)))
    forward(images(3))
    forward(images(11).requires_grad_())
    with torch.no_grad():
        forward(images(2).requires_grad_())
    assert passed == [(3, False), (11, True), (2, False)]


@pytest.mark.parametrize("forward", [Plain, lambda model: FewShapes(model, 8)], ids=["plain", "few shapes"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.filterwarnings("ignore:Use of index_put_")
def test_what_an_attack_writes_into_the_logits_stays_out_of_the_network(forward, n, seen):
    """Square writes minus infinity over the logit of the label."""

    class Prior(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("logits", torch.arange(3.0))

        def forward(self, x):
            return self.logits.expand(len(x), 3)

    model = Prior()
    forward(model)(images(n))[torch.arange(n), 0] = -torch.inf
    assert model.logits.tolist() == [0, 1, 2]


def test_a_network_that_compiles_is_used(seen):
    fast, said = compiled(network(), images(9))
    assert isinstance(fast, FewShapes) and fast.compiled and said.startswith("compiled in") and fast.rows == 64


def steeper(model, **options):
    """The same logits with another gradient."""
    return lambda x: model(x.detach() + 2 * (x - x.detach()))


@pytest.mark.parametrize(
    ("compile_", "word"),
    [
        (lambda model, **options: lambda x: model(x) + 0.05, "differs by"),
        (steeper, "differs by"),
        (lambda model, **options: lambda x: model(x) * torch.nan, "differs by nan"),
        (lambda model, **options: lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
        (
            lambda model, **options: lambda x: (_ for _ in ()).throw(RuntimeError("first\nsecond")),
            "RuntimeError: first",
        ),
        (lambda model, **options: lambda x: (_ for _ in ()).throw(RuntimeError()), "RuntimeError: "),
    ],
    ids=["logits", "gradient", "nan", "raises", "page", "empty"],
)
def test_a_network_that_does_not_agree_or_compile_is_not_used(compile_, word, monkeypatch):
    monkeypatch.setattr(torch, "compile", compile_)
    fast, said = compiled(network(), images(9))
    assert fast is None and said.startswith("not compiled: ") and word in said and "\n" not in said


def test_where_torch_does_not_compile_at_all_the_network_itself_is_used(monkeypatch):
    def refuses(model, **options):
        raise RuntimeError("torch.compile is not supported on Python 3.14+")

    monkeypatch.setattr(torch, "compile", refuses)
    assert compiled(network(), images(9)) == (
        None,
        "not compiled: RuntimeError: torch.compile is not supported on Python 3.14+",
    )


@pytest.mark.parametrize(("found", "device", "can"), [(None, "cpu", False), ("/usr/bin/c++", "cpu", True)])
def test_a_cpu_needs_a_compiler(found, device, can, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: found)
    assert can_compile(torch.device(device)) is can
    assert can_compile(torch.device("cuda"))


def compiled_really(model, x):
    with attacked(model, "eval"):
        fast, said = compiled(model, x, rows=16)
        assert fast is not None, said
        for n in (1, 5, 16, 21):
            part = images(n, seed=n)
            with torch.no_grad():
                assert torch.allclose(fast(part), model(part), atol=1e-5)
            for ours, theirs in zip(both(fast, part), both(model, part), strict=True):
                assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")
def test_the_compiler_itself_agrees():
    compiled_really(network(), images(16))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")
def test_compiling_leaves_generators_modes_and_gradients_alone():
    model = network(3).train()
    model[1].eval()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    modes, buffers = [m.training for m in model.modules()], [b.clone() for b in model.buffers()]
    compiled_really(model, images(16))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())

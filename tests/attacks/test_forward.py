import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, NFGSM, PGD, attacked, fast
from doubly.attacks.forward import FewShapes, Plain, WholeBatch, can_compile, compiled, twin
from doubly.methods import AWP, DONE, FastATGA, FastBAT
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep


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
        (lambda model, **options: lambda x: torch.cat([model(x[:1]) + 5, model(x[1:])]), "differs by"),
        (lambda model, **options: lambda x: model(x) * torch.nan, "differs by nan"),
        (lambda model, **options: lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
        (
            lambda model, **options: lambda x: (_ for _ in ()).throw(RuntimeError("first\nsecond")),
            "RuntimeError: first",
        ),
        (lambda model, **options: lambda x: (_ for _ in ()).throw(RuntimeError()), "RuntimeError: "),
    ],
    ids=["logits", "gradient", "one sample", "nan", "raises", "page", "empty"],
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


class Watched:
    """A twin that notes what it was asked."""

    def __init__(self, model):
        self.model, self.asked = model, []

    def __call__(self, x):
        self.asked.append(len(x))
        return self.model(x)


def test_a_twin_is_handed_out_for_its_network_and_its_mode_alone():
    model, other = network().train(), network()
    twins = {mode: Watched(model) for mode in ("eval", "train")}
    with fast(model, twins):
        for mode, found in twins.items():
            with attacked(model, mode) as forward:
                assert forward is found
        with attacked(other, "eval") as forward:
            assert forward is other
        with fast(other, {}), attacked(model, "eval") as forward:
            assert forward is model
        with fast(model, {"eval": twins["eval"]}), attacked(model, "train") as forward:
            assert forward is model
        hook = model.register_forward_hook(lambda *_: None)
        with attacked(model, "eval") as forward:
            assert forward is model
        hook.remove()
        model.eval()  # an attack in training mode leaves the model as it is, and the twin was made for training
        with attacked(model, "train") as forward:
            assert forward is model
    with attacked(model, "eval") as forward:
        assert forward is model


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    ("kind", "passes"),
    [(lambda **v: PGD(steps=4, restarts=2, **v), 8), (FGSM, 1), (NFGSM, 1)],
    ids=["pgd", "fgsm", "n"],
)
def test_every_attack_asks_the_twin_and_finds_the_same(kind, passes, mode):
    model, x, y = network().train(), images(6), torch.arange(6) % 3
    plain, quick = (kind(threat=LinfBall(0.1), attack_mode=mode) for _ in range(2))
    expected = plain(model, x, y, torch.Generator().manual_seed(3))
    twins = {"eval": Watched(model), "train": Watched(model)}
    with fast(model, twins):
        assert torch.equal(quick(model, x, y, torch.Generator().manual_seed(3)), expected)
    assert twins.pop(mode).asked == [6] * passes and not next(iter(twins.values())).asked


def once(x, model):
    """A twin whose second derivatives are gone, as those of compiled networks are."""
    return CachedAttack.apply(x, model)


class CachedAttack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.logits = model(ctx.x)
        return ctx.logits.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return torch.autograd.grad(ctx.logits, ctx.x, gradient)[0], None


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        (DONE(PGD(steps=3)), 3),
        (DONE(PGD(steps=3), implicit="first_order"), 3),
        (DONE(PGD(steps=3, attack_mode="train"), curvature="full"), 3),
        (FastBAT(), 2),
        (FastATGA(), 1),
        (AWP(DONE(PGD(steps=3))), 3),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_what_is_differentiated_twice_never_asks_the_twin(method, passes):
    asked, found = [], []
    batch = Batch(images(9), torch.arange(9) % 3, torch.arange(9))
    for quick in (False, True):
        model = network().train()

        def forward(x, model=model):
            asked.append(len(x))
            return once(x, model)

        with fast(model, {"eval": forward, "train": forward} if quick else {}):
            scalar = method.objective(model, batch, method.init(), TrainStep()).loss
        scalar.backward()
        found.append([p.grad for p in model.parameters()])
    assert asked == [9] * passes
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


def test_what_draws_by_itself_does_not_agree():
    """Dropout in training mode: compiled, it draws in another way."""

    def drawing(graph, examples):
        return lambda *given: (torch.rand(1), graph.forward(*given))[1]

    model = nn.Sequential(network(), nn.Dropout(0.5)).train()
    with attacked(model, "train"):
        assert twin(model, images(32), "train", drawing)[1].startswith("not compiled: the compiled network differs")
    with attacked(model, "eval"):
        assert isinstance(twin(model, images(32), "eval", drawing)[0], FewShapes)


def test_the_twin_for_training_mode_sees_the_whole_batch():
    model, rows = network().train(), []

    def noting(graph, examples):
        return lambda *given: (rows.append(max(len(g) for g in given if isinstance(g, torch.Tensor))), graph(*given))[1]

    with attacked(model, "train"):
        found, said = twin(model, images(200), "train", noting)
        assert isinstance(found, WholeBatch), said
        for ours, theirs in zip(both(found, images(100)), both(model, images(100)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
        found(images(3))
    assert rows == [200, 100]


def test_a_jump_at_a_kink_is_no_reason_to_refuse(monkeypatch):
    """The gradient of one sample of nine is off by a tenth."""

    def jumping(model, **options):
        def run(x):
            share = torch.where(torch.arange(len(x)) == 4, 1.1, 1.0).view(-1, 1, 1, 1)
            return model(x.detach() + share * (x - x.detach()))

        return run

    monkeypatch.setattr(torch, "compile", jumping)
    assert compiled(network(), images(9))[0] is not None

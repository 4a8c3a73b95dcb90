"""Is this installation sound? Versions, device, and the gradients that everything rests on."""

import platform
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import doubly
from doubly.attacks import PGD, attacked
from doubly.attacks.compiled import can_compile, compile_forward
from doubly.bilevel import BarrierStep, Box, ConjugateGradient, RunningMean, Terms, cid, projected_descent
from doubly.checkpoints import files as checkpoint
from doubly.methods import DONE
from doubly.models import SmallCNN
from doubly.seeding import global_generators
from doubly.training.setup import chosen_device
from doubly.types import Batch, TrainStep

NO_COMPILER = "no C++ compiler, so AutoAttack is never compiled"
Finding = tuple[str, str, bool]  # what, what was found, whether it is fine


def examine(compiler: bool = False) -> Iterator[Finding]:
    """Findings one by one; the self-checks take a few seconds, and the compiler's, if asked for, half a minute."""
    device = chosen_device("auto")
    yield "doubly", doubly.__version__, True
    yield "python", platform.python_version(), True
    yield "torch", version("torch"), True
    yield "device", torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", True
    yield "threads", str(torch.get_num_threads()), True
    for name, check in (
        ("implicit gradient", implicit_gradient),
        ("first-order term", first_order_term),
        ("attack", attack_stays_inside),
        ("compiled attack", compiled_agrees if compiler else compiler_found),
        ("checkpoint", checkpoint_survives),
    ):
        begun = time.perf_counter()
        text, fine = check(device)
        yield name, f"{'ok' if fine else 'WRONG'}: {text} ({time.perf_counter() - begun:.1f} s)", fine


def implicit_gradient(device: torch.device) -> tuple[str, bool]:
    """Of a logistic loss at a converged barrier solution, against a central difference of the solved problem."""
    x = torch.tensor([[0.4, 0.6, 0.5]], dtype=torch.float64)
    box = Box(torch.full_like(x, -0.1), torch.full_like(x, 0.1), 1e-3)

    def solved(theta: Tensor) -> Tensor:
        return projected_descent(lambda d: -loss(theta, d), torch.zeros_like(x), box, BarrierStep(1.0), 400)

    def loss(theta: Tensor, delta: Tensor) -> Tensor:
        return softplus(-(x + delta) @ theta)

    theta = torch.tensor([1.0, -0.7, 0.3], dtype=torch.float64, requires_grad=True)
    delta = solved(theta.detach())
    solve = ConjugateGradient(20, 1e-12, box.inverse_curvature(delta))
    found = cid(lambda d: Terms(loss(theta, d)), delta, RunningMean(lambda u: u), {}, solve)
    (gradient,) = torch.autograd.grad(found.loss, theta)
    shifts = 1e-5 * torch.eye(3, dtype=torch.float64)
    values = [[loss(t, solved(t)) for t in (theta.detach() + s, theta.detach() - s)] for s in shifts]
    expected = torch.cat([(above - below) / 2e-5 for above, below in values])
    error = (gradient - expected).abs().max().item()
    return f"differs from a finite difference by {error:.1e}", error < 1e-6


def first_order_term(device: torch.device) -> tuple[str, bool]:
    """The implicit term by a difference quotient against the double backward, on a small smooth network."""
    with global_generators(0):
        layers = [nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)]
        model = nn.Sequential(*layers).to(device, torch.float64)
        x = torch.rand(64, 1, 8, 8, dtype=torch.float64).to(device)
    batch = Batch(x, torch.arange(64).to(device) % 10, torch.arange(64))
    delta = 0.9 * PGD()(model, batch.x, batch.y, TrainStep().generator("doctor"))

    def gradient(implicit: str) -> Tensor:
        method = DONE(implicit=implicit)  # type: ignore[arg-type]
        scalar = method.direction(model, batch, delta, {}, TrainStep()).loss
        return torch.cat([g.flatten() for g in torch.autograd.grad(scalar, list(model.parameters()))])

    plain, exact, quotient = (gradient(name) for name in ("none", "exact", "first_order"))
    cosine = torch.cosine_similarity(exact - plain, quotient - plain, 0).item()
    return f"cosine to the exact term {cosine:.4f}", cosine > 0.999


def attack_stays_inside(device: torch.device) -> tuple[str, bool]:
    with global_generators(0):
        model = SmallCNN(8).build(3, 10, [0.5] * 3, [0.5] * 3).to(device)
        x, y = torch.rand(16, 3, 16, 16).to(device), torch.arange(16).to(device) % 10
    delta = PGD()(model, x, y, TrainStep().generator("doctor"))
    longest = delta.abs().max().item()
    fine = longest <= 8 / 255 + 1e-7 and bool(((x + delta >= 0) & (x + delta <= 1)).all())
    return f"largest change {255 * longest:.3f}/255 of 8/255 allowed", fine


def compiler_found(device: torch.device) -> tuple[str, bool]:
    text = "a C++ compiler is there; doubly doctor --compile tries it" if can_compile(device) else NO_COMPILER
    return text, True


def compiled_agrees(device: torch.device) -> tuple[str, bool]:
    """Logits and input gradients of a compiled network and of the network itself."""
    if not can_compile(device):
        return NO_COMPILER, True
    with global_generators(0):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
        model = nn.Sequential(*layers).to(device)
        x = torch.rand(64, 1, 8, 8).to(device)
    with attacked(model, "eval"):
        found, sentence = compile_forward(model, x)
    return sentence if found is None else f"agrees with the uncompiled one, {sentence}", found is not None


def checkpoint_survives(device: torch.device) -> tuple[str, bool]:
    tensor = torch.arange(10, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder), "last", {"model": {"tensor": tensor}}, {"epoch": 1})
        tensors, info = checkpoint.load(Path(folder) / "last")
    return "written and read back", bool(torch.equal(tensors["model"]["tensor"], tensor)) and info["epoch"] == 1

"""doubly doctor: versions, device, and a self-check of the gradients, the attack and the checkpoints."""

import platform
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import softplus

from doubly.attacks import PGD, attack_context
from doubly.attacks.folding import TOLERANCE, find_pairs, folding_difference
from doubly.bilevel import BarrierStep, Box, ConjugateGradient, RunningMean, Terms, cid, projected_descent
from doubly.checkpoints.files import Checkpoint, load_checkpoint, save_checkpoint
from doubly.cli.tables import print_line
from doubly.config.device import select_device
from doubly.distributed import SINGLE_PROCESS
from doubly.methods import DONE
from doubly.models import SmallCNN
from doubly.seeding import global_generators
from doubly.types import Batch, TrainStep
from doubly.version import __version__

HELP = """\
usage: doubly doctor

Print versions and the device, and check gradients, attack and checkpoints on small examples in a few seconds."""
MAX_GRADIENT_ERROR = 1e-6
MIN_COSINE = 0.999  # of the first-order term to the exact one


class Finding(NamedTuple):
    """A line of the table: a name, a text, and whether all is well."""

    name: str
    text: str
    is_fine: bool = True


def doctor(arguments: list[str], out: Console, err: Console) -> int:
    """Print the findings; the exit code is 2 if one of the checks fails."""
    if arguments:
        print_line(out, HELP)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    table = Table("name", "finding", show_header=False)
    healthy = True
    for finding in examine():
        table.add_row(finding.name, finding.text, style=None if finding.is_fine else "red")
        healthy &= finding.is_fine
    out.print(table)
    return 0 if healthy else 2


def examine() -> Iterator[Finding]:
    """Yield versions and device, then the outcome of each check."""
    device = select_device("auto", SINGLE_PROCESS)
    yield Finding("doubly", __version__)
    yield Finding("python", platform.python_version())
    yield Finding("torch", version("torch"))
    yield Finding("device", torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    yield Finding("threads", str(torch.get_num_threads()))
    for name, check in (
        ("implicit gradient", check_implicit_gradient),
        ("first-order term", check_first_order_term),
        ("attack", check_attack),
        ("folded network", check_folded_network),
        ("checkpoint", check_checkpoint),
    ):
        start = time.perf_counter()
        text, is_fine = check(device)
        yield Finding(name, f"{'ok' if is_fine else 'WRONG'}: {text} ({time.perf_counter() - start:.1f} s)", is_fine)


def check_implicit_gradient(device: torch.device) -> tuple[str, bool]:
    """Compare the CID gradient of a logistic loss with a central difference of the solved inner problem."""
    x = torch.tensor([[0.4, 0.6, 0.5]], dtype=torch.float64)
    box = Box(torch.full_like(x, -0.1), torch.full_like(x, 0.1), 1e-3)

    def loss(theta: Tensor, delta: Tensor) -> Tensor:
        return softplus(-(x + delta) @ theta)

    def solve(theta: Tensor) -> Tensor:
        return projected_descent(lambda d: -loss(theta, d), torch.zeros_like(x), box, BarrierStep(1.0), 400)

    theta = torch.tensor([1.0, -0.7, 0.3], dtype=torch.float64, requires_grad=True)
    delta = solve(theta.detach())
    solver = ConjugateGradient(20, 1e-12, box.inverse_curvature(delta))
    direction = cid(lambda d: Terms(loss(theta, d)), delta, RunningMean(lambda u: u), {}, solver)
    (gradient,) = torch.autograd.grad(direction.loss, theta)
    shifts = 1e-5 * torch.eye(3, dtype=torch.float64)
    values = [[loss(t, solve(t)) for t in (theta.detach() + shift, theta.detach() - shift)] for shift in shifts]
    expected = torch.cat([(above - below) / 2e-5 for above, below in values])
    error = (gradient - expected).abs().max().item()
    return f"differs from a finite difference by {error:.1e}", error < MAX_GRADIENT_ERROR


def check_first_order_term(device: torch.device) -> tuple[str, bool]:
    """Compare DONE's implicit term by a difference quotient with the exact one, on a small smooth network."""
    with global_generators(0):
        layers = [nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)]
        model = nn.Sequential(*layers).to(device, torch.float64)
        x = torch.rand(64, 1, 8, 8, dtype=torch.float64).to(device)
    batch = Batch(x, torch.arange(64).to(device) % 10, torch.arange(64))
    delta = 0.9 * PGD()(model, batch.x, batch.y, TrainStep().generator("doctor"))

    def gradient(method: DONE) -> Tensor:
        loss = method.direction(model, batch, delta, {}, TrainStep()).loss
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])

    methods = DONE(implicit="none"), DONE(implicit="exact"), DONE(implicit="first_order")
    without, exact, quotient = map(gradient, methods)
    cosine = torch.cosine_similarity(exact - without, quotient - without, 0).item()
    return f"cosine to the exact term {cosine:.4f}", cosine > MIN_COSINE


def check_attack(device: torch.device) -> tuple[str, bool]:
    """Check that PGD stays within epsilon and within the range of images."""
    with global_generators(0):
        model = SmallCNN(8).build(3, 10, [0.5] * 3, [0.5] * 3).to(device)
        x, y = torch.rand(16, 3, 16, 16).to(device), torch.arange(16).to(device) % 10
    attack = PGD()
    delta = attack(model, x, y, TrainStep().generator("doctor"))
    largest, radius = delta.abs().max().item(), attack.threat.radius
    is_inside = largest <= radius + 1e-7 and bool(((x + delta >= 0) & (x + delta <= 1)).all())
    return f"largest change {255 * largest:.3f}/255 of {255 * radius:g}/255 allowed", is_inside


def check_folded_network(device: torch.device) -> tuple[str, bool]:
    """Compare a network with batch norm folded into its convolution, which attacks use, with the network itself."""
    with global_generators(0):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
        model = nn.Sequential(*layers).to(device)
        x = torch.rand(16, 1, 8, 8).to(device)
    with attack_context(model, "eval"):
        pairs = find_pairs(model, x)
        difference = folding_difference(model, pairs, x)
    return f"logits and gradients differ by {difference:.1g}", len(pairs) == 1 and difference <= TOLERANCE


def check_checkpoint(device: torch.device) -> tuple[str, bool]:
    """Write a checkpoint and read it back."""
    tensor = torch.arange(10, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), "last", Checkpoint({"model": {"tensor": tensor}}, {"epoch": 1}))
        loaded = load_checkpoint(Path(folder) / "last")
    is_equal = torch.equal(loaded.tensors["model"]["tensor"], tensor) and loaded.info["epoch"] == 1
    return "written and read back", is_equal

"""The cost of an attack: our PGD-20 against foolbox's and torchattacks'. A part of run.py.

All have the same network, images, steps and start (the image itself, so that all take the same path). The other
libraries get the network as a user would hand it over, with trainable parameters and contiguous.
torchattacks is not among our dependencies, since it pins an old requests: install its wheel with pip's --no-deps.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from clock import timed
from lines import Outcome, Settings, medians, ratio, taking_turns
from step_cost import EPSILON, SIZE, network
from torch import Tensor, nn

from doubly import PGD, LinfBall
from doubly.bilevel import SignStep

Attack = Callable[[], Tensor]  # -> the attacked images
AIMS = {"foolbox": 0.36, "torchattacks": 0.5}
LIBRARIES = {
    "foolbox": "foolbox is not installed: it comes with the extra dev",
    "torchattacks": "torchattacks is not installed: pip install --no-deps torchattacks==3.5.1",
}


def by_foolbox(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Attack:
    from foolbox import PyTorchModel
    from foolbox.attacks import LinfPGD
    from foolbox.criteria import Misclassification

    attack = LinfPGD(abs_stepsize=SIZE, steps=steps, random_start=False)
    wrapped = PyTorchModel(model, bounds=(0, 1), device=x.device)
    return lambda: attack.run(wrapped, x, Misclassification(y), epsilon=EPSILON)


def by_torchattacks(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Attack:
    import torchattacks

    attack = torchattacks.PGD(model, eps=EPSILON, alpha=SIZE, steps=steps, random_start=False)
    return lambda: attack(x, y)


def by_us(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Attack:
    attack = PGD(LinfBall(EPSILON), steps, SignStep(SIZE), start="zero")
    near, generator = x.contiguous(memory_format=torch.channels_last), torch.Generator()
    return lambda: near + attack(model, near, y, generator)


def entrants(name: str, x: Tensor, y: Tensor, steps: int) -> tuple[dict[str, Attack], dict[str, str]]:
    """Return the attacks that take part, and for libraries that do not the reason."""
    plain = network(name, torch.contiguous_format, x.device).eval()
    attacks = {"ours": by_us(network(name, torch.channels_last, x.device).eval(), x, y, steps)}
    reasons = {label: reason for label, reason in LIBRARIES.items() if find_spec(label) is None}
    for label, library in (("foolbox", by_foolbox), ("torchattacks", by_torchattacks)):
        if label not in reasons:
            attacks[label] = library(plain, x, y, steps)
    return attacks, reasons


def measure(settings: Settings) -> Outcome:
    device = torch.device(settings.device)
    batch_size, steps = (8, 2) if settings.quick else (128, 20)
    torch.manual_seed(0)
    x, y = torch.rand(batch_size, 3, 32, 32, device=device), torch.randint(10, (batch_size,), device=device)
    attacks, reasons = entrants("narrow_resnet", x, y, steps)
    ends = {label: attack() for label, attack in attacks.items()}  # which also warms up
    clocks = {label: lambda a=attack: timed(a, device) for label, attack in attacks.items()}
    seconds = taking_turns(clocks, settings.rounds)
    lines = [ratio(seconds, "ours", library, AIMS[library], reasons) for library in LIBRARIES]
    equal = [
        f"{label} {(end - ends['ours']).abs().lt(SIZE / 2).float().mean():.1%}"
        for label, end in ends.items()
        if label != "ours"
    ]
    note = f"Pixels that end where ours end: {', '.join(equal)}."
    return Outcome(lines, f"narrow ResNet, batch {batch_size}, {steps} steps, 3x32x32", medians(seconds), [note])

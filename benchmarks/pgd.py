"""What an attack costs: our PGD-20, compiled and eager, against foolbox's and torchattacks'.

The same network, images, steps and start (the image itself, so that all take the same path): a part of
`python benchmarks/run.py`. The rivals get the network as they would be called, parameters free and contiguous.
torchattacks is not among our dependencies, since it pins an old requests: install its wheel with pip's --no-deps.
"""

import copy
from collections.abc import Callable
from importlib.util import find_spec

import torch
from clock import timed
from lines import Outcome, Settings, medians, ratio, taking_turns
from step_cost import EPSILON, SIZE, network
from torch import Tensor, nn

from doubly import PGD, LinfBall
from doubly.attacks import attacked, forward
from doubly.bilevel import SignStep

Attack = Callable[[], Tensor]  # -> the attacked images
WITH = {
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
    near, draw = x.contiguous(memory_format=torch.channels_last), torch.Generator()
    return lambda: near + attack(model, near, y, draw)


def by_us_compiled(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Attack | str:
    """As an evaluation attacks: the compiled network in place of the model."""
    with attacked(model, "eval"):
        found, said = forward.compiled(model, x[:64])
    print(f"  {said}", flush=True)
    if found is None:
        return said
    return by_us(Called(found), x, y, steps)


class Called(nn.Module):
    """A function as a network without parameters, which is how an attack wants it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def entrants(name: str, x: Tensor, y: Tensor, steps: int) -> tuple[dict[str, Attack], dict[str, str]]:
    plain = network(name, torch.contiguous_format, x.device).eval()
    fast = network(name, torch.channels_last, x.device).eval()
    frozen = copy.deepcopy(fast).requires_grad_(False)
    found: dict[str, Attack] = {"ours": by_us(fast, x, y, steps)}
    reasons = {label: reason for label, reason in WITH.items() if find_spec(label) is None}
    compiled = by_us_compiled(frozen, x, y, steps)
    if isinstance(compiled, str):
        reasons["ours compiled"] = compiled
    else:
        found["ours compiled"] = compiled
    for label, rival in (("foolbox", by_foolbox), ("torchattacks", by_torchattacks)):
        if label not in reasons:
            found[label] = rival(plain, x, y, steps)
    return found, reasons


def measure(settings: Settings) -> Outcome:
    device = torch.device(settings.device)
    batch, steps = (8, 2) if settings.quick else (128, 20)
    torch.manual_seed(0)
    x, y = torch.rand(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    found, reasons = entrants("narrow_resnet", x, y, steps)
    ends = {label: attack() for label, attack in found.items()}  # which also warms up
    seconds = taking_turns(
        {label: lambda a=attack: timed(a, device) for label, attack in found.items()}, settings.rounds
    )
    lines = [
        ratio(seconds, ours, rival, aim, reasons)
        for ours, aim in (("ours compiled", 0.5), ("ours", None))
        for rival in WITH
    ]
    agree = [
        f"{label} {(end - ends['ours']).abs().lt(SIZE / 2).float().mean():.1%}"
        for label, end in ends.items()
        if label != "ours"
    ]
    note = f"Pixels that end where ours, eager, end: {', '.join(agree)}."
    return Outcome(lines, f"narrow ResNet, batch {batch}, {steps} steps, 3x32x32", medians(seconds), [note])

"""The answers of a network to clean and to attacked images, chunk by chunk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doubly.attacks import device_of, evaluating
from doubly.checks import check_logits
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.accuracy import Floats, Ints
from doubly.evaluation.network import sure
from doubly.losses import CrossEntropy, LogitMargin
from doubly.seeding import generator
from doubly.threat import NormBall, holds, is_image
from doubly.types import Attack


class Judged(NamedTuple):
    """Of the logits of one chunk, (B,) each."""

    classes: Tensor
    losses: Tensor
    margins: Tensor  # z_y - max_{j != y} z_j: negative where the answer is wrong, infinite where there is one class


@dataclass
class Answers:
    """Per sample, in the order of the images; and what became of the attacked images themselves."""

    classes: dict[str, Ints] = field(default_factory=dict)
    losses: dict[str, Floats] = field(default_factory=dict)
    margins: dict[str, Floats] = field(default_factory=dict)
    attacked: dict[str, Tensor] = field(default_factory=dict)  # those that were to be kept
    n: int = 0
    outside: int = 0
    changed: int = 0
    largest: float | None = None  # of |delta| / epsilon; None where no attack says its ball

    @property
    def examples(self) -> dict[str, float | None]:
        return {"n": self.n, "asked": self.n, "outside": self.outside, "changed": self.changed, "largest": self.largest}


def answers(
    model: nn.Module,
    images: Images,
    attacks: Mapping[str, Attack],
    seed: int = 0,
    chunk: int = 500,
    done: Callable[[int], None] = lambda count: None,
    keep: Tensor | None = None,
    ball: NormBall | None = None,
    seen: Callable[[str, int, Tensor, Tensor], None] = lambda name, start, losses, points: None,
) -> Answers:
    """Attack every image with every attack. The draws belong to the chunk, so `chunk` is part of the protocol.

    `keep`: positions of images whose attacked versions are kept, in rising order. `ball`: where an attack that does not
    say its own has to stay. `seen`: is shown each attacked chunk: attack, position of its first image, losses, images.
    """
    if chunk < 1:
        raise UsageError(f"a chunk has at least 1 image, got {chunk}")
    for name, attack in attacks.items():
        if getattr(attack, "leaves_the_ball", False):
            raise UsageError(f"{name} leaves the ball that it is to stay in: it is for training, not to measure with")
    device, found = device_of(model), Answers()
    parts: dict[str, list[Judged]] = {name: [] for name in ("clean", *attacks)}
    kept: dict[str, list[Tensor]] = {name: [] for name in attacks}
    with evaluating(model):
        for index, start in enumerate(range(0, len(images), chunk)):
            x, y = (
                part.to(device)
                for part in (images.pixels(slice(start, start + chunk)), images.y[start : start + chunk])
            )
            parts["clean"].append(_judged(_logits(model, x, y), y))
            for name, attack in attacks.items():
                # Attacks begin at the same points: what differs between two of them is then the attack.
                point = x + attack(model, x, y, generator(seed, 0, index, "evaluation"))
                logits = _logits(model, point, y)
                parts[name].append(_judged(logits, y))
                seen(name, start, parts[name][-1].losses, point)
                _recheck(model, logits, point, x, getattr(attack, "threat", ball), found)
                if keep is not None:
                    kept[name].append(point[keep[(keep >= start) & (keep < start + chunk)] - start].cpu())
            done(start + len(y))
    for name, judged in parts.items():
        classes, losses, margins = (torch.cat(values).cpu().numpy() for values in zip(*judged, strict=True))
        found.classes[name] = classes
        found.losses[name], found.margins[name] = losses.astype(np.float64), margins.astype(np.float64)
    found.attacked = {name: torch.cat(points) for name, points in kept.items() if points}
    return found


def _logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(x)
    check_logits(logits, y)
    return logits


def _judged(logits: Tensor, y: Tensor) -> Judged:
    return Judged(logits.argmax(1), CrossEntropy()(logits, y), -LogitMargin()(logits, y))


def _recheck(model: nn.Module, first: Tensor, point: Tensor, x: Tensor, threat: object, found: Answers) -> None:
    """Is the attacked image allowed, and is it answered alike in another batch?"""
    with torch.no_grad():
        again = model(point.flip(0)).flip(0)
    found.n += len(x)
    found.changed += int(((first.argmax(1) != again.argmax(1)) & sure(first)).sum())
    allowed = is_image(point)
    if isinstance(threat, NormBall):
        found.largest = max(found.largest or 0.0, float(threat.length(point - x).max()) / threat.radius)
        allowed &= holds(threat, point - x)
    found.outside += int((~allowed).sum())

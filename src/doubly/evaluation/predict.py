"""The answers of a network to clean and to attacked images, chunk by chunk; each process asks for its share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doubly.attacks import device_of, evaluating
from doubly.checks import check_logits
from doubly.data import Images
from doubly.distributed import collectives as parallel
from doubly.distributed.rank_zero import share, together
from doubly.errors import UsageError
from doubly.evaluation.memory import Pieces
from doubly.evaluation.metrics import Floats, Ints
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
    seen: Callable[[str, int, Tensor, Tensor], None] | None = None,
    pieces: Pieces | None = None,
) -> Answers:
    """Attack every image with every attack. The draws belong to the chunk, so `chunk` is part of the protocol.

    `keep`: positions of images whose attacked versions are kept, in rising order. `ball`: where an attack that does not
    say its own has to stay. `seen`: is shown each attacked chunk: attack, position of its first image, losses, images.
    Of several processes each attacks a part of every chunk, `pieces` at a time, and all return the same.
    """
    if chunk < 1:
        raise UsageError(f"a chunk has at least 1 image, got {chunk}")
    for name, attack in attacks.items():
        if getattr(attack, "leaves_the_ball", False):
            raise UsageError(f"{name} leaves the ball that it is to stay in: it is for training, not to measure with")
    found, wanted = Answers(), keep is not None or seen is not None
    asking = _Asking(model, images, attacks, seed, ball, wanted, pieces or Pieces(), found)
    parts: dict[str, list[Judged]] = {name: [] for name in ("clean", *attacks)}
    kept: dict[str, list[Tensor]] = {name: [] for name in attacks if keep is not None}
    with evaluating(model):
        for index, start in enumerate(range(0, len(images), chunk)):
            end = min(start + chunk, len(images))
            y, (clean, *pairs), points = images.y[start:end].cpu(), *asking.chunk(index, start, end)
            parts["clean"].append(_judged(clean, y))
            for k, name in enumerate(attacks):
                first, again = pairs[2 * k : 2 * k + 2]
                parts[name].append(_judged(first, y))
                found.n += len(y)
                found.changed += int(((first.argmax(1) != again.argmax(1)) & sure(first)).sum())
                if seen is not None:
                    seen(name, start, parts[name][-1].losses, points[k])
                if keep is not None:
                    kept[name].append(points[k][keep[(keep >= start) & (keep < end)].cpu() - start])
            done(end)
    asking.add_up()
    for name, judged in parts.items():
        classes, losses, margins = (torch.cat(values).numpy() for values in zip(*judged, strict=True))
        found.classes[name] = classes
        found.losses[name], found.margins[name] = losses.astype(np.float64), margins.astype(np.float64)
    found.attacked = {name: torch.cat(rows) for name, rows in kept.items()}
    return found


class _Piece(NamedTuple):
    """What some rows of a chunk have come to, on the CPU."""

    logits: Tensor  # (B, asked, classes): clean, and of each attack its points, asked twice in different batches
    points: tuple[Tensor, ...]  # that each attack has led to, (B, ...); none where nobody wants them
    outside: int
    largest: float | None


@dataclass(frozen=True, eq=False)
class _Asking:
    """Asks the network about one chunk after the other, each process about its share of it."""

    model: nn.Module
    images: Images
    attacks: Mapping[str, Attack]
    seed: int
    ball: NormBall | None
    wanted: bool  # the attacked images
    pieces: Pieces
    found: Answers

    def chunk(self, index: int, start: int, end: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The logits of the chunk, and its attacked images, as all processes together find them."""
        low, high = share(end - start)

        def asked(first: int, last: int) -> _Piece:
            with parallel.rows(low + first, end - start):
                return self._piece(index, slice(start + low + first, start + low + last))

        def mine() -> list[_Piece]:
            if low < high:
                return self.pieces.of(high - low, asked)
            with parallel.alone():
                return [self._nothing(index, start)]

        def whole(parts: Iterable[Tensor]) -> Tensor:
            return parallel.assembled(torch.cat(list(parts)), low, end - start)

        done = together(mine)
        for piece in done:
            self.found.outside += piece.outside
            self.found.largest = _larger(self.found.largest, piece.largest)
        points = [whole(parts) for parts in zip(*(piece.points for piece in done), strict=True)]
        return whole(piece.logits for piece in done).unbind(1), points

    def _piece(self, index: int, rows: slice) -> _Piece:
        device = device_of(self.model)
        x, y = self.images.pixels(rows).to(device), self.images.y[rows].to(device)
        logits, points, outside, largest = [_logits(self.model, x, y).cpu()], [], 0, None
        for attack in self.attacks.values():
            # Attacks begin at the same points: what differs between two of them is then the attack.
            point = x + attack(self.model, x, y, generator(self.seed, 0, index, "evaluation"))
            logits.append(_logits(self.model, point, y).cpu())
            with torch.no_grad():
                logits.append(self.model(point.flip(0)).flip(0).cpu())  # is it answered alike in another batch?
            points += [point.cpu()] if self.wanted else []
            allowed, threat = is_image(point), getattr(attack, "threat", self.ball)
            if isinstance(threat, NormBall):
                largest = _larger(largest, float(threat.length(point - x).max()) / threat.radius)
                allowed &= holds(threat, point - x)
            outside += int((~allowed).sum())
        return _Piece(torch.stack(logits, 1), tuple(points), outside, largest)

    def _nothing(self, index: int, start: int) -> _Piece:
        """No rows, of the shapes that the other processes have, which one image tells."""
        one = self._piece(index, slice(start, start + 1))
        return _Piece(one.logits[:0], tuple(points[:0] for points in one.points), 0, None)

    def add_up(self) -> None:
        """What each process has counted by itself."""
        found = self.found
        largest = -1.0 if found.largest is None else found.largest
        counted = parallel.gather(torch.tensor([[float(found.outside), largest]], dtype=torch.float64))
        found.outside, largest = int(counted[:, 0].sum()), float(counted[:, 1].max())
        found.largest = None if largest < 0 else largest


def _larger(one: float | None, other: float | None) -> float | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(x)
    check_logits(logits, y)
    return logits


def _judged(logits: Tensor, y: Tensor) -> Judged:
    return Judged(logits.argmax(1), CrossEntropy()(logits, y), -LogitMargin()(logits, y))
